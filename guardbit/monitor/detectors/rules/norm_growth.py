"""The rule `norm_growth`: a head's query weights leave the model's trend."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import numpy as np

from guardbit.monitor.detectors.rule import Finding, Snapshot
from guardbit.monitor.detectors.rules.common import check_thresholds, heads_where
from guardbit.monitor.detectors.values import State, Values, from_plain, to_plain


@dataclass(frozen=True, slots=True)
class NormGrowth:
    """A head's query weights leave the model's trend, and its logits are large.

    The spectral norm of one layer's W_Q, and in it of a few heads, leaves the others' trend
    (arXiv 2510.04212, section 3.2, figures 3 and 11). The statistic is the rise of
    e = max(0, log(norm / typical top)) within the last `window` steps, from whichever past sample
    it is largest, counted where it is at least `over_peers` times the rise of log(typical top)
    over the same samples. The peers are the clock: in a young run, or at a high rate, all norms
    grow fast, whatever the number of the step and whenever the monitor came.

    A norm that grows for the bad raises the scores with it, so the head's largest logit must be
    `logit` and `logit_ratio` times the typical top. In healthy runs other heads take the lead
    within 1,000 steps too, with logits of a few hundreds. Where logits are not known, as in calls
    with a mask, the rise must be `rise_alone`; and where queries are normalised between W_Q and the
    scores, the norm alone says nothing.

    Largest rise in the stable runs 0.53 (at a rate of 1e-3, step 2,200; logits 820) and 0.15 in
    the shifted one; largest logit and ratio 1,930 and 18. All thresholds divided by 2 still spare
    them all (`benchmarks/false_alarms.py`). The failing run reaches a rise of 0.4 with logits of
    5,700 and a ratio of 50 at step 6,800, a rise of 0.9 at 7,600, and 1.8 at 9,800.

    Attributes:
        rise: Smallest rise that fires where logits are known, e-folds.
        rise_alone: Smallest rise that fires where they are not.
        over_peers: Smallest ratio of the rise to that of the log of the typical top.
        logit: Smallest largest logit of the head, after scaling.
        logit_ratio: Smallest ratio of it to the typical top.
        window: Steps a rise is looked for in; at longer cadences, since the last sample.
    """

    reads: ClassVar[tuple[str, ...]] = ("w_q_spectral_norm",)

    name: str = "norm_growth"
    rise: float = 0.4
    rise_alone: float = 0.9
    over_peers: float = 3.0
    logit: float = 4096.0
    logit_ratio: float = 10.0
    window: int = 2000

    def __post_init__(self) -> None:
        check_thresholds(self, window=1)

    def examine(self, snapshot: Snapshot, state: State) -> list[Finding]:
        """Returns the heads that have risen above the typical top by enough."""
        if not snapshot.of("w_q_spectral_norm"):
            return []
        typical = snapshot.typical_top("w_q_spectral_norm")
        loud = np.fmax(self.logit, self.logit_ratio * snapshot.typical_top("max_logit"))
        findings = []
        for site, norms in snapshot.of("w_q_spectral_norm").items():
            if not typical > 0:
                continue
            excess = np.log(np.maximum(norms / typical, 1.0))
            past = state.setdefault(site, [])
            while len(past) > 1 and past[0][0] < snapshot.step - self.window:
                del past[0]
            rises, since = self._rises(past, excess, math.log(typical))
            # Twenty samples a window describe it at any cadence.
            if not past or snapshot.step >= past[-1][0] + self.window / 20:
                past.append([snapshot.step, math.log(typical), to_plain(excess)])
            logits = snapshot.last_of("max_logit", site, len(norms))
            confirmed = (rises >= self.rise) & (logits >= loud)
            alone = np.isnan(logits) & (rises >= self.rise_alone)
            if heads := heads_where(confirmed | (alone & (site not in snapshot.normalised))):
                why = partial(self._why, norms, typical, rises, since, logits)
                findings.append(Finding(site, heads, why))
        return findings

    def _why(
        self,
        norms: Values,
        typical: float,
        rises: Values,
        since: np.ndarray,
        logits: Values,
        heads: tuple[int, ...],
    ) -> str:
        top = max(heads, key=lambda head: rises[head])
        return (
            f"the W_Q spectral norm of head {top} is {norms[top]:.3g}, "
            f"{norms[top] / typical:.3g} times the typical layer's, and has risen above "
            f"it by a factor of {math.exp(rises[top]):.3g} since step {since[top]}, "
            f"its largest logit being {logits[top]:.3g}"
        )

    def _rises(self, past: list, excess: Values, typical: float) -> tuple[Values, np.ndarray]:
        """Returns each head's largest rise that outruns the peers', else 0, and its first step."""
        if not past:
            return np.zeros(len(excess)), np.zeros(len(excess), int)
        steps, typicals, values = zip(*past, strict=True)
        rises = excess - np.array([from_plain(value, len(excess)) for value in values])
        peers = np.maximum(typical - np.array(typicals), 0.0)[:, None]
        rises = np.where(rises >= self.over_peers * peers, rises, 0.0)
        largest = rises.argmax(0)
        return rises.max(0), np.array(steps)[largest]
