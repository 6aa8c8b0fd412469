"""What each remedy leaves of the error of dQ, on the very inputs of the head."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from guardbit.diagnosis.arithmetic import FLASH
from guardbit.diagnosis.attention import Chunk, chunks
from guardbit.diagnosis.direction import Measures, Measuring
from guardbit.diagnosis.head import HeadInputs
from guardbit.kernels.key_shifts import shift_keys
from guardbit.kernels.reference.forward_pass import SHIFT_MAX, SHIFT_MAX_FP16, SHIFT_MIN
from guardbit.numerics import decode_residual, encode_residual, round_nearest

# `row_max` as a switch has it: distance of a tie from the maximum, and the factor beta less 1.
_TIED, _FACTOR = 1e-3, 1.0


def try_remedies(head: HeadInputs) -> dict[str, Measures]:
    """Computes dQ with FlashAttention-2's roundings and each remedy."""
    found = {name: Measuring(head) for name in _REMEDIES}
    centred = shift_keys(head.k[:, None], ("centered_keys",)).k[:, 0]
    for chunk in chunks(head):
        for name, remedy in _REMEDIES.items():
            found[name].add(chunk.head, remedy(chunk, centred), chunk.exact.dq)
    return {name: measuring.done() for name, measuring in found.items()}


def _none(chunk: Chunk, centred: Tensor) -> Tensor:
    return chunk.run(FLASH).dq


def _exact_delta(chunk: Chunk, centred: Tensor) -> Tensor:
    return chunk.run(FLASH.without("delta")).dq


def _centered_keys(chunk: Chunk, centred: Tensor) -> Tensor:
    return Chunk(chunk.head.with_keys(centred), chunk.place).run(FLASH).dq


def _compensated(chunk: Chunk, centred: Tensor) -> Tensor:
    """The sum of P is of the rounded one; what rounding took from O is kept, for delta."""
    numerators, total, _ = chunk.softmax(chunk.scores)
    rounded = FLASH.rounded("P", numerators, chunk.head.q.dtype)
    total = total + rounded.sum(-1, keepdim=True) - numerators.sum(-1, keepdim=True)
    exact = (rounded @ chunk.wide("v") / total).float()
    out = round_nearest(exact, chunk.head.q.dtype)
    kept = decode_residual(out, encode_residual(exact, out)).double()
    return _backward(chunk, numerators / total, out.double() + kept)


def _row_max(chunk: Chunk, centred: Tensor) -> Tensor:
    """Rows with more than one maximum are normalised by more than it."""
    dtype = chunk.head.q.dtype
    numerators, total, top = chunk.softmax(chunk.scores)
    most = SHIFT_MAX_FP16 if dtype == torch.float16 else SHIFT_MAX
    tied = (top - chunk.scores <= _TIED).sum(-1, keepdim=True) > 1
    shift = SHIFT_MIN + (_FACTOR * top.abs()) % (most - SHIFT_MIN)
    factor = torch.where(tied, (-shift).exp(), 1.0)
    sums = FLASH.rounded("P", numerators * factor, dtype) @ chunk.wide("v")
    out = FLASH.rounded("O", sums / (total * factor), dtype)
    return _backward(chunk, numerators / total, out)


def _float32(chunk: Chunk, centred: Tensor) -> Tensor:
    """FP32 where FlashAttention-2 rounds, as is what FP32 makes of S, P, dP and delta."""
    single = Chunk(chunk.head, chunk.place)
    p = chunk.scores.float().softmax(-1).nan_to_num(0.0)
    if chunk.head.sink is not None:
        p = chunk.probabilities.float()
    dp = chunk.head.d_out.float() @ chunk.head.v.float().mT
    d_scores = p * (dp - (p * dp).sum(-1, keepdim=True))
    return single.query_gradient(FLASH.without("dQ"), d_scores.double(), chunk.wide("k"))


def _backward(chunk: Chunk, p: Tensor, out: Tensor) -> Tensor:
    """FlashAttention-2's backward with a P and an O of one's own."""
    delta = (chunk.wide("d_out") * out).sum(-1, keepdim=True)
    d_scores = FLASH.rounded("dS", p * (chunk.d_probabilities - delta), chunk.head.q.dtype)
    return chunk.query_gradient(FLASH, d_scores, chunk.wide("k"))


_REMEDIES: dict[str, Callable[[Chunk, Tensor], Tensor]] = {
    "none": _none,
    "exact_delta": _exact_delta,
    "centered_keys": _centered_keys,
    "compensated": _compensated,
    "row_max": _row_max,
    "FP32": _float32,
}
