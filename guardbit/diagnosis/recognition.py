"""How the kernel in use rounds, read off the output and the dQ that it returned.

The output and dQ are computed with each operation rounded otherwise, and what comes nearest to what
the kernel returned is how it rounds: with the right roundings most numbers agree to the bit.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from guardbit.diagnosis.arithmetic import (
    FLASH,
    Arithmetic,
    DeltaSource,
    Operation,
    Rounding,
)
from guardbit.diagnosis.attention import Chunk, chunks, rows_of
from guardbit.diagnosis.head import HeadInputs

Kind = Literal["rounded", "truncated", "dropped", "rows"]

# Rows that arithmetics are compared on: enough to tell them apart, and quick.
_ROWS = 512
# An arithmetic takes the place of another where it is nearer than this part of the distance.
_NEARER = 0.5
# A distance is of the rows that agree best: a race touches some rows, an arithmetic all.
_AGREEING = 0.75
# Distances below this part of half a unit in the last place are those of FP32 and of the order of
# additions: one number in hundreds is then rounded to the other side.
_SAME = 0.02
# How many standard deviations of its roundings a row of dQ may lie from the arithmetic.
_FAR = 4.0
# Relative error of FP32's rounding, and of exponentials by polynomials (`doctor.exact`).
_FLOAT32, _EXPONENTIAL = 2.0**-24, 1e-4

_FORWARD: tuple[Operation, ...] = ("S", "P", "PV", "O")
_BACKWARD: tuple[Operation, ...] = ("S", "delta", "dP", "dS", "dQ")


@dataclass(frozen=True)
class Fault:
    """What a kernel does otherwise than FlashAttention-2, to the harm of dQ.

    Attributes:
        operation: Where; of wrong rows "dQ".
        kind: Rounded where FP32 is kept, truncated, dropped, or wrong in some rows only.
        why: A sentence.
    """

    operation: Operation
    kind: Kind
    why: str


@dataclass(frozen=True)
class Recognition:
    """How a kernel rounds.

    Attributes:
        arithmetic: The one that explains best what it returned.
        faults: Where that is not FlashAttention-2's, forward first.
        unexplained: Which part of the rows of dQ no arithmetic explains.
    """

    arithmetic: Arithmetic
    faults: tuple[Fault, ...]
    unexplained: float


def recognize(head: HeadInputs) -> Recognition:
    """Finds the arithmetic of a head's kernel; FlashAttention-2's if it returned nothing known."""
    some = rows_of(head, _spread(len(head.rows)))
    forward = backward = FLASH
    if head.out is not None:
        forward = _nearest(
            some, FLASH, "out", _other_forwards, lambda chunk, way: chunk.forward(way)
        )
    if head.dq is not None:
        # S is recomputed in the backward, from the sum that the forward kept.
        start = FLASH.with_rounding("S", forward.roundings.get("S"))

        def backwards(chunk: Chunk, way: Arithmetic) -> Tensor:
            own = None if chunk.head.out is None else chunk.wide("out")
            return chunk.run(way, own).dq

        backward = _nearest(some, start, "dq", _other_backwards, backwards)
    roundings: dict[Operation, Rounding] = {}
    for way, names in ((backward, _BACKWARD), (forward, _FORWARD)):
        roundings |= {name: way.roundings[name] for name in names if name in way.roundings}
    arithmetic = Arithmetic(roundings, backward.delta)
    faults = tuple(_faults(arithmetic))
    if head.dq is None:
        return Recognition(arithmetic, faults, 0.0)
    wrong = wrong_rows(head, arithmetic)
    share = float(wrong.double().mean())
    if 0 < share <= 1 - _AGREEING:
        faults = (*faults, Fault("dQ", "rows", _tell_rows(head, wrong)))
    return Recognition(arithmetic, faults, share)


def wrong_rows(head: HeadInputs, arithmetic: Arithmetic) -> Tensor:
    """Returns which rows of the kernel's dQ are further from an arithmetic than roundings reach."""
    u = torch.finfo(head.q.dtype).eps / 2
    found = []
    for chunk in chunks(head):
        own = None if head.out is None else chunk.wide("out")
        expected = chunk.run(arithmetic, own)
        keys = chunk.wide("k").norm(dim=-1)[:, None]
        d_out = chunk.wide("d_out").norm(dim=-1)
        p, dp = chunk.probabilities, chunk.d_probabilities
        scores = chunk.scores.masked_fill(chunk.scores.isinf(), 0.0).abs().amax(-1)
        # Of P in FP32, of delta in FP32, and of dS and dQ rounded once, to either side.
        of_p = _EXPONENTIAL + _FLOAT32 * (scores * 4 + head.q.size(-1))
        of_delta = _FLOAT32 * head.v.size(-1) * d_out * expected.out.norm(dim=-1)
        parts = p * (of_p[..., None] * (dp - expected.delta[..., None]).abs() + of_delta[..., None])
        spread = (u * expected.d_scores * keys).square().sum(-1).sqrt()
        size = head.scale * ((parts * keys).sum(-1) + spread) + u * expected.dq.norm(dim=-1)
        tiny = torch.finfo(head.q.dtype).smallest_normal
        found.append((chunk.wide("dq") - expected.dq).norm(dim=-1) > _FAR * size + tiny)
    return torch.cat(found, 1)


def _spread(count: int) -> Tensor:
    """Some rows, evenly spread, all that there are if they are few."""
    return torch.linspace(0, count - 1, min(count, _ROWS), dtype=torch.float32).round().long()


def _nearest(
    head: HeadInputs,
    start: Arithmetic,
    name: str,
    others: Callable[[Arithmetic], list[Arithmetic]],
    compute: Callable[[Chunk, Arithmetic], Tensor],
) -> Arithmetic:
    """Goes from an arithmetic to others, one operation at a time, as long as each is far nearer."""
    parts, best = list(chunks(head)), start
    target = torch.cat([chunk.wide(name) for chunk in parts], 1)
    unit = torch.finfo(head.q.dtype).eps / 2

    def distance(way: Arithmetic) -> float:
        rest = torch.cat([compute(chunk, way) for chunk in parts], 1) - target
        sizes = target.square().sum(-1).flatten()
        shares = (rest.square().sum(-1).flatten() / sizes.clamp(min=1e-300)).sort().values
        kept = shares[: max(1, math.ceil(_AGREEING * len(shares)))]
        return math.sqrt(float(kept.mean())) / unit

    least = distance(start)
    while least > _SAME:
        found = [(distance(way), way) for way in others(best)]
        nearest, way = min(found, key=lambda pair: pair[0])
        if nearest > _NEARER * least:
            break
        best, least = way, nearest
    return best


def _other_forwards(way: Arithmetic) -> list[Arithmetic]:
    return _otherwise(way, _FORWARD)


def _other_backwards(way: Arithmetic) -> list[Arithmetic]:
    sources: tuple[DeltaSource, ...] = ("output", "probabilities", "dropped")
    ways = [replace(way, delta=source) for source in sources if source != way.delta]
    return _otherwise(way, _BACKWARD) + ways


def _otherwise(way: Arithmetic, operations: tuple[Operation, ...]) -> list[Arithmetic]:
    hows: tuple[Rounding | None, ...] = (None, "nearest", "truncated")
    return [
        way.with_rounding(name, how)
        for name in operations
        for how in hows
        if how != way.roundings.get(name)
    ]


def _faults(arithmetic: Arithmetic) -> list[Fault]:
    """Where an arithmetic is worse than FlashAttention-2's."""
    faults: list[Fault] = []
    for name, how in arithmetic.roundings.items():
        if how == "truncated":
            why = f"{name} is truncated: rounded towards zero, which makes all of it too small"
            faults.append(Fault(name, "truncated", why))
        elif name not in FLASH.roundings:
            why = f"{name} is rounded to the format of the inputs, where kernels keep FP32"
            faults.append(Fault(name, "rounded", why))
    if arithmetic.delta == "dropped":
        why = "delta is missing: the rows of dS do not sum to 0"
        faults.append(Fault("delta", "dropped", why))
    return faults


def _tell_rows(head: HeadInputs, wrong: Tensor) -> str:
    sequence, row = torch.nonzero(wrong)[0].tolist()
    count, position = int(wrong.sum()), int(head.rows[row])
    return (
        f"{count} of {wrong.numel()} rows of dQ are wrong, the first row {position} of sequence"
        f" {sequence}, and all others are as roundings make them: no rounding does that; a race of"
        " threads does, or a tile that was not written"
    )
