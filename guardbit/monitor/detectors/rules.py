"""The rules: each sees one sign of trouble in the heads, and says on what data it was set.

"The stable runs" are the four recorded GPT-2-small runs of 10,400 to 11,000 steps whose names
begin with `stable-` (`tests/data/runs`), the shifted one apart, whose indicators were rising when
it ended; "the failing run" is `fails-sdpa-lr1.5e-3`, whose loss leaves its trend at step 9,000;
"the learning-rate runs" are the two `lrdiverges-` ones.
"""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass

import numpy as np

from guardbit.monitor.detectors.frames import (
    OVERFLOW,
    Finding,
    Frame,
    State,
    Values,
    finite,
    from_plain,
    to_plain,
)


def _heads(mask: np.ndarray) -> tuple[int, ...]:
    return tuple(np.flatnonzero(mask).tolist())


def _smaller_of_last_two(state: State, site: str, values: Values) -> Values:
    """Returns each head's smaller value of this sample and its last one; NaN for the first.

    A single batch can hold one extreme row; two batches in a row make it the head's own.
    """
    previous = from_plain(state.get(site, []), len(values))
    state[site] = to_plain(np.where(np.isnan(values), previous, values))
    return np.minimum(previous, values)


def _first_known(state: State, site: str, values: Values) -> Values:
    """Returns each head's first value that was no NaN."""
    first = from_plain(state.get(site, []), len(values))
    first = np.where(np.isnan(first), values, first)
    state[site] = to_plain(first)
    return first


@dataclass(frozen=True, slots=True)
class NormGrowth:
    """A head's query weights pull away from the model's.

    The spectral norm of one layer's W_Q, and in it of a few heads, leaves the others' trend
    (arXiv 2510.04212, section 3.2, figures 3 and 11). The statistic is the least-squares slope of
    e = max(0, log(norm / typical top)) over `window` of training time or more, for heads at least
    `ratio` times the typical top. Training time is log(step) up to `horizon`, since young runs
    change in proportion to their age, and linear from there with the same rate, since Adam bounds
    the change a step: (step - horizon) / horizon more. No cadence enters.

    A norm that grows for the bad raises the scores with it, so the head's largest logit must be
    `logit_ratio` times the typical top, where logits are known: in healthy runs other heads take
    the lead nearly as fast, with logits as before.

    Largest slope in the stable runs 1.0 (2.3 without the two ratios, at step 4,000 of
    `stable-bf16out-lr1.5e-3`), in the shifted run 0.7, in the learning-rate runs 2.0. The failing
    run passes 2.5 at step 7,000 and reaches 3.9 in layer 2 and 12 in layer 1.

    Attributes:
        slope: Smallest slope that fires, e-folds of excess per unit of training time.
        ratio: Smallest ratio of the norm to the typical top.
        logit_ratio: Smallest ratio of the largest logit to the typical top.
        window: Training time the slope is taken over, at least.
        samples: Number of samples it is taken over, at least.
        horizon: Step from which training time is linear.
        spacing: Training time between samples that are kept; bounds the memory at any cadence.
    """

    name: str = "norm_growth"
    slope: float = 2.5
    ratio: float = 2.0
    logit_ratio: float = 4.0
    window: float = 0.15
    samples: int = 4
    horizon: int = 5000
    spacing: float = 0.01

    def examine(self, frame: Frame, state: State) -> list[Finding]:
        """Returns the heads that stand out and pull away at `slope` or faster."""
        typical = frame.typical_top("w_q_spectral_norm")
        typical_logit = frame.typical_top("max_logit")
        time = self._training_time(frame.step)
        findings = []
        for site, norms in frame.of("w_q_spectral_norm").items():
            past = state.setdefault(site, [])
            if not typical > 0 or (past and time < past[-1][0] + self.spacing):
                continue
            past.append([time, to_plain(np.log(np.maximum(norms / typical, 1.0)))])
            slopes = self._slopes(past, len(norms))
            suspect = (slopes >= self.slope) & (norms >= self.ratio * typical)
            calm = frame.last_of("max_logit", site, len(norms)) < self.logit_ratio * typical_logit
            if heads := _heads(suspect & ~calm):
                top = max(heads, key=lambda head: slopes[head])
                why = (
                    f"the W_Q spectral norm of head {top} is {norms[top]:.3g}, "
                    f"{norms[top] / typical:.3g} times the typical layer's, and pulls away with "
                    f"slope {slopes[top]:.3g} (threshold {self.slope:g})"
                )
                findings.append(Finding(site, heads, why))
        return findings

    def _training_time(self, step: int) -> float:
        linear = max(0, step - self.horizon) / self.horizon
        return math.log(max(1, min(step, self.horizon))) + linear

    def _slopes(self, past: list, heads: int) -> Values:
        """Trims `past` to the window and returns its slopes, NaN where samples are too few."""
        before = [i for i, (time, _) in enumerate(past) if time <= past[-1][0] - self.window]
        if not before or len(past) < self.samples:
            return np.full(heads, math.nan)
        del past[: min(before[-1], len(past) - self.samples)]
        excess = np.array([from_plain(values, heads) for _, values in past])
        valid = ~np.isnan(excess)
        time = np.where(valid, np.array([time for time, _ in past])[:, None], math.nan)
        enough = valid.sum(0) >= self.samples
        slopes = np.full(heads, math.nan)
        x, y = time[:, enough], excess[:, enough]
        x = x - np.nanmean(x, 0)
        slopes[enough] = np.nansum(x * y, 0) / np.nansum(x * x, 0)
        return slopes


@dataclass(frozen=True, slots=True)
class LogitOutlier:
    """A head's largest logit has grown far beyond what FP32 scores can tell apart.

    At 2^13 neighbouring FP32 numbers lie 2^-10 apart, the tie tolerance itself: the scores of
    such rows are ties or one-hot, and P-bar rounds to ones. A level of its own is no sign of
    trouble (600 at step 1,000 of healthy runs), so three things must come together, on two
    samples in a row: the level, `ratio` times the typical top, and `growth` times the head's
    first value, which spares a model that had such logits when the monitor came.

    Largest logit in the stable runs 1,930, largest ratio to the typical top 18; the shifted run
    ends at 5,060. The failing run passes 2^13 with a ratio of 86 at step 7,200 and reaches
    770,000. In the learning-rate runs the ratio stays below 7 for the first 4,000 steps.

    Attributes:
        level: Smallest logit that fires, after scaling.
        ratio: Smallest ratio to the typical top.
        growth: Smallest ratio to the head's first value.
    """

    name: str = "logit_outlier"
    level: float = 8192.0
    ratio: float = 10.0
    growth: float = 4.0

    def examine(self, frame: Frame, state: State) -> list[Finding]:
        """Returns the heads beyond level, peers and their own past on two samples in a row."""
        typical = frame.typical_top("max_logit")
        findings = []
        for site, logits in frame.of("max_logit").items():
            lasting = _smaller_of_last_two(state.setdefault("last", {}), site, logits)
            first = _first_known(state.setdefault("first", {}), site, logits)
            bound = np.maximum(max(self.level, self.ratio * typical), self.growth * first)
            if heads := _heads(lasting >= bound):
                top = max(heads, key=lambda head: lasting[head])
                why = (
                    f"the largest logit of head {top} is {logits[top]:.3g} (threshold "
                    f"{bound[top]:.3g}), {logits[top] / typical:.3g} times the typical layer's"
                )
                findings.append(Finding(site, heads, why))
        return findings


@dataclass(frozen=True, slots=True)
class ModelLogits:
    """The logits of the whole model run away: the learning rate's work, not one head's.

    Rounding fails in a single layer (section 3.2); at too high a rate all layers go at once. The
    statistic is the typical top itself, on two samples in a row.

    Largest in the stable runs 229, in the failing run 284; the learning-rate runs pass 1,024 at
    step 1,000 and end at 32,000 and 100,000.

    Attributes:
        level: Smallest typical top that fires, after scaling.
        growth: Smallest ratio to the first typical top.
        sites: Number of sites known, at least: of two, one is no majority.
    """

    name: str = "model_logits"
    level: float = 1024.0
    growth: float = 4.0
    sites: int = 3

    def examine(self, frame: Frame, state: State) -> list[Finding]:
        """Returns, where the typical top is too high, every measured site's high heads."""
        typical = frame.typical_top("max_logit")
        measured = frame.of("max_logit")
        if not measured or len(frame.latest["max_logit"]) < self.sites or math.isnan(typical):
            return []
        first = state.setdefault("first", typical)
        lasting = min(state.get("last", 0.0), typical)
        state["last"] = typical
        if lasting < max(self.level, self.growth * first):
            return []
        why = (
            f"half of all layers reach logits of {typical:.3g} (threshold {self.level:g}), "
            f"where they began at {first:.3g}"
        )
        high = {site: _heads(logits >= self.level) for site, logits in measured.items()}
        return [Finding(site, heads, why) for site, heads in high.items() if heads]


@dataclass(frozen=True, slots=True)
class MultipleMaxima:
    """Many rows of a head have more than one largest score: the paper's condition for the bias.

    Section 3.3.2 finds the biased rounding in rows whose P-bar holds more than one 1. Only the
    share in FP32 scores is used: with scores rounded to BF16 it reaches 0.95 in the stable runs.
    Near-zero logits tie by themselves (the first steps of any run, up to 0.1 of the rows in small
    models), hence `logit` and the comparison with the peers; two samples in a row.

    Largest share in the stable runs 0.036 while warming up and 0.028 later, 0.041 in the shifted
    run. The failing run reaches 0.16 at step 9,400, too late to be the first alarm there.

    Attributes:
        share: Smallest share of rows that fires, 0 to 1.
        ratio: Smallest ratio to the typical top.
        logit: Smallest largest logit of the head, where that is known.
    """

    name: str = "multiple_maxima"
    share: float = 0.1
    ratio: float = 4.0
    logit: float = 16.0

    def examine(self, frame: Frame, state: State) -> list[Finding]:
        """Returns the heads whose share stands out on two samples in a row."""
        typical = frame.typical_top("multiple_maxima")
        findings = []
        for site, shares in frame.of("multiple_maxima").items():
            lasting = _smaller_of_last_two(state, site, shares)
            flat = frame.last_of("max_logit", site, len(shares)) < self.logit
            if heads := _heads((lasting >= max(self.share, self.ratio * typical)) & ~flat):
                top = max(heads, key=lambda head: lasting[head])
                why = (
                    f"{shares[top]:.2g} of the rows of head {top} have more than one maximum "
                    f"(threshold {self.share:g}), against {typical:.2g} in the typical layer"
                )
                findings.append(Finding(site, heads, why))
        return findings


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
        bets: Stakes, each below 1 / (1 + tolerated), so that M stays positive.
    """

    name: str = "delta_bias"
    tolerated: float = 0.15
    samples_to_false_alarm: float = 1e4
    floor: float = 0.01
    bets: tuple[float, ...] = (0.2, 0.5, 0.85)

    def examine(self, frame: Frame, state: State) -> list[Finding]:
        """Returns the heads whose delta bias is one-sided beyond reasonable doubt."""
        sums, scales = frame.of("delta_bias"), frame.of("delta_bias_abs")
        largest = max((max(finite(scale), default=0.0) for scale in scales.values()), default=0.0)
        findings = []
        for site in sums.keys() & scales.keys():
            scale = np.maximum(scales[site], self.floor * largest)
            # A head without any rounding error (0 / 0) is unbiased.
            ratio = np.clip(sums[site] / np.where(scale > 0, scale, 1.0), -1.0, 1.0)
            ratio[np.isnan(scale) | (np.abs(sums[site]) >= OVERFLOW)] = math.nan
            one_sided = self._bet(state, site, ratio).mean(2) >= self.samples_to_false_alarm
            for sign, word in enumerate(("positive", "negative")):
                if fired := _heads(one_sided[:, sign] & ~np.isnan(ratio)):
                    top = max(fired, key=lambda head: abs(ratio[head]))
                    why = (
                        f"the delta bias of head {top} stays {word}: {ratio[top]:+.2g} of its "
                        f"absolute sum now, more than {self.tolerated:g} in the mean (one false "
                        f"alarm in {self.samples_to_false_alarm:g} samples of a head)"
                    )
                    findings.append(Finding(site, fired, why))
        return findings

    def _bet(self, state: State, site: str, ratio: Values) -> np.ndarray:
        """Plays one round; returns and keeps M, (heads, 2 signs, bets)."""
        kept = state.get(site, [])
        fresh = np.zeros((2, len(self.bets))).tolist()
        wealth = np.array(kept + [fresh] * (len(ratio) - len(kept)))
        gain = np.stack([ratio, -ratio], 1)[:, :, None] - self.tolerated
        played = (wealth + 1.0) * (1.0 + np.array(self.bets) * gain)
        # Without the cap a long alarm would take as long to fade as it lasted.
        cap = len(self.bets) * self.samples_to_false_alarm
        seen = ~np.isnan(ratio)
        wealth[seen] = np.minimum(played[seen], cap)
        state[site] = wealth.tolist()
        return wealth


@dataclass(frozen=True, slots=True)
class LossDeparture:
    """The loss has left its best level: whatever the cause, the run is failing.

    It is no early sign; it dates the failure, and tells a divergence without any sign in the
    heads from a stable run. The statistic is the median of the last `samples` losses less the
    smallest such median so far. NaN and inf count as the largest number.

    Largest rise in the stable runs 0.33 nats (all at step 6,440, over the same hard batches), in
    the failing run 0.34; the learning-rate runs rise by 2.5 and 2.9, most of it before step 2,000.

    Attributes:
        rise: Smallest rise that fires, in nats.
        spread: Smallest rise that fires, in units of the losses' own spread (their median
            absolute deviation scaled to a standard deviation) when they were at their best.
        samples: Number of losses in a median.
    """

    name: str = "loss_departure"
    rise: float = 1.0
    spread: float = 3.0
    samples: int = 8

    def examine(self, frame: Frame, state: State) -> list[Finding]:
        """Returns one finding without heads, at site "", where the loss has risen."""
        findings = []
        for site, (loss, *_) in frame.of("loss").items():
            recent = state.setdefault("recent", [])
            recent.append(float(np.nan_to_num(loss, nan=OVERFLOW)))
            del recent[: -self.samples]
            if len(recent) < self.samples:
                continue
            median = statistics.median(recent)
            if median <= state.get("best", math.inf):
                deviation = statistics.median(abs(value - median) for value in recent)
                state.update(best=median, spread=1.4826 * deviation)
            rise = median - state["best"]
            if rise >= max(self.rise, self.spread * state["spread"]):
                why = (
                    f"the loss has risen to {median:.3g}, {rise:.2g} nats above its best "
                    f"(threshold {self.rise:g})"
                )
                findings.append(Finding(site, (), why))
        return findings


#: The rules `Detectors` uses when none are given.
DEFAULT_RULES = (
    NormGrowth(),
    LogitOutlier(),
    ModelLogits(),
    MultipleMaxima(),
    DeltaBias(),
    LossDeparture(),
)
