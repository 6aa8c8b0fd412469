"""The rule `logit_outlier`: a head's logits have grown beyond what FP32 can tell apart."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import numpy as np

from guardbit.monitor.detectors.rule import Finding, Snapshot
from guardbit.monitor.detectors.rules.common import (
    check_thresholds,
    first_known,
    heads_where,
    smaller_of_last_two,
)
from guardbit.monitor.detectors.values import State, Values


@dataclass(frozen=True, slots=True)
class LogitOutlier:
    """A head's largest logit has grown far beyond what FP32 scores can tell apart.

    At 2^13 neighbouring FP32 numbers lie 2^-10 apart, the tie tolerance itself: the scores of
    such rows are ties or one-hot, and P-bar rounds to ones (section 3.3.2). A level of its own is
    no sign of trouble (600 at step 1,000 of healthy runs), so three things must come together, on
    two samples in a row: the level, `ratio` times the typical top, and `growth` times the head's
    first value, which spares a model that had such logits when the monitor came.

    Largest logit in the stable runs 1,930, largest ratio to the typical top 18; the shifted run
    ends at 5,060. The failing run passes 2^13 with a ratio of 86 at step 7,200 and reaches
    770,000. In the learning-rate runs the ratio stays below 7 for the first 4,000 steps.

    Attributes:
        level: Smallest logit that fires, after scaling.
        ratio: Smallest ratio to the typical top.
        growth: Smallest ratio to the head's first value.
    """

    reads: ClassVar[tuple[str, ...]] = ("max_logit",)

    name: str = "logit_outlier"
    level: float = 8192.0
    ratio: float = 10.0
    growth: float = 4.0

    def __post_init__(self) -> None:
        check_thresholds(self)

    def examine(self, snapshot: Snapshot, state: State) -> list[Finding]:
        """Returns the heads beyond level, peers and their own past on two samples in a row."""
        if not snapshot.of("max_logit"):
            return []
        typical = snapshot.typical_top("max_logit")
        findings = []
        for site, logits in snapshot.of("max_logit").items():
            lasting = smaller_of_last_two(state.setdefault("last", {}), site, logits)
            first = first_known(state.setdefault("first", {}), site, logits)
            bound = np.maximum(max(self.level, self.ratio * typical), self.growth * first)
            if heads := heads_where(lasting >= bound):
                findings.append(Finding(site, heads, partial(self._why, logits, bound, typical)))
        return findings

    def _why(self, logits: Values, bound: Values, typical: float, heads: tuple[int, ...]) -> str:
        top = max(heads, key=lambda head: logits[head])
        return (
            f"the largest logit of head {top} is {logits[top]:.3g} (threshold "
            f"{bound[top]:.3g}), {logits[top] / typical:.3g} times the typical layer's"
        )
