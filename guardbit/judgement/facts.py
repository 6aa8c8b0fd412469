"""The facts of a run: counts, steps and values that its records show. They conclude nothing."""

import math
import re
from bisect import bisect_right
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, Literal

from guardbit.judgement.evidence import FALLEN, LOSS_SAMPLES, SHARES, Change, Evidence, Head
from guardbit.records import Event

#: A switched head counts as still alarming if it alarmed in this many last steps of the run, and
#: more than this many after its switch. Earlier alarms belong to the failure before the switch.
LASTING_STEPS = 1000
#: A head goes on growing if all of `GROWING` are this many times their value at its switch.
STILL_GROWING = 1.1
#: A model that leaves at most this many steps after a head leaves at once. Heads that fail by
#: rounding lead the loss by 1,500 steps and more in the runs we have; at too high a rate all goes
#: within 600.
AT_ONCE = 1000
#: Logits have grown if the largest is this many times the first. Of 199 recorded runs this and the
#: next three name those that grow, and no corrected copy (`tests/data/golden`).
RISE = 1.4
#: Logits rise if the largest exceeds RISING_LOGIT, and RISE times what it was RISE_STEPS before.
RISE_STEPS = 1000
RISING_LOGIT = 1024.0
HIGH_LOGIT = 4096.0
#: A part of the heads beyond which alarms are no failure of single heads: of 87 recorded runs that
#: rounding failed in, or might have, at most a third of the heads alarmed.
EVERYWHERE = 0.5
#: Logits at which BF16 leaves no digit of the differences between keys.
CRITICAL_LOGIT = 10_000.0
#: Samples in a row without finite gradients that are more than a loss scale's search for overflow.
BAD_IN_A_ROW = 3
#: What events say of the monitor, and of a stage.
OFF = "the monitor is off, training goes on"
RECOVERED = "the stage '{}' works again"

_WIDE = ("float32", "float64")
_MATH, _WRITTEN_OUT = "runs in PyTorch's math kernel", "is written out in PyTorch"
#: Ways to compute attention in which rounding changes almost nothing, or delta is not rounded.
PRECISE = tuple(f"runs in {precision}" for precision in _WIDE)
UNROUNDED = (*PRECISE, _MATH, _WRITTEN_OUT)
#: Indicators that judge heads if the metadata do not say which, e.g. of a CSV.
_JUDGED_BY = {"any rule": [["w_q_spectral_norm", "max_logit", "dq_coherent_error"]]}
#: Causes by `guardbit diagnose` of a head that rounding does not move.
_NOT = ("not rounding", "fault")


class Facts:
    """What is known of a run; None where something was not measured or did not happen."""

    def __init__(
        self,
        evidence: Evidence,
        events: Sequence[Event],
        metadata: Mapping[str, Any] | None,
        diagnosed: Iterable[Mapping[str, Any]],
    ) -> None:
        alarms = [event for event in events if event.kind == "alarm"]
        alarmed, switched = evidence.first(alarms), evidence.switched(events)
        # A head may have grown soundly from its switch to its alarm, as when all switched at 0.
        since = {
            head: max(event.step, switched[head].step)
            for head, event in alarmed.items()
            if head in switched
        }
        changes = [evidence.changes(head, step) for head, step in since.items()]
        corrected = corrected_before(alarmed, switched)
        answered = [evidence.changes(h, step) for h, step in since.items() if h not in corrected]
        gone = (evidence.error_gone(h, step) for h, step in since.items() if h not in corrected)
        grades = severities(evidence, (event.step for event in alarms))

        self.first_step, self.last_step = evidence.steps or (None, None)
        # Step and text of each error that ended or interrupted GuardBit's work, and the step from
        # which on its stage works again.
        self.errors = _failures(events)
        # Modules that called no attention that could be watched, or of which no head was measured.
        # The weights of some were measured all the same.
        self.not_watched = not_watched_of(metadata, evidence.layers)
        # Counts heads of watched modules, of others only if there are none or an alarm named them.
        named = {event.site for event in alarms}
        counted = {n for n in evidence.heads if n in named or n not in self.not_watched}
        counted = counted or evidence.heads.keys()
        self.num_heads = sum(len(evidence.heads[name]) for name in counted)
        self.num_layers = len(counted)
        # How often heads were measured, when last, and between which samples most steps lie.
        self.head_samples, self.last_head_step, self.hole = evidence.head_steps
        self.is_judged = is_judged(metadata, evidence)  # whether a rule reads what was measured
        bad = evidence.bad_norms  # up to the last sample
        self.bad_gradients_since = bad[0] if len(bad) >= BAD_IN_A_ROW else None
        self.num_modules = len({*self.not_watched, *evidence.layers})
        self.num_watched = self.num_modules - len(self.not_watched)
        # Modules of whose calls in a forward one is measured.
        self.watched_in_part = sum(
            bool(at(one, "several_calls")) and not at(one, "unwatched")
            for one in _sites_of(metadata).values()
        )
        # Sampled steps in which no watched module called attention: how many, and the first.
        samples, first = (at(metadata, "without_attention", name) for name in ("samples", "first"))
        is_known = isinstance(samples, int) and isinstance(first, int)
        self.without_attention = (samples, first) if is_known else (0, None)
        lacking, _ = self.without_attention
        # If only weights are recorded, count the samples that had calls.
        having = evidence.call_steps[0] or self.head_samples - lacking
        enough = LOSS_SAMPLES if self.head_samples >= LOSS_SAMPLES else 1
        are_some = not lacking or having >= max(enough, lacking)
        self.has_calls = self.num_watched > 0 and are_some

        # What the audit of modules has said, but for what rounding takes of updates and sums.
        told = ((e.site, e.why) for e in events if e.rule == "module")
        self.modules = tuple(one for one in told if one[0] or one[1].startswith("the model"))
        self.alarms = tuple(
            {"step": e.step, "site": e.site, "heads": e.heads, "rule": e.rule,
             "severity": grades[e.step]}
            for e in alarms
        )  # fmt: skip
        self.first_alarm = min((event.step for event in alarms), default=None)
        self.leaves_at_once = leaves_at_once(alarms)
        self.alarmed = tuple(alarmed)  # heads, in the order of their first alarm
        # Whether these are no failure of single heads.
        self.are_many = self.num_layers > 2 and len(alarmed) > EVERYWHERE * self.num_heads
        # Whether rounding does not move one of them, by `guardbit diagnose` or by its share.
        refuted = {f"{d.get('site')} {d.get('head')}" for d in diagnosed if d.get("cause") in _NOT}
        sites = {layer: site for site, layer in evidence.layers.items()}
        self.is_refuted = any(f"{sites[layer]} {head}" in refuted for layer, head in alarmed)
        for head, event in alarmed.items():
            step, share = evidence.shares.get(head, (-1, {}))
            self.is_refuted |= step >= event.step and share.get(SHARES[2], 1.0) < 0.5

        # Why there is nothing to correct in the modules whose heads alarmed, or in all, or "".
        self.needless = nothing_to_correct(metadata, named={e.site for e in alarmed.values()})
        self.has_policy = bool(at(metadata, "settings", "stabilizer"))
        self.first_switch = min((event.step for event in switched.values()), default=None)
        self.switched = len(switched)  # heads, at the end
        self.alarmed_and_switched = len(since)
        self.corrected_before = len(corrected)  # heads that were switched before their alarm
        self.stabilizers = tuple(dict.fromkeys(event.stabilizer for event in switched.values()))
        # An alarm in the last steps of the run, long after the head's switch.
        _, end = evidence.steps or (0, 0)
        late = (event for event in alarms if event.step > end - LASTING_STEPS)
        again = {
            head for event in late for head in evidence.heads_of(event)
            if head in switched and event.step > switched[head].step + LASTING_STEPS
        }  # fmt: skip
        self.alarming_again = len(again)
        self.still_growing = sum(bool(of) and min(map(_growth, of)) > 1 for of in changes)
        self.growing = sum(c.name == "max_logit" and _growth(c) > 1 for of in changes for c in of)
        self.not_measured_since = sum(evidence.span(h)[1] <= step for h, step in since.items())
        # Heads without a sample up to their alarm, e.g. in the folder of a resumed run: the effect
        # of the switch on them cannot be seen.
        self.unknown_before = sum(evidence.span(head)[0] > alarmed[head].step for head in since)
        self.fallen = sum(any(change.is_fall for change in of) for of in answered)
        self.are_enough = all(any(change.is_enough for change in of) for of in answered)
        # The largest one by a tenth or more, rather one beyond the samples' scatter.
        self.largest_fall: Change | None = min(
            (c for of in answered or changes for c in of if c.after <= FALLEN * c.before),
            key=lambda change: (not change.is_fall, change.after / change.before),
            default=None,
        )
        self.error_gone = next(filter(None, gone), None)  # parts of dQ, before and after

        self.missing_loss = _missing_loss(evidence, alarms, switched)
        last_switch = max((event.step for event in switched.values()), default=-1)
        # Whether a rise since then would not show yet.
        self.few_losses = bool(evidence.loss.recent) and evidence.loss.recent[0] <= last_switch
        self.loss_rise = evidence.loss.rise  # of the last losses above the best ones
        self.loss_is_finite = evidence.loss.lost is None  # whether the last one is
        self.departed = departed(alarms, evidence)  # unless the loss has come back
        first_of_head = min((event.step for event in alarmed.values()), default=math.inf)
        left = -1 if self.departed is None else self.departed
        # Steps from the first alarm on a head to the departure.
        self.lead = int(left - first_of_head) if first_of_head <= left else None
        self.locates = bool(at(metadata, "settings", "locate_nonfinite"))
        # The step of the first replay that found where something is not finite, and the place.
        self.nonfinite = min(((e.step, e.why) for e in events if is_place(e)), default=None)

        logits = sorted(evidence.logits.items())
        earlier = [x for step, x in logits if step <= logits[-1][0] - RISE_STEPS]
        # Of the last sample, of the last one RISE_STEPS before it, and of the first.
        self.largest_logit = logits[-1][1] if logits else None
        self.logit_before = earlier[-1] if earlier else None
        self.first_logit = logits[0][1] if logits else None
        now = self.largest_logit or 0.0
        self.logits_are_high = now >= HIGH_LOGIT
        self.logits_have_grown = bool(logits) and now > RISE * logits[0][1]
        self.logits_rise = bool(earlier) and now >= RISING_LOGIT and now > RISE * earlier[-1]
        # Whether the loss or the largest logit rises.
        self.rises = bool(
            self.loss_rise or (self.logits_are_high and self.logits_have_grown) or self.logits_rise
        )


def corrected_before(alarmed: Mapping[Head, Event], switched: Mapping[Head, Event]) -> set[Head]:
    """The heads that were switched when they alarmed."""
    return {h for h, event in alarmed.items() if h in switched and switched[h].step < event.step}


def _growth(change: Change) -> float:
    """A head's growth since its switch, over the growth that counts as going on."""
    return change.after / (STILL_GROWING * change.at)


def is_place(event: Event) -> bool:
    """Whether an event names the first place of a step that is not finite."""
    return event.kind == "advisory" and event.rule == "nonfinite"


def _failures(events: Sequence[Event]) -> tuple[tuple[int, str, int | None], ...]:
    """Of each stage that failed the first step, the last text, and when it worked again."""
    found: dict[str, tuple[int, str, int | None]] = {}
    for event in events:
        is_error = event.kind == "monitor_error" and not event.site
        if not (is_error and re.match(rf"{OFF}|[a-z_]+:", event.why)):
            continue
        stage = event.why.partition(":")[0]
        first, *_ = found.get(stage, (event.step,))
        said = RECOVERED.format(stage)
        again = (later.step for later in events if later.why == said and later.step > event.step)
        found[stage] = first, event.why, min(again, default=None)
    return tuple(found.values())


def severities(
    evidence: Evidence, steps: Iterable[int]
) -> dict[int, Literal["warning", "critical"]]:
    """The severity of alarms by their steps: critical if logits are high or the loss is unsound."""
    logits, losses = sorted(evidence.logits.items()), evidence.loss.critical
    bound = max(CRITICAL_LOGIT, RISE * logits[0][1]) if logits else 0.0

    def is_critical(step: int) -> bool:
        logit = bisect_right(logits, (step, math.inf)) - 1
        loss = bisect_right(losses, (step, True)) - 1
        return (logit >= 0 and logits[logit][1] > bound) or (loss >= 0 and losses[loss][1])

    return {step: "critical" if is_critical(step) else "warning" for step in set(steps)}


def leaves_at_once(alarms: Iterable[Event]) -> bool:
    """Whether the whole model left before single heads did, e.g. at too high a learning rate."""
    alarms = list(alarms)
    model = min((event.step for event in alarms if event.judges == "model"), default=math.inf)
    heads = min((event.step for event in alarms if event.judges == "head"), default=math.inf)
    return model < math.inf and model <= heads + AT_ONCE


def departed(events: Iterable[Event], evidence: Evidence) -> int | None:
    """The step at which the loss diverged for good."""
    of_loss = (event.step for event in events if event.kind == "alarm" and event.judges == "loss")
    left, lost = min(of_loss, default=None), evidence.loss.lost
    if lost is not None:
        return lost if left is None else min(left, lost)
    return None if evidence.loss.last is not None and evidence.loss.is_back else left


def _missing_loss(
    evidence: Evidence, alarms: Sequence[Event], switched: Mapping[Head, Event]
) -> str:
    first, last = evidence.loss.first, evidence.loss.last
    if first is None or last is None:
        return "no loss was recorded"
    # A resumed run may have had its alarms before its first sample.
    begins = evidence.steps[0] if evidence.steps else 0
    if first > max(begins, min((event.step for event in alarms), default=math.inf)):
        return "no loss was recorded before the first alarm"
    if last <= max((event.step for event in switched.values()), default=-1):
        return "no loss was recorded after the last switch"
    said = "the losses scatter too much to show whether they have risen"
    return said if evidence.loss.is_unsure else ""


# --- from the metadata ---------------------------------------------------------------------------


def at(metadata: object, *names: str) -> Any:
    """Returns a value of metadata, which may hold anything, by nested names; None if missing."""
    for name in names:
        metadata = metadata.get(name) if isinstance(metadata, Mapping) else None
    return metadata


def _sites_of(metadata: object) -> Mapping[Any, Any]:
    sites = at(metadata, "sites")
    return sites if isinstance(sites, Mapping) else {}


def is_judged(metadata: Mapping[str, Any] | None, evidence: Evidence) -> bool:
    """Whether some rule could judge heads by what was measured of them, twice or more."""
    indicators = evidence.indicators
    if evidence.head_steps[0] < 2:
        return False
    judged_by = at(metadata, "settings", "heads_judged_by")
    judged_by = judged_by if isinstance(judged_by, Mapping) else _JUDGED_BY
    return any(
        all(isinstance(one, list | tuple) and any(x in indicators for x in one) for one in needed)
        for needed in judged_by.values()
        if isinstance(needed, list | tuple)
    )


def not_watched_of(
    metadata: Mapping[str, Any] | None, measured: Collection[str]
) -> tuple[str, ...]:
    """The attention modules that a run's metadata name and that were not watched."""
    called, unseen = _sites_of(metadata), at(metadata, "unseen")
    names = [name for name in called if name not in measured or at(called, name, "unwatched")]
    # A module that the first step did not call may have been called since, e.g. an expert.
    later = map(str, unseen if isinstance(unseen, list | tuple) else ())
    return tuple(dict.fromkeys([*map(str, names), *(name for name in later if name not in called)]))


def nothing_to_correct(
    metadata: Mapping[str, Any] | None,
    ways: Collection[str] = UNROUNDED,
    named: Collection[str] = (),
) -> str:
    """Why modules (all, or only `named`) have nothing to correct, if they run in these ways."""
    sites = _sites_of(metadata)
    modules = [sites[name] for name in sites if name in named or not named]
    found = {_unrounded(module) for module in modules if not at(module, "unwatched")}
    if not found or not found <= {*ways}:
        return ""
    return f"attention {' or '.join(sorted(found))}, where delta is not rounded"


def _unrounded(module: object) -> str:
    precision = at(module, "precision")
    if isinstance(precision, list | tuple) and precision and all(x in _WIDE for x in precision):
        return f"runs in {precision[0]}"
    if at(module, "kernels") == ["MATH"]:
        return _MATH
    return _WRITTEN_OUT if "written out" in str(at(module, "not_switchable")) else ""
