"""Centred keys, the one stabilizer that changes no kernel: the mean key is taken off every key.

Shapes: q `(B, H, N, D)`; k `(B, H_kv, M, D)`, H a multiple of H_kv.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from guardbit.kernels.constants import device_constant


class CenteredKeys(NamedTuple):
    """Keys of which some heads are centred.

    Attributes:
        k: `(B, H_kv, M, D)`, as the kernel gets it.
        mean: FP32 `(B, G, 1, D)`, the mean keys of the G centred key heads; None if there are none.
        heads: The centred key heads.
    """

    k: Tensor
    mean: Tensor | None
    heads: tuple[int, ...]


def center_keys(k: Tensor, heads: tuple[int, ...], num_heads: int) -> CenteredKeys:
    """Subtracts the mean key from the keys of some query heads.

    A vector that all keys of a head share changes neither the softmax nor, in exact arithmetic, the
    gradients. It changes rounding: a wrong delta adds a multiple of sum_j P_ij K_j to dQ, which is
    large where the keys share a large vector.

    The mean is taken over each sequence of this call. It depends on later tokens, so under a causal
    mask they change the last bits of the output. Query heads share key heads: if one query head
    asks for centred keys, its whole group gets them.

    Args:
        k: Keys `(B, H_kv, M, D)`.
        heads: The query heads that ask for it.
        num_heads: Number of query heads.

    Returns:
        See `CenteredKeys`; k itself if no head asks, else a new tensor in memory as k.
    """
    if not heads or k.size(2) == 0:
        return CenteredKeys(k, None, ())
    group = num_heads // k.size(1)
    key_heads = tuple(sorted({head // group for head in heads}))
    index = device_constant(key_heads, torch.int64, k.device)
    chosen = k.index_select(1, index).float()
    mean = chosen.mean(2, keepdim=True)
    # A key that is not finite, in padding for example, must not make the other keys NaN.
    mean = mean.where(mean.isfinite(), 0.0)
    centered = torch.empty_like(k).copy_(k)
    centered.index_copy_(1, index, (chosen - mean).to(k.dtype))
    return CenteredKeys(centered, mean, key_heads)


def shift_of_lse(q: Tensor, keys: CenteredKeys, scale: float) -> Tensor:
    """Returns by how much centring lowers L, FP32 `(B, H, N)`."""
    shift = q.new_zeros(q.shape[:-1], dtype=torch.float32)
    if keys.mean is not None:
        group = q.size(1) // keys.k.size(1)
        heads = tuple(group * h + member for h in keys.heads for member in range(group))
        index = device_constant(heads, torch.int64, q.device)
        queries = q.index_select(1, index).float()
        mean = keys.mean.repeat_interleave(group, 1)
        shift.index_copy_(1, index, (queries * mean).sum(-1) * scale)
    return shift
