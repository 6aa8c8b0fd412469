"""The stabilizer that changes no kernel: it subtracts their mean from all keys of a head.

A vector that all keys of a head share changes neither the softmax nor, in exact arithmetic, the
gradients. It changes rounding: a wrong delta adds a multiple of sum_j P_ij K_j to dQ, which is
large where the keys share a large vector.

Shapes: q `(B, H, N, D)`; k `(B, H_kv, M, D)`, H a multiple of H_kv.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from guardbit.kernels.tensors import device_constant

CENTERED = "centered_keys"


class ShiftedKeys(NamedTuple):
    """Keys from which vectors were subtracted."""

    k: Tensor  # `(B, H_kv, M, D)`, as the kernel gets it
    shift: Tensor | None  # FP32 `(B, H_kv, 1, D)`, what was subtracted; None for nothing


def shift_keys(k: Tensor, names: tuple[str, ...]) -> ShiftedKeys:
    """Subtracts the mean key of each sequence where the stabilizer of a query head asks for it."""
    if CENTERED not in names or k.size(2) == 0:
        return ShiftedKeys(k, None)
    group = len(names) // k.size(1)
    heads = tuple(sorted({head // group for head, name in enumerate(names) if name == CENTERED}))
    index = device_constant(heads, torch.int64, k.device)
    chosen = k.index_select(1, index).float()
    mean = chosen.mean(2, keepdim=True)
    # A key that is not finite, in padding for example, must not make the other keys NaN.
    mean = mean.where(mean.isfinite(), 0.0)
    k = torch.empty_like(k).copy_(k).index_copy_(1, index, (chosen - mean).to(k.dtype))
    shift = torch.zeros_like(k[:, :, :1], dtype=torch.float32).index_copy_(1, index, mean)
    return ShiftedKeys(k, shift)


def shift_of_lse(q: Tensor, shift: Tensor, scale: float) -> Tensor:
    """Returns by how much the subtractions lower L, FP32 `(B, H, N)`."""
    return (q.float() * shift.repeat_interleave(q.size(1) // shift.size(1), 1)).sum(-1) * scale
