"""The rule `multiple_maxima`: many rows of a head have several largest scores."""

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
class MultipleMaxima:
    """Many rows of a head have more than one largest score: the paper's condition for the bias.

    Section 3.3.2 finds the biased rounding in rows whose P-bar holds more than one 1. Only the
    share in FP32 scores is used: with scores rounded to BF16 it reaches 0.95 in the stable runs.
    Near-zero logits tie by themselves (the first steps of any run, up to 0.1 of the rows in small
    models), repeated tokens tie in some heads for good, hence `logit` and the comparison with the
    peers and with the head's own first value; two samples in a row.

    Largest share in the stable runs 0.036 while warming up and 0.028 later, 0.041 in the shifted
    run. The failing run reaches 0.16 at step 9,400, too late to be the first alarm there.

    Attributes:
        share: Smallest share of rows that fires, 0 to 1.
        ratio: Smallest ratio to the typical top.
        growth: Smallest ratio to the head's first value, if its logits were not flat then.
        logit: Smallest largest logit of the head, where that is known; below it, they are flat.
    """

    reads: ClassVar[tuple[str, ...]] = ("multiple_maxima",)

    name: str = "multiple_maxima"
    share: float = 0.1
    ratio: float = 4.0
    growth: float = 2.0
    logit: float = 16.0

    def __post_init__(self) -> None:
        check_thresholds(self)

    def examine(self, snapshot: Snapshot, state: State) -> list[Finding]:
        """Returns the heads whose share stands out on two samples in a row."""
        if not snapshot.of("multiple_maxima"):
            return []
        typical = snapshot.typical_top("multiple_maxima")
        findings = []
        for site, shares in snapshot.of("multiple_maxima").items():
            lasting = smaller_of_last_two(state.setdefault("last", {}), site, shares)
            flat = snapshot.last_of("max_logit", site, len(shares)) < self.logit
            # Ties of a head with flat logits say nothing of those it has later.
            first = first_known(state.setdefault("first", {}), site, np.where(flat, 0.0, shares))
            bound = np.maximum(max(self.share, self.ratio * typical), self.growth * first)
            if heads := heads_where((lasting >= bound) & ~flat):
                findings.append(Finding(site, heads, partial(self._why, shares, bound, typical)))
        return findings

    def _why(self, shares: Values, bound: Values, typical: float, heads: tuple[int, ...]) -> str:
        top = max(heads, key=lambda head: shares[head])
        return (
            f"{shares[top]:.2g} of the rows of head {top} have more than one maximum "
            f"(threshold {bound[top]:.2g}), against {typical:.2g} in the typical layer"
        )
