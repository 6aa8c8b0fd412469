"""Diagnoses one head from its inputs at one sampled step or at several."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from operator import add
from typing import Literal

import torch

from guardbit.diagnosis.arithmetic import Operation
from guardbit.diagnosis.attention import thinned
from guardbit.diagnosis.direction import Measures
from guardbit.diagnosis.head import HeadInputs
from guardbit.diagnosis.isolation import Isolation, isolate
from guardbit.diagnosis.recognition import Fault, recognize
from guardbit.diagnosis.remedies import try_remedies
from guardbit.diagnosis.roots import Roots, find_roots
from guardbit.diagnosis.row_error import RowError, take_apart
from guardbit.kernels.reference.common import float32_products

#: "fault": the kernel does what no sound one does. "rounding": errors of rounding add up in W_Q.
#: "not rounding": dQ is right. "unclear": it is not, but its errors do not add up in these rows.
Cause = Literal["fault", "rounding", "not rounding", "unclear"]

# Parts of the gradient from which on an error is no noise. In the eight sound runs that this was
# set with no audit of a head found more than 0.019 of dQ along W_Q's top direction; in the eight
# since then one found 0.15, and all others 0.052 at most.
_LARGE = 0.1
# Part of the natural size of dQ below which an error is of no size. BF16 makes 1e-3 to 1e-2 of it
# in sound heads and 5e-4 or more in alarmed ones of the study; 1e-7 in most heads that a learning
# rate far too high had ruined. So small an error is a large part of dQ only where the exact one has
# vanished, because one key has all the attention, say.
_VANISHED = 1e-5
# The same part of an exact dQ below which the head has come to its end, whatever the cause.
_SATURATED = 1e-4
# Standard deviations that a push must have to be no chance: 6e-5 of normal deviates have more.
_SURE = 4.0


@dataclass(frozen=True)
class Diagnosis:
    """What was found of one head.

    Attributes:
        cause: See `Cause`.
        faults: What the kernel does otherwise than FlashAttention-2.
        operation: The operation that moves dQ: the first fault's, else that of the rounding without
            which least of the summed error is left.
        root: Where that is delta, what makes delta wrong.
        isolation: What is left without each rounding.
        remedies: What is left with each remedy, by name.
        roots: Rows, keys and columns of the last sample.
        row: The row of that sample with the largest push, taken apart.
        samples: How many were looked at.
        rows: How many rows were looked at, of all samples.
    """

    cause: Cause
    faults: tuple[Fault, ...]
    operation: Operation
    root: Operation
    isolation: Isolation
    remedies: Mapping[str, Measures]
    roots: Roots
    row: RowError
    samples: int
    rows: int

    @property
    def is_saturated(self) -> bool:
        """Whether the exact dQ has vanished, so that what is left of dQ is rounding."""
        return _is_saturated(self.isolation) or _is_noise(self.isolation)

    @property
    def error(self) -> Measures:
        """The error of dQ."""
        return self.isolation.whole


@torch.no_grad()
def diagnose(samples: Sequence[HeadInputs]) -> Diagnosis:
    """Diagnoses a head; what adds up is looked for over all samples together."""
    if not samples:
        raise ValueError("there is no sample of the head to diagnose")
    samples = [thinned(sample) for sample in samples]
    with float32_products():
        found = [recognize(sample) for sample in samples]
        isolation = reduce(
            add,
            (isolate(sample, way.arithmetic) for sample, way in zip(samples, found, strict=True)),
        )
        remedies = [try_remedies(sample) for sample in samples]
        roots = find_roots(samples[-1], found[-1].arithmetic)
        sequence, place = divmod(int(roots.row_push.abs().argmax()), roots.row_push.size(1))
        row = take_apart(samples[-1], found[-1].arithmetic, sequence, place)
    faults = {(fault.operation, fault.kind): fault for way in found for fault in way.faults}
    first = next(iter(faults.values()), None)
    return Diagnosis(
        "fault" if faults else _cause(isolation),
        tuple(faults.values()),
        isolation.operation if first is None else first.operation,
        isolation.root if first is None else first.operation,
        isolation,
        {name: reduce(add, (each[name] for each in remedies)) for name in remedies[0]},
        roots,
        row,
        len(samples),
        sum(sample.q.size(0) * sample.q.size(1) for sample in samples),
    )


def _cause(isolation: Isolation) -> Cause:
    error = isolation.whole
    if _is_noise(isolation):
        return "not rounding"
    if _is_saturated(isolation):
        return "unclear"
    if abs(error.push_share) >= _LARGE and abs(error.significance) >= _SURE:
        return "rounding"
    return "unclear" if error.relative_error >= _LARGE else "not rounding"


def _is_noise(isolation: Isolation) -> bool:
    """Whether dQ is mostly error, and that error is of no size: the exact dQ has vanished."""
    return isolation.error_part < _VANISHED and isolation.whole.relative_error >= _LARGE


def _is_saturated(isolation: Isolation) -> bool:
    return isolation.exact_part < _SATURATED
