"""The rule `large_error`: one audit of a head shows a large error of dQ."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import ClassVar

from guardbit.monitor.detectors.rule import (
    Finding,
    Snapshot,
    State,
    Values,
    check_thresholds,
    heads_where,
)
from guardbit.monitor.detectors.rules.gradient_error import counted_errors
from guardbit.records import Role


@dataclass(frozen=True, slots=True)
class LargeError:
    """One audit finds half the mean error that `gradient_error` tolerates: an advisory, no alarm.

    The head is audited at every sampled step from then on, so that `gradient_error` need not wait
    for its turn, and what rounding does to its W_Q is measured. What counts as an error is said
    there. In the sound runs two audits of 81,507 are so large, 0.152 and 0.052; in all of the study
    that had every head audited and no correction, the first comes at steps 1,200 to 2,600, but for
    one at 6,800.

    Attributes:
        tolerated: Size of a coherent error of dQ above which a head is named.
    """

    reads: ClassVar[tuple[tuple[str, ...], ...]] = (("dq_coherent_error",),)

    role: ClassVar[Role] = Role(is_advisory=True)

    name: str = "large_error"
    tolerated: float = 0.05

    def __post_init__(self) -> None:
        check_thresholds(self)

    def examine(self, snapshot: Snapshot, state: State) -> list[Finding]:
        """Returns the heads whose audit at this step shows a large error."""
        return [
            Finding(site, heads, partial(_why, sizes))
            for site, sizes in counted_errors(snapshot, state).items()
            if (heads := heads_where(sizes > self.tolerated))
        ]


def _why(sizes: Values, heads: tuple[int, ...]) -> str:
    top = max(heads, key=lambda head: sizes[head])
    return (
        f"one audit of head {top} finds an error of {sizes[top]:.2g} of dQ along the top direction"
        " of its W_Q, so it is audited at every sampled step"
    )
