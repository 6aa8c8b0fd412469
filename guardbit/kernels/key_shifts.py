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
    # The key heads, G of them, and FP32 `(B, G, 1, D)`, what was subtracted there; in the order of
    # the subtractions.
    shifts: list[tuple[tuple[int, ...], Tensor]]


def shift_keys(k: Tensor, names: tuple[str, ...]) -> ShiftedKeys:
    """Subtracts from the keys what the stabilizers of the query heads ask for."""
    keys = ShiftedKeys(k, [])
    if KEY_SHIFTS.keys().isdisjoint(names) or k.size(2) == 0:
        return keys
    group = len(names) // k.size(1)
    for name, vector in KEY_SHIFTS.items():
        heads = tuple(sorted({head // group for head, own in enumerate(names) if own == name}))
        if heads:
            keys = _shifted(keys, heads, vector)
    return keys


def _shifted(
    keys: ShiftedKeys, heads: tuple[int, ...], vector: Callable[[Tensor], Tensor]
) -> ShiftedKeys:
    k, shifts = keys
    index = device_constant(heads, torch.int64, k.device)
    chosen = k.index_select(1, index).float()
    shift = vector(chosen)
    # A key that is not finite, in padding for example, must not make the other keys NaN.
    shift = shift.where(shift.isfinite(), 0.0)
    result = torch.empty_like(k).copy_(k)
    result.index_copy_(1, index, (chosen - shift).to(k.dtype))
    return ShiftedKeys(result, [*shifts, (heads, shift)])


def shift_of_lse(q: Tensor, keys: ShiftedKeys, scale: float) -> Tensor:
    """Returns by how much the subtractions lower L, FP32 `(B, H, N)`."""
    total = q.new_zeros(q.shape[:-1], dtype=torch.float32)
    group = q.size(1) // keys.k.size(1)
    for key_heads, shift in keys.shifts:
        heads = tuple(group * h + member for h in key_heads for member in range(group))
        index = device_constant(heads, torch.int64, q.device)
        products = q.index_select(1, index).float() * shift.repeat_interleave(group, 1)
        total.index_copy_(1, index, total.index_select(1, index) + products.sum(-1) * scale)
    return total
