"""What a judgement needs of a run's samples. It grows by one number a sampled step at most."""

import math
import statistics
from array import array
from bisect import bisect_right
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import NamedTuple

from guardbit.catalog import SUMS, of_probe
from guardbit.records import Event, Sample

#: A head is named by the pair (layer, head), both counted from 0.
Head = tuple[int, int]

#: A loss has come back when the median of this many last samples is near the smallest such median.
LOSS_SAMPLES = 8
COME_BACK = 0.1  # nats that count as near
#: A loss rises when the median of this many last samples lies further above the smallest one.
RISING_SAMPLES = 50
#: Multiple of their scatter by which it must rise: of many noisy losses some window is always low.
BEYOND_SCATTER = 2.0
#: Nats above the best median of LOSS_SAMPLES that are a leap; before RISING_SAMPLES they suffice.
SURELY_ABOVE = 1.0
#: Multiple of the scatter of neighbours that is a leap later on; a climb adds little to that.
LEAP = 6.0
#: What a switch must stop.
GROWING = ("w_q_spectral_norm", "max_logit")
#: A fall needs FALL_AFTER last samples that are all at most FALLEN times the least of the
#: FALL_BEFORE ones before the switch. Independent samples, however they scatter, look like that
#: once in 3,003 times; 87 recorded runs without a switch never do, at any step.
FALL_BEFORE = 8
FALL_AFTER = 6
FALLEN = 0.9
#: Correlated samples wander, so a fall must also be as far below the least of this many earlier
#: samples, or below HALF of the FALL_BEFORE ones.
LONG_BEFORE = 64
HALF = 0.5
#: Audits before the switch whose median says how wrong dQ was.
AUDITS = 3
#: The least part of dQ that counts as wrong: the rule `gradient_error` tolerates less.
WRONG = 0.1
#: An error is gone if every audit after the switch finds at most this part of it.
LEFT = 0.25
#: Mean entropy below which the exact dQ has vanished, so that its relative error says nothing.
SATURATED = 2.0**-9
#: Most samples of a module that are kept of each indicator in `_KEPT_OF`.
_KEPT = 512
_KEPT_OF = frozenset({*GROWING, "dq_coherent_error", "attention_entropy"})
#: Rounding's share of what a head's W_Q norm does, and the ends of its interval.
SHARES = of_probe("burst")
#: Indicators of heads in steps that do not call them.
_OF_WEIGHTS = frozenset({*of_probe("weights"), *SHARES})
#: The step at which the study compared the keys of kinds of model. Kinds whose largest
#: `key_common_mode` was above AT_RISK were at risk, kinds below HARDLY_AT_RISK hardly
#: (studies/rescue/README.md).
RISK_STEP = 2000
AT_RISK = 0.94
HARDLY_AT_RISK = 0.7


class Change(NamedTuple):
    """How one of `GROWING` changed after a switch."""

    head: Head
    name: str
    at: float  # the last sample up to the switch
    # The middle of the last three up to it, and after it: one batch may be out of the ordinary.
    before: float
    after: float
    is_enough: bool  # whether there are `FALL_BEFORE` samples before, and `FALL_AFTER` after
    is_fall: bool  # whether it has fallen since, and by more than the samples scatter


class _Kept:
    """Values of a module's heads at evenly spread samples, the first and the latest among them."""

    def __init__(self) -> None:
        self.rows: list[tuple[int, array[float]]] = []
        self._count, self._stride = 0, 1

    def add(self, step: int, values: Sequence[float]) -> None:
        if self.rows and step == self.rows[-1][0]:
            # The rest of a sample that came in parts.
            row = self.rows[-1][1]
            row.extend([math.nan] * (len(values) - len(row)))
            for head, value in enumerate(values):
                if not math.isnan(value):
                    row[head] = value
            return
        if self.rows and (self._count - 1) % self._stride:
            self.rows.pop()  # it was there as the latest only
        self.rows.append((step, array("f", values)))
        self._count += 1
        if len(self.rows) > _KEPT:
            self.rows = [*self.rows[:-1:2], self.rows[-1]]
            self._stride *= 2

    def of(self, head: int) -> tuple[list[int], list[float]]:
        """The steps at which a head was measured, and its values then."""
        rows = [(step, row[head]) for step, row in self.rows if head < len(row)]
        rows = [(step, value) for step, value in rows if not math.isnan(value)]
        return [step for step, _ in rows], [value for _, value in rows]


class Losses:
    """The training loss, which may be known of every step, in memory that does not grow with it."""

    def __init__(self) -> None:
        self.first: int | None = None  # step, as all of these; None without any
        self.last: int | None = None
        self.lost: int | None = None  # since which the loss is not finite
        self.is_back = True  # whether the last losses are near the best ones
        self.rise = 0.0  # of the last losses above the best ones, 0 where within their scatter
        self.is_unsure = False  # whether they lie `SURELY_ABOVE`, and within their scatter
        # Where it changes: (step, whether the loss is unsound from there on).
        self.critical: list[tuple[int, bool]] = []
        self.latest: deque[float] = deque(maxlen=LOSS_SAMPLES)
        # Steps of the last losses: a rise shows in no fewer.
        self.recent: deque[int] = deque(maxlen=RISING_SAMPLES // 2 + 1)
        self._many: deque[float] = deque(maxlen=RISING_SAMPLES)
        self._least_of_few, self._least_of_many = math.inf, math.inf
        self._count = 0

    def add(self, step: int, value: float) -> None:
        self.first, self.last = step if self.first is None else self.first, step
        if math.isfinite(value):
            self.lost = None
        elif self.lost is None:
            self.lost = step
        self.latest.append(value)
        self.recent.append(step)
        self._many.append(value)
        self._count += 1
        few = _median(self.latest)
        self._least_of_few = min(self._least_of_few, few)
        self.is_back = few <= self._least_of_few + COME_BACK
        if self._count >= LOSS_SAMPLES:
            leap = few - self._least_of_few
            is_above = leap > SURELY_ABOVE
            self.rise = self._lasting_rise(leap if is_above else 0.0)
            self.is_unsure = is_above and not self.rise
        is_critical = self.lost is not None or self.rise > 0
        if is_critical != (bool(self.critical) and self.critical[-1][1]):
            self.critical.append((step, is_critical))

    def _lasting_rise(self, leap: float) -> float:
        if self._count < RISING_SAMPLES:
            return leap
        median = _median(self._many)
        self._least_of_many = min(self._least_of_many, median)
        above = median - self._least_of_many
        if above <= COME_BACK and not leap:
            return 0.0
        # 1.4826 turns the median distance into a standard deviation.
        scatter = 1.4826 * _median([abs(value - median) for value in self._many])
        if above > max(COME_BACK, BEYOND_SCATTER * scatter):
            return above
        among_neighbours = 1.4826 * _median([abs(b - a) for a, b in pairwise(self._many)]) / 2**0.5
        return leap if leap > LEAP * among_neighbours else 0.0


def _median(losses: Iterable[float]) -> float:
    """The median of the finite ones, infinity without any."""
    finite = [value for value in losses if math.isfinite(value)]
    return statistics.median(finite) if finite else math.inf


class Evidence:
    """What a judgement needs of the samples of a run; it takes them in the order of their steps."""

    def __init__(self) -> None:
        self.steps: tuple[int, int] | None = None  # the first and the last, None without any
        self.layers: dict[str, int] = {}  # attention module -> its layer
        self.heads: dict[str, set[int]] = {}  # attention module -> its heads that were measured
        self.indicators: set[str] = set()  # what was measured of heads
        # How often heads were measured, when last, and where most steps lie between two times.
        self.head_steps: tuple[int, int | None, tuple[int, int]] = 0, None, (0, 0)
        # How often calls were measured, and when last.
        self.call_steps = 0, -1
        # The latest steps, in a row, at which the gradients' norm was not finite.
        self.bad_norms: list[int] = []
        self.loss = Losses()
        self.logits: dict[int, float] = {}  # step -> the largest of all heads
        # Head -> step of the latest measured share of rounding, and that with its interval.
        self.shares: dict[Head, tuple[int, dict[str, float]]] = {}
        # The first step from `RISK_STEP` on, or the last one before, at which keys were measured;
        # layer -> the largest `key_common_mode` of its heads then.
        self.common_modes: tuple[int, dict[int, float]] = -1, {}
        self._measured: dict[Head, tuple[int, int]] = {}  # first and last step
        self._latest_of: dict[str, tuple[int, list[int]]] = {}
        self._values: dict[tuple[int, str], _Kept] = {}

    def add(self, samples: Iterable[Sample]) -> None:
        for sample in samples:
            first, last = self.steps or (sample.step, sample.step)
            self.steps = min(first, sample.step), max(last, sample.step)
            if sample.site:
                self._add_heads(sample)
            elif sample.indicator == "loss":
                self.loss.add(sample.step, sample.values[0] if sample.values else math.nan)
            elif sample.indicator == "grad_norm" and sample.values:
                if math.isfinite(sample.values[0]):
                    self.bad_norms.clear()
                elif sample.step not in self.bad_norms[-1:]:
                    self.bad_norms.append(sample.step)

    def _add_heads(self, sample: Sample) -> None:
        step, layer, name = sample.step, sample.layer, sample.indicator
        measured = [head for head, value in enumerate(sample.values) if not math.isnan(value)]
        if not measured or name in SUMS:  # which stand still where nothing is measured
            return
        self.layers.setdefault(sample.site, layer)
        # Most indicators of a step measure the same heads.
        if self._latest_of.get(sample.site) != (step, measured):
            self._latest_of[sample.site] = step, measured
            self.heads.setdefault(sample.site, set()).update(measured)
            for head in measured:
                first, _ = self._measured.get((layer, head), (step, step))
                self._measured[layer, head] = first, step
        self.indicators.add(name)
        count, last, hole = self.head_steps
        is_of_call = name not in _OF_WEIGHTS
        # If calls are measured at all, a sample of only weights does not judge a head.
        if (is_of_call or not self.call_steps[0]) and (last is None or step > last):
            if last is not None and step - last > hole[1] - hole[0]:
                hole = last, step
            self.head_steps = count + 1, step, hole
        if is_of_call and step > self.call_steps[1]:
            self.call_steps = self.call_steps[0] + 1, step
        if name in SHARES:
            for head in measured:
                known = self.shares.get((layer, head))
                if known is None or known[0] != step:
                    known = self.shares[layer, head] = step, {}
                known[1][name] = sample.values[head]
        largest = max(sample.values[head] for head in measured)
        if name == "max_logit":
            self.logits[step] = max(largest, self.logits.get(step, -math.inf))
        if name == "key_common_mode" and math.isfinite(largest):
            if self.common_modes[0] < min(step, RISK_STEP):
                self.common_modes = step, {}
            if self.common_modes[0] == step:
                modes = self.common_modes[1]
                modes[layer] = max(largest, modes.get(layer, 0.0))
        if name in _KEPT_OF:
            self._values.setdefault((layer, name), _Kept()).add(step, sample.values)

    def latest_shares(self) -> list[Sample]:
        """`shares` as samples of one head each."""
        sites = {layer: site for site, layer in self.layers.items()}
        return [
            Sample(step, sites[layer], layer, name, (*[math.nan] * head, value))
            for (layer, head), (step, found) in self.shares.items()
            for name, value in found.items()
        ]

    def _series(self, head: Head, name: str) -> tuple[list[int], list[float]]:
        kept = self._values.get((head[0], name))
        return ([], []) if kept is None else kept.of(head[1])

    def changes(self, head: Head, since: int) -> list[Change]:
        """How each of `GROWING` changed that was measured before and after a step."""
        found: list[Change] = []
        for name in GROWING:
            steps, values = self._series(head, name)
            at = bisect_right(steps, since)
            before, after = values[:at][-FALL_BEFORE:], values[at:][-FALL_AFTER:]
            if not (before and after and 0 < min(before[-3:]) <= max(before[-3:]) < math.inf):
                continue
            is_enough = len(before) == FALL_BEFORE and len(after) == FALL_AFTER
            medians = statistics.median(before[-3:]), statistics.median(after[-3:])
            past = values[:at][-LONG_BEFORE:]
            # A value that fell before its switch falls without one.
            recent = past[-3 * FALL_BEFORE :]
            threes = zip(recent, recent[1:], recent[2:], strict=False)
            highest = max(map(statistics.median, threes), default=0.0)
            is_new = medians[0] >= FALLEN * highest
            is_low = max(after) < max(FALLEN * min(past), HALF * min(before))
            is_fall = is_enough and is_new and is_low
            found.append(Change(head, name, before[-1], *medians, is_enough, is_fall))
        return found

    def error_gone(self, head: Head, since: int) -> tuple[float, float] | None:
        """The part of dQ that was wrong before a step and after it, if audits show it gone."""
        steps, entropies = self._series(head, "attention_entropy")
        sizes: tuple[list[float], list[float]] = [], []
        for step, error in zip(*self._series(head, "dq_coherent_error"), strict=True):
            at = bisect_right(steps, step)
            if at and entropies[at - 1] >= SATURATED:
                sizes[step > since].append(abs(error))
        before, after = sizes[0][-AUDITS:], sizes[1][-FALL_AFTER:]
        if len(before) < AUDITS or len(after) < FALL_AFTER:
            return None
        wrong = statistics.median(before)
        is_gone = WRONG <= wrong < math.inf and max(after) < LEFT * wrong
        return (wrong, max(after)) if is_gone else None

    def heads_of(self, event: Event) -> list[Head]:
        """The measured heads that an event concerns."""
        layer = self.layers.get(event.site)
        if layer is None:
            return []
        known = self.heads[event.site]
        return [(layer, head) for head in event.heads or sorted(known) if head in known]

    def first(self, events: Iterable[Event]) -> dict[Head, Event]:
        """Every head that the events concern -> the first of them, earliest first."""
        found: dict[Head, Event] = {}
        for event in events:
            found.update({head: event for head in self.heads_of(event) if head not in found})
        return found

    def switched(self, events: Iterable[Event]) -> dict[Head, Event]:
        """Every head that is switched at the end -> the first of its switches since it was not.

        Its stabilizer is that of the last.
        """
        found: dict[Head, Event] = {}
        for event in events:
            for head in self.heads_of(event) if event.kind == "switch" else ():
                if event.stabilizer == "none":
                    found.pop(head, None)
                else:
                    found[head] = replace(found.get(head, event), stabilizer=event.stabilizer)
        return found

    def span(self, head: Head) -> tuple[float, float]:
        """The steps of a head's first and last sample; the first is infinite without any."""
        return self._measured.get(head, (math.inf, -1))
