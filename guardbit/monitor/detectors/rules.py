"""The rules: each sees one sign of trouble in the heads, and says on what data it was set.

"The stable runs" are the four recorded GPT-2-small runs of 10,400 to 11,000 steps whose names
begin with `stable-` (`tests/data/runs`), the shifted one apart, whose indicators were rising when
it ended; "the failing run" is `fails-sdpa-lr1.5e-3`, whose loss leaves its trend at step 9,000;
"the learning-rate runs" are the two `lrdiverges-` ones.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

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
from guardbit.records import Role


def _heads(mask: np.ndarray) -> tuple[int, ...]:
    return tuple(np.flatnonzero(mask).tolist())


def _check_thresholds(rule: Any, **smallest: int) -> None:
    """Refuses thresholds that are no numbers or below 0, or below what `smallest` says."""
    for field in dataclasses.fields(rule):
        if field.name == "name":
            continue
        value, bound = getattr(rule, field.name), smallest.get(field.name, 0)
        for number in value if isinstance(value, tuple) else (value,):
            if isinstance(number, bool) or not isinstance(number, int | float):
                raise ValueError(f"{rule.name}.{field.name} is {number!r}; it must be a number")
            if not number >= bound:
                raise ValueError(f"{rule.name}.{field.name} is {number}; it must be >= {bound}")


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
        _check_thresholds(self, window=1)

    def examine(self, frame: Frame, state: State) -> list[Finding]:
        """Returns the heads that have risen above the typical top by enough."""
        if not frame.of("w_q_spectral_norm"):
            return []
        typical = frame.typical_top("w_q_spectral_norm")
        loud = np.fmax(self.logit, self.logit_ratio * frame.typical_top("max_logit"))
        findings = []
        for site, norms in frame.of("w_q_spectral_norm").items():
            if not typical > 0:
                continue
            excess = np.log(np.maximum(norms / typical, 1.0))
            past = state.setdefault(site, [])
            while len(past) > 1 and past[0][0] < frame.step - self.window:
                del past[0]
            rises, since = self._rises(past, excess, math.log(typical))
            # Twenty samples a window describe it at any cadence.
            if not past or frame.step >= past[-1][0] + self.window / 20:
                past.append([frame.step, math.log(typical), to_plain(excess)])
            logits = frame.last_of("max_logit", site, len(norms))
            confirmed = (rises >= self.rise) & (logits >= loud)
            alone = np.isnan(logits) & (rises >= self.rise_alone)
            if heads := _heads(confirmed | (alone & (site not in frame.normalised))):
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
        _check_thresholds(self)

    def examine(self, frame: Frame, state: State) -> list[Finding]:
        """Returns the heads beyond level, peers and their own past on two samples in a row."""
        if not frame.of("max_logit"):
            return []
        typical = frame.typical_top("max_logit")
        findings = []
        for site, logits in frame.of("max_logit").items():
            lasting = _smaller_of_last_two(state.setdefault("last", {}), site, logits)
            first = _first_known(state.setdefault("first", {}), site, logits)
            bound = np.maximum(max(self.level, self.ratio * typical), self.growth * first)
            if heads := _heads(lasting >= bound):
                findings.append(Finding(site, heads, partial(self._why, logits, bound, typical)))
        return findings

    def _why(self, logits: Values, bound: Values, typical: float, heads: tuple[int, ...]) -> str:
        top = max(heads, key=lambda head: logits[head])
        return (
            f"the largest logit of head {top} is {logits[top]:.3g} (threshold "
            f"{bound[top]:.3g}), {logits[top] / typical:.3g} times the typical layer's"
        )


@dataclass(frozen=True, slots=True)
class ModelLogits:
    """The logits of the whole model run away: the learning rate's work, not one head's.

    Rounding fails in a single layer (section 3.2); at too high a rate all layers go at once. The
    statistic is the lower quartile over the layers of the largest logit, on two samples in a row:
    beyond `level` where it has grown there from below, and beyond `saturated`, the limit of
    `LogitOutlier`, also where the monitor came when it was too late to see it grow.

    Largest in the stable runs 135 (in any three of their layers, taken for a model, 495; two
    healthy layers do pass 1,024), in the failing run 123; the learning-rate runs pass 1,024 at
    step 1,000, 8,192 at steps 2,600 and 3,000, and end at 21,000 and 85,000.

    Attributes:
        level: Smallest quartile that fires, after scaling.
        growth: Smallest ratio to the first quartile seen.
        saturated: Smallest quartile that fires without having grown.
        sites: Number of sites known, at least: of two, one is no majority.
    """

    reads: ClassVar[tuple[str, ...]] = ("max_logit",)

    role: ClassVar[Role] = "model"

    name: str = "model_logits"
    level: float = 1024.0
    growth: float = 4.0
    saturated: float = 8192.0
    sites: int = 3

    def __post_init__(self) -> None:
        _check_thresholds(self)

    def examine(self, frame: Frame, state: State) -> list[Finding]:
        """Returns, where the quartile is too high, every measured site's high heads."""
        measured = frame.of("max_logit")
        if not measured or len(frame.latest["max_logit"]) < self.sites:
            return []
        quartile = frame.typical_top("max_logit", 0.25)
        if math.isnan(quartile):
            return []
        first = state.setdefault("first", quartile)
        lasting = min(state.get("last", 0.0), quartile)
        state["last"] = quartile
        if lasting < min(max(self.level, self.growth * first), self.saturated):
            return []
        why = (
            f"three of four layers reach logits of {quartile:.3g} (threshold {self.level:g}), "
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
        _check_thresholds(self)

    def examine(self, frame: Frame, state: State) -> list[Finding]:
        """Returns the heads whose share stands out on two samples in a row."""
        if not frame.of("multiple_maxima"):
            return []
        typical = frame.typical_top("multiple_maxima")
        findings = []
        for site, shares in frame.of("multiple_maxima").items():
            lasting = _smaller_of_last_two(state.setdefault("last", {}), site, shares)
            flat = frame.last_of("max_logit", site, len(shares)) < self.logit
            # Ties of a head with flat logits say nothing of those it has later.
            first = _first_known(state.setdefault("first", {}), site, np.where(flat, 0.0, shares))
            bound = np.maximum(max(self.share, self.ratio * typical), self.growth * first)
            if heads := _heads((lasting >= bound) & ~flat):
                findings.append(Finding(site, heads, partial(self._why, shares, bound, typical)))
        return findings

    def _why(self, shares: Values, bound: Values, typical: float, heads: tuple[int, ...]) -> str:
        top = max(heads, key=lambda head: shares[head])
        return (
            f"{shares[top]:.2g} of the rows of head {top} have more than one maximum "
            f"(threshold {bound[top]:.2g}), against {typical:.2g} in the typical layer"
        )


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

    role: ClassVar[Role] = "cause"

    name: str = "delta_bias"
    tolerated: float = 0.15
    samples_to_false_alarm: float = 1e4
    floor: float = 0.01
    bets: tuple[float, ...] = (0.2, 0.5, 0.85)

    def __post_init__(self) -> None:
        _check_thresholds(self)
        if not self.bets:
            raise ValueError(f"{self.name}.bets is empty; it takes at least one stake")

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


@dataclass(frozen=True, slots=True)
class LossDeparture:
    """The loss has left its best level: whatever the cause, the run is failing.

    It is no early sign; it dates the failure, and tells a divergence without any sign in the
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

    role: ClassVar[Role] = "loss"

    name: str = "loss_departure"
    rise: float = 1.0
    spread: float = 3.0
    samples: int = 8

    def __post_init__(self) -> None:
        _check_thresholds(self, samples=1)

    def examine(self, frame: Frame, state: State) -> list[Finding]:
        """Returns one finding without heads, at site "", where the loss has risen."""
        findings = []
        for site, (loss, *_) in frame.of("loss").items():
            recent = state.setdefault("recent", [])
            recent.append(float(loss) if abs(loss) < OVERFLOW else OVERFLOW)
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
                    if median < OVERFLOW / 2
                    else "the loss is no longer finite"
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
