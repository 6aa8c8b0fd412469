"""The rule `delta_bias`: the rounding errors of a head's delta do not cancel."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import numpy as np

from guardbit.monitor.detectors.rule import Finding, Snapshot
from guardbit.monitor.detectors.rules.common import check_thresholds, heads_where
from guardbit.monitor.detectors.values import OVERFLOW, State, Values, finite
from guardbit.records import Role


@dataclass(frozen=True, slots=True)
class DeltaBias:
    """The rounding errors of a head's delta have a mean: they add up over the steps.

    A sum of delta_lp - delta_hp that keeps its sign is what drives the weights away (section
    3.3.1, equation 3, figure 5a). The test looks at x = delta_bias / delta_bias_abs, from -1 to 1,
    once for each sign s: the null hypothesis is that the mean of s x, given the past, is at most
    `tolerated`. It bets against it: M = (M + 1) (1 + bet (s x - tolerated)), averaged over the
    bets, is an e-detector of the Shiryaev-Roberts kind (Shin, Ramdas and Rinaldo, arXiv
    2203.03532; bets on a bounded mean: Waudby-Smith and Ramdas, arXiv 2010.09686). Firing at
    M >= `samples_to_false_alarm`, it makes a false alarm no sooner than after that many samples
    on average for each head and sign, whatever the distribution and dependence of x; with x
    symmetric about zero it practically never does. A constant x of 0.9, 0.7, 0.5 or 0.3 fires
    after 19, 24, 34 or 68 samples.

    `tolerated`: in the stable runs the largest x over the twelve heads of a layer averages 0.04 to
    0.10 over the run, in either sign, and no head's own mean can exceed that. The recorded runs
    hold only those extremes, not the heads' values, and leave this rule silent.

    Errors much smaller than the loudest head's harm nobody, however one-sided they are, and what
    a stabilizer leaves behind is such an error: |delta| counts as at least `floor` times the
    largest delta_bias_abs of the model.

    Attributes:
        tolerated: Mean of x that is still called healthy, 0 to 1.
        samples_to_false_alarm: Mean number of samples to a false alarm, a head and sign.
        floor: Smallest delta_bias_abs taken at face value, relative to the model's largest.
        bets: Stakes; one above 1 / (1 + tolerated), with which M could fall below 0, counts as
            that.
    """

    reads: ClassVar[tuple[str, ...]] = ("delta_bias", "delta_bias_abs")

    role: ClassVar[Role] = Role(measures_cause=True)

    name: str = "delta_bias"
    tolerated: float = 0.15
    samples_to_false_alarm: float = 1e4
    floor: float = 0.01
    bets: tuple[float, ...] = (0.2, 0.5, 0.85)

    def __post_init__(self) -> None:
        check_thresholds(self)
        if not self.bets:
            raise ValueError(f"{self.name}.bets is empty; it takes at least one stake")

    def examine(self, snapshot: Snapshot, state: State) -> list[Finding]:
        """Returns the heads whose delta bias is one-sided beyond reasonable doubt."""
        sums, scales = snapshot.of("delta_bias"), snapshot.of("delta_bias_abs")
        largest = max((max(finite(scale), default=0.0) for scale in scales.values()), default=0.0)
        findings = []
        for site in sums.keys() & scales.keys():
            scale = np.maximum(scales[site], self.floor * largest)
            # A head without any rounding error (0 / 0) is unbiased.
            ratio = np.clip(sums[site] / np.where(scale > 0, scale, 1.0), -1.0, 1.0)
            ratio[np.isnan(scale) | (np.abs(sums[site]) >= OVERFLOW)] = math.nan
            one_sided = self._bet(state, site, ratio).mean(2) >= self.samples_to_false_alarm
            for sign, word in enumerate(("positive", "negative")):
                if fired := heads_where(one_sided[:, sign] & ~np.isnan(ratio)):
                    findings.append(Finding(site, fired, partial(self._why, ratio, word)))
        return findings

    def _why(self, ratio: Values, word: str, heads: tuple[int, ...]) -> str:
        top = max(heads, key=lambda head: abs(ratio[head]))
        return (
            f"the delta bias of head {top} stays {word}: {ratio[top]:+.2g} of its "
            f"absolute sum now, more than {self.tolerated:g} in the mean (one false "
            f"alarm in {self.samples_to_false_alarm:g} samples of a head)"
        )

    def _bet(self, state: State, site: str, ratio: Values) -> np.ndarray:
        """Plays one round; returns and keeps M, (heads, 2 signs, bets)."""
        kept = state.get(site, [])
        fresh = np.zeros((2, len(self.bets))).tolist()
        wealth = np.array(kept + [fresh] * (len(ratio) - len(kept)))
        gain = np.stack([ratio, -ratio], 1)[:, :, None] - self.tolerated
        bets = np.minimum(self.bets, 1.0 / (1.0 + self.tolerated))
        played = (wealth + 1.0) * (1.0 + bets * gain)
        # Without the cap a long alarm would take as long to fade as it lasted.
        cap = len(self.bets) * self.samples_to_false_alarm
        seen = ~np.isnan(ratio)
        wealth[seen] = np.minimum(played[seen], cap)
        state[site] = wealth.tolist()
        return wealth
