"""How the kernel in use rounds, inferred from the output and the dQ that it returned.

Output and dQ are computed with each operation rounded in other ways. The kernel rounds in the way
that comes nearest to what it returned: with the right roundings most numbers agree to the bit.
"""

import math
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from guardbit.doctor.attention import (
    FLASH,
    Arithmetic,
    Chunk,
    DeltaSource,
    HeadInputs,
    Operation,
    Rounding,
    chunks,
    over_rows,
    spread,
)
from guardbit.doctor.exact import EXPONENTIAL, FLOAT32

Kind = Literal["rounded", "truncated", "dropped", "rows"]

# Rows on which arithmetics are compared: enough to distinguish them, and quick.
_ROWS = 512
# An arithmetic takes the place of another where it is nearer than this part of the distance.
_NEARER = 0.5
# The part of the rows (the best ones) over which a distance is taken: a race changes some rows, an
# arithmetic all.
_AGREEING = 0.75
# Distances below this part of half a unit in the last place come from FP32 and the order of
# additions: one number in hundreds is then rounded to the other side.
_SAME = 0.02
# How many standard deviations of its roundings a row of dQ may lie off.
_FAR = 4.0

# What the kernel returned -> the operations whose roundings show in it.
_SHOWN: dict[str, tuple[Operation, ...]] = {
    "out": ("S", "P", "PV", "O"),
    "dq": ("S", "delta", "dP", "dS", "dQ"),
}


@dataclass(frozen=True)
class Fault:
    """A difference from FlashAttention-2 that harms dQ."""

    operation: Operation  # where it is; "dQ" for wrong rows
    kind: Kind  # rounded where FP32 is kept, truncated, dropped, or wrong in some rows only
    why: str  # a sentence


def recognize(head: HeadInputs) -> tuple[Arithmetic, tuple[Fault, ...]]:
    """Finds the arithmetic of what a kernel returned, FLASH if that is unknown, and its faults."""
    some = head.take(spread(len(head.rows), _ROWS))
    arithmetic = FLASH
    if head.out is not None:
        arithmetic = _nearest(some, arithmetic, "out")
    if head.dq is not None:  # the backward recomputes S and uses the sum that the forward saved
        arithmetic = _nearest(some, arithmetic, "dq")
    faults = _faults(arithmetic)
    if head.dq is not None:
        wrong = wrong_rows(head, arithmetic)
        if 0 < wrong.double().mean() <= 1 - _AGREEING:
            sequence, row = torch.nonzero(wrong)[0].tolist()
            why = (
                f"{int(wrong.sum())} of {wrong.numel()} rows of dQ are wrong, the first row"
                f" {int(head.rows[row])} of sequence {sequence}, all others as roundings make them:"
                " the cause is a race of threads, or a tile that was not written"
            )
            faults.append(Fault("dQ", "rows", why))
    return arithmetic, tuple(faults)


def wrong_rows(head: HeadInputs, arithmetic: Arithmetic) -> Tensor:
    """Returns which rows of a kernel's dQ are further off than an arithmetic's roundings reach."""
    info = torch.finfo(head.q.dtype)
    u = info.eps / 2

    def compute(chunk: Chunk) -> dict[str, Tensor]:
        expected = chunk.run(arithmetic, chunk.own_out)
        keys = chunk.wide("k").norm(dim=-1)[:, None]
        d_out = chunk.wide("d_out").norm(dim=-1)
        p, dp = chunk.probabilities, chunk.d_probabilities
        scores = chunk.scores.masked_fill(chunk.scores.isinf(), 0.0).abs().amax(-1)
        # Of P in FP32, of delta in FP32, and of dS and dQ rounded once, to either side.
        of_p = EXPONENTIAL + FLOAT32 * (scores * 4 + head.q.size(-1))
        of_delta = FLOAT32 * head.v.size(-1) * d_out * expected.out.norm(dim=-1)
        parts = p * (of_p[..., None] * (dp - expected.delta[..., None]).abs() + of_delta[..., None])
        deviations = (u * expected.d_scores * keys).square().sum(-1).sqrt()
        size = head.scale * ((parts * keys).sum(-1) + deviations) + u * expected.dq.norm(dim=-1)
        error = (chunk.wide("dq") - expected.dq).norm(dim=-1)
        return {"wrong": error > _FAR * size + info.smallest_normal}

    return over_rows(head, compute)["wrong"]


def _nearest(head: HeadInputs, start: Arithmetic, name: str) -> Arithmetic:
    """Changes an arithmetic one operation at a time, as long as that brings it far nearer."""
    parts, best = list(chunks(head)), start
    target = torch.cat([chunk.wide(name) for chunk in parts], 1)
    unit = torch.finfo(head.q.dtype).eps / 2

    def distance(way: Arithmetic) -> float:
        made = [
            chunk.forward(way) if name == "out" else chunk.run(way, chunk.own_out).dq
            for chunk in parts
        ]
        rest = torch.cat(made, 1) - target
        sizes = target.square().sum(-1).flatten()
        shares = (rest.square().sum(-1).flatten() / sizes.clamp(min=1e-300)).sort().values
        return math.sqrt(float(shares[: max(1, math.ceil(_AGREEING * len(shares)))].mean())) / unit

    least = distance(start)
    while least > _SAME:
        found = [(distance(way), way) for way in _others(best, name)]
        nearest, way = min(found, key=lambda pair: pair[0])
        if nearest > _NEARER * least:
            break
        best, least = way, nearest
    return best


def _others(way: Arithmetic, name: str) -> list[Arithmetic]:
    hows: tuple[Rounding | None, ...] = (None, "nearest", "truncated")
    others = [
        way.with_rounding(operation, how)
        for operation in _SHOWN[name]
        for how in hows
        if how != way.roundings.get(operation)
    ]
    sources: tuple[DeltaSource, ...] = ("output", "probabilities", "dropped")
    if name == "dq":
        others += [replace(way, delta=source) for source in sources if source != way.delta]
    return others


def _faults(arithmetic: Arithmetic) -> list[Fault]:
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
