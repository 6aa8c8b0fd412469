"""Which rounding moves dQ: each is taken out in turn (paper, section 3.2 and appendix F)."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from guardbit.diagnosis.arithmetic import EXACT, Arithmetic, Operation
from guardbit.diagnosis.attention import chunks
from guardbit.diagnosis.direction import Measures, Measuring
from guardbit.diagnosis.head import HeadInputs

#: What reaches dQ through delta alone, where delta is rowsum(dO O).
THROUGH_DELTA: tuple[Operation, ...] = ("P", "PV", "O")


@dataclass(frozen=True)
class Isolation:
    """What is left of the error of dQ without each of the roundings.

    Attributes:
        recorded: The error of the kernel's own dQ; None if that is not known.
        together: The error with all roundings.
        without: The error with one operation in full precision; delta's is the exact one.
        alone: The error with this one operation rounded and all others in full precision; delta's
            is that of the delta that the kernel uses.
        natural_squares: Of the norms of what dQ would be if attention were even, see
            `Chunk.natural_size`.
    """

    recorded: Measures | None
    together: Measures
    without: Mapping[Operation, Measures]
    alone: Mapping[Operation, Measures]
    natural_squares: float

    def __add__(self, other: Isolation) -> Isolation:
        recorded = None
        if self.recorded is not None and other.recorded is not None:
            recorded = self.recorded + other.recorded
        names: list[Operation] = [name for name in self.without if name in other.without]
        return Isolation(
            recorded,
            self.together + other.together,
            {name: self.without[name] + other.without[name] for name in names},
            {name: self.alone[name] + other.alone[name] for name in names},
            self.natural_squares + other.natural_squares,
        )

    @property
    def exact_part(self) -> float:
        """Norm of the exact dQ over what it would be if attention were even."""
        return math.sqrt(self.together.exact_squares / (self.natural_squares or math.inf))

    @property
    def error_part(self) -> float:
        """The same of the error."""
        return math.sqrt(self.whole.error_squares / (self.natural_squares or math.inf))

    @property
    def whole(self) -> Measures:
        """The error to be explained: the kernel's own, if it is known."""
        return self.together if self.recorded is None else self.recorded

    @property
    def operation(self) -> Operation:
        """The operation without which least of the summed error is left."""
        hidden = THROUGH_DELTA if "delta" in self.without else ()
        return self._worst(name for name in self.without if name not in hidden)

    @property
    def root(self) -> Operation:
        """Of delta what makes it wrong, else the operation itself."""
        earlier: list[Operation] = [name for name in THROUGH_DELTA if name in self.without]
        if self.operation != "delta" or not earlier:
            return self.operation
        return self._worst(earlier)

    def _worst(self, names: Iterable[Operation]) -> Operation:
        left: list[tuple[float, Operation]] = [(self.without[name].summed, name) for name in names]
        return min(left)[1]

    def moved_back(self, operation: Operation) -> float:
        """Which part of the summed error is gone without an operation's rounding."""
        return 1 - self.without[operation].summed / (self.together.summed or 1.0)


def isolate(head: HeadInputs, arithmetic: Arithmetic) -> Isolation:
    """Takes out each rounding of an arithmetic in turn, and puts in each alone."""
    names: list[Operation] = [*arithmetic.roundings]
    if arithmetic.delta != "probabilities" and "delta" not in names:
        names.append("delta")
    together, recorded = Measuring(head), None if head.dq is None else Measuring(head)
    without: dict[Operation, Measuring] = {name: Measuring(head) for name in names}
    alone: dict[Operation, Measuring] = {name: Measuring(head) for name in names}
    natural_squares = 0.0
    for chunk in chunks(head):
        natural_squares += float(chunk.natural_size.square().sum())
        rows, exact = chunk.head, chunk.exact.dq
        usual = chunk.run(arithmetic)
        together.add(rows, usual.dq, exact)
        if recorded is not None:
            recorded.add(rows, chunk.wide("dq"), exact)
        for name in names:
            without[name].add(rows, chunk.run(arithmetic.without(name)).dq, exact)
            if name == "delta":
                d_scores = chunk.probabilities * (chunk.d_probabilities - usual.delta[..., None])
                found = chunk.query_gradient(EXACT, d_scores, chunk.wide("k"))
            else:
                found = chunk.run(EXACT.with_rounding(name, arithmetic.roundings[name])).dq
            alone[name].add(rows, found, exact)
    return Isolation(
        None if recorded is None else recorded.done(),
        together.done(),
        {name: measuring.done() for name, measuring in without.items()},
        {name: measuring.done() for name, measuring in alone.items()},
        natural_squares,
    )
