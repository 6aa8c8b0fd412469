"""The rule `loss_departure`: the loss has left its best level."""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass
from typing import ClassVar

from guardbit.monitor.detectors.rule import OVERFLOW, Finding, Snapshot, State, check_thresholds
from guardbit.records import Role


@dataclass(frozen=True, slots=True)
class LossDeparture:
    """The loss has left its best level: whatever the cause, the run is failing.

    It is no early sign. It dates the failure, and separates a divergence without any sign in the
    heads from a stable run. The statistic is the median of the last `samples` losses less the
    smallest such median so far. What is not finite, -inf too, counts as the largest number.

    Largest rise in the stable runs 0.33 nats (all at step 6,440, over the same hard batches), in
    the failing run 0.34; the learning-rate runs rise by 2.5 and 2.9, most of it before step 2,000.

    Attributes:
        rise: Smallest rise that fires, in nats.
        spread: Smallest rise that fires, in units of the losses' own spread (their median
            absolute deviation scaled to a standard deviation) when they were at their best.
        samples: Number of losses in a median.
    """

    reads: ClassVar[tuple[str, ...]] = ("loss",)

    role: ClassVar[Role] = Role("loss")

    name: str = "loss_departure"
    rise: float = 1.0
    spread: float = 3.0
    samples: int = 8

    def __post_init__(self) -> None:
        check_thresholds(self, samples=1)

    def examine(self, snapshot: Snapshot, state: State) -> list[Finding]:
        """Returns one finding without heads, at site "", where the loss has risen."""
        findings = []
        for site, (loss, *_) in snapshot.of("loss").items():
            recent = state.setdefault("recent", [])
            recent.append(float(loss) if abs(loss) < OVERFLOW else OVERFLOW)
            del recent[: -self.samples]
            if len(recent) < self.samples:
                continue
            median = statistics.median(recent)
            if median <= state.get("best", math.inf):
                deviation = statistics.median(abs(value - median) for value in recent)
                state.update(best=median, spread=1.4826 * deviation)
            rise = median - state["best"] if median < OVERFLOW / 2 else OVERFLOW
            if rise >= max(self.rise, self.spread * state["spread"]):
                why = (
                    f"the loss has risen to {median:.3g}, {rise:.2g} nats above its best "
                    f"(threshold {self.rise:g})"
                    if median < OVERFLOW / 2
                    else "the loss is not finite"
                )
                findings.append(Finding(site, (), why))
        return findings
