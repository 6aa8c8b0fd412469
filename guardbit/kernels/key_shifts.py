"""The stabilizers that change no kernel: they subtract one vector from all keys of a head.

A vector that all keys of a head share changes neither the softmax nor, in exact arithmetic, the
gradients. It changes rounding: a wrong delta adds a multiple of sum_j P_ij K_j to dQ, which is
large where the keys share a large vector.

Shapes: q `(B, H, N, D)`; k `(B, H_kv, M, D)`, H a multiple of H_kv.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from guardbit.kernels.tensors import device_constant

#: Stabilizer -> the vector that it subtracts, FP32 `(B, G, 1, D)`, from the keys of G key heads,
#: FP32 `(B, G, M, D)`: the mean key of each sequence of this call.
KEY_SHIFTS: dict[str, Callable[[Tensor], Tensor]] = {
    "centered_keys": lambda k: k.mean(2, keepdim=True)
}


class ShiftedKeys(NamedTuple):
    """Keys from which vectors were subtracted."""

    k: Tensor  # `(B, H_kv, M, D)`, as the kernel gets it
    shift: Tensor | None  # FP32 `(B, H_kv, 1, D)`, what was subtracted; None for nothing


def shift_keys(k: Tensor, names: tuple[str, ...]) -> ShiftedKeys:
    """Subtracts from the keys what the stabilizers of the query heads ask for, one by one."""
    shift = None
    if KEY_SHIFTS.keys().isdisjoint(names) or k.size(2) == 0:
        return ShiftedKeys(k, shift)
    group = len(names) // k.size(1)
    for name, vector in KEY_SHIFTS.items():
        heads = tuple(sorted({head // group for head, own in enumerate(names) if own == name}))
        if not heads:
            continue
        index = device_constant(heads, torch.int64, k.device)
        chosen = k.index_select(1, index).float()
        own = vector(chosen)
        # A key that is not finite, in padding for example, must not make the other keys NaN.
        own = own.where(own.isfinite(), 0.0)
        k = torch.empty_like(k).copy_(k).index_copy_(1, index, (chosen - own).to(k.dtype))
        if shift is None:
            shift = torch.zeros_like(k[:, :, :1], dtype=torch.float32)
        shift.index_copy_(1, index, shift.index_select(1, index) + own)
    return ShiftedKeys(k, shift)


def shift_of_lse(q: Tensor, shift: Tensor, scale: float) -> Tensor:
    """Returns by how much the subtractions lower L, FP32 `(B, H, N)`."""
    return (q.float() * shift.repeat_interleave(q.size(1) // shift.size(1), 1)).sum(-1) * scale
