"""One judgement of a run: what became of it, what moved its heads, how it ended, what to do.

`judge` is a pure function of samples (as `Evidence` keeps them), events and metadata. The console,
the report, the live page, `replay` and `guardbit.load` all show what it returns.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal, NamedTuple, get_args

from guardbit.judgement.evidence import LOSS_SAMPLES, RISK_STEP, SHARES, Evidence, Head, Nonfinite
from guardbit.records import Event, Verdict, named

State = Literal[
    "healthy", "unclear", "warning", "alarmed", "switched", "saved", "lost", "learning-rate"
]
STATES: tuple[State, ...] = get_args(State)

#: How a run ended. A run that was killed could not say so, and neither can one that still runs.
Ended = Literal["finished", "interrupted", "crashed", "not closed"]

Severity = Literal["none", "warning", "critical"]

#: A switched head is still alarming with an alarm in so many last steps; one within so many steps
#: of its switch is of the failure before.
LASTING = 1000
#: A head goes on growing if all of `GROWING` are so many times their value at its switch. The
#: switch has had an effect once one of them is at most so many times that value.
STILL_GROWING, FALLEN = 1.1, 0.9
#: A model that leaves at most this many steps after a head leaves at once. Heads that fail by
#: rounding lead the loss by 1,500 steps and more in the runs we have; at too high a rate all goes
#: within 600.
AT_ONCE = 1000
#: Logits are rising where the largest is above the first number, or above the second and so many
#: times that of so many steps before. Of 199 recorded runs this names those that grow, and no
#: corrected copy (`tests/data/golden`).
HIGH_LOGIT, RISING_LOGIT, RISE, RISE_STEPS = 4096.0, 1024.0, 1.4, 1000
#: Logits at which BF16 leaves no digit of the differences between keys.
CRITICAL_LOGIT = 10_000.0
#: Samples of the heads before which nothing is healthy: as many losses are needed to see one rise.
FEWEST_SAMPLES = LOSS_SAMPLES
#: The largest `key_common_mode` of `RISK_STEP` tells kinds of model apart: the study's kinds above
#: the first limit were at risk, those below the second hardly (studies/rescue/README.md).
AT_RISK, HARDLY_AT_RISK = 0.94, 0.7


class Cause(NamedTuple):
    """What moves the alarmed heads."""

    # By the interval: above one half, below it, or around it; "not measured" without any.
    what: Literal["rounding", "not rounding", "not settled", "not measured"]
    why: str = ""  # why it is not measured, or cannot be rounding; else ""
    share: float | None = None  # rounding's share of what the norm of W_Q does
    interval: tuple[float, float] | None = None  # the 95 % interval of the share

    @property
    def sentence(self) -> str:
        """What was measured, or why nothing was."""
        if self.share is None or self.interval is None:
            return self.why
        low, high = self.interval
        return f"rounding's share of W_Q's changes is {self.share:z.2f} ({low:z.2f} to {high:z.2f})"


class Risk(NamedTuple):
    """Whether a model is of a kind whose heads rounding moves, by the study's limits."""

    what: Literal["at risk", "hardly at risk", "of unknown risk"]
    why: str
    key_common_mode: float | None = None  # the largest of any head
    step: int | None = None  # at which it was measured
    layers: tuple[int, ...] = ()  # those above the limit of risk, or that of the largest

    @property
    def sentence(self) -> str:
        """What is known, and why."""
        return f"By its keys the model is {self.what}: {self.why}."


_VERDICTS: dict[str, Verdict] = {
    "rounding": "rounding",
    "not rounding": "not-rounding",
    "not settled": "unclear",
    "not measured": "unclear",
}


@dataclass(frozen=True, slots=True)
class Judgement:
    """What is to be said of a run."""

    # One of `STATES`. "healthy": rules had what they need, and neither the loss nor the logits
    # rise. "warning": they rise, without an alarm. "alarmed": heads alarmed, and are not switched,
    # or go on alarming or growing. "switched": all are switched, and what that does is not seen
    # yet. "saved": half of the alarmed heads or more fell by a tenth in logits or W_Q, no logits
    # grow, and the loss is sound. "lost": the loss diverged, or is not finite.
    state: State
    said: str  # what that rests on, a clause
    cause: Cause  # what moves the alarmed heads
    risk: Risk  # whether the model is of a kind at risk
    # "critical" for logits above 10,000, a loss that is lost, or one that rises with an alarmed
    # head.
    severity: Severity
    ended: Ended | None  # None where that is not known
    first_step: int | None  # of the samples, None without any
    last_step: int | None
    first_alarm: int | None  # its step, None without any
    num_alarms: int
    alarmed: tuple[Head, ...]  # in the order of their first alarm
    num_heads: int  # that were measured
    num_layers: int
    head_samples: int  # steps at which heads were measured
    call_samples: int  # those of them at which their calls were
    last_head_step: int | None  # the last of them, None without any
    head_samples_every: int | None  # the most steps between two of them, None without two
    num_modules: int  # attention modules that were measured or that the run's metadata name
    # Names of those that called no attention that could be watched, and of those of which no head
    # was measured. Of some of them the weights were measured all the same.
    not_watched: tuple[str, ...]
    watched_in_part: int  # modules of whose several calls in a forward only one is measured
    # Number of sampled steps in which no watched module called attention, and the first of them.
    without_attention: tuple[int, int | None]
    first_switch: int | None  # step of the first switch to a stabilizer, None without any
    switched: int  # number of heads that are switched at the end
    alarmed_and_switched: int  # number of these that alarmed
    stabilizers: tuple[str, ...]  # what they were switched to
    alarming_again: int  # number of switched heads that go on alarming at the end
    # Number of alarmed heads whose logit and W_Q have both grown by a tenth since their switch, or
    # since their alarm if that is later.
    still_growing: int
    not_measured_since: int  # number of alarmed and switched heads without a sample since then
    # Number of those without a sample up to their alarm, as in the folder of a resumed run: what
    # the switch does to them cannot be seen.
    unknown_before: int
    missing_loss: str  # why it cannot be said that the loss is sound, or ""
    departed: int | None  # step at which the loss diverged, unless it has come back
    lead: int | None  # steps from the first alarm on a head to that one, None if that is earlier
    rising: str  # what rises although nothing alarms, a clause; "" if nothing does
    largest_logit: float | None  # of the last sample, None where it was not measured
    loss_is_finite: bool  # whether the last loss is a number
    nonfinite: Nonfinite | None  # the first NaN or infinity in a call of attention

    @property
    def verdict(self) -> Verdict:
        """The cause in one word, "stable" without an alarm."""
        if self.state == "learning-rate":
            return "learning-rate"
        if not self.num_alarms:
            return "unclear" if self.state in ("unclear", "lost") else "stable"
        return _VERDICTS[self.cause.what]

    @property
    def headline(self) -> str:
        """The judgement in a sentence, most important first, with what limits it."""
        return "; ".join([self.sentence, *self.limits])

    @property
    def sentence(self) -> str:
        """The headline without what limits it."""
        title = (
            "Learning rate too high" if self.state == "learning-rate" else self.state.capitalize()
        )
        return f"{title}: {self.said}"

    @property
    def headline_running(self) -> str:
        """The headline of a run that goes on."""
        so_far = replace(self, ended=None).headline
        return f"Running, {so_far[0].lower()}{so_far[1:]}"

    @property
    def num_watched(self) -> int:
        """In how many attention modules calls were watched."""
        return self.num_modules - len(self.not_watched)

    @property
    def has_calls(self) -> bool:
        """Whether enough samples have calls of attention in them, or any if there are few."""
        enough = FEWEST_SAMPLES if self.head_samples >= FEWEST_SAMPLES else 1
        lacking = self.without_attention[0]
        # Where nothing but weights is recorded, the samples that lack calls tell.
        is_enough = (self.call_samples or self.head_samples - lacking) >= enough or not lacking
        return self.num_watched > 0 and is_enough

    @property
    def limits(self) -> list[str]:
        """What the sentence does not say: how the run broke off, and what was not watched."""
        found = [_ENDS[self.ended]] if self.ended in _ENDS else []
        if self.num_heads and self.not_watched:
            watched, were = self.num_watched, "was" if self.num_watched == 1 else "were"
            if watched:
                of = f"of {self.num_modules:,} attention modules"
                found.append(f"only {watched:,} {of} {were} watched")
            else:
                found.append("no call of attention was watched, only weights")
        if self.watched_in_part:
            of = f"{self.watched_in_part:,} of {self.num_modules:,} attention modules"
            found.append(f"only one of several calls was measured in {of}")
        count, first = self.without_attention
        if first is not None and count:
            found.append(
                f"no watched attention was measured in {count:,} of the sampled steps"
                f"{', the first' if count > 1 else ','} at step {first:,}"
            )
        return found

    @property
    def advice(self) -> str:
        """What to do, and how to go on with a run that broke off."""
        going_on = _GOING_ON.get(self.ended, "").format(self.last_step or 0)
        if going_on and self.state in ("healthy", "switched", "saved"):
            return going_on
        # Without a key_common_mode this says that delta is not rounded, see `risk_of`.
        is_exact = self.risk.what == "hardly at risk" and self.risk.key_common_mode is None
        if self.state == "alarmed" and (self.cause.what == "not rounding" or is_exact):
            return "Look at the learning rate and the data: switching does not help."
        if self.state == "alarmed" and not self.alarmed:  # as by a loss that has come back
            return _ADVICE["warning"]
        if self.state == "alarmed" and self.switched >= self.num_heads:
            return "Go back to a checkpoint before the first alarm: switching has not helped."
        if self.state == "alarmed" and self.alarmed_and_switched == len(self.alarmed):
            return "Keep a checkpoint; if the switched heads go on so, lower the learning rate."
        if self.state == "unclear" and not (self.num_heads and self.has_calls):
            return "Little is judged before attention is watched: the log says what is missing."
        if self.state == "lost" and (self.lead is None or self.cause.what == "not rounding"):
            return (
                "Resume from a checkpoint before the loss diverged, with a lower rate; look at the"
                " data there."
            )
        advice = _ADVICE[self.state]
        return f"{advice} {going_on}".strip() if self.state in ("warning", "unclear") else advice

    @property
    def verdict_and_advice(self) -> str:
        """The verdict on alarms, if there are any, and what to do."""
        verdict = f"Verdict {self.verdict}: {self.why}. " if self.num_alarms else ""
        return f"{verdict}{self.advice}"

    @property
    def why(self) -> str:
        """Why the verdict is what it is."""
        if self.state == "learning-rate":
            return f"all layers diverged together, at step {self.first_alarm:,}"
        return self.cause.sentence

    @property
    def facts(self) -> list[str]:
        """What the sentence rests on, in one line's worth of parts: alarms, lead, what was done."""
        parts = []
        if self.first_alarm is not None:
            parts.append(f"first alarm at step {self.first_alarm:,}")
        if self.alarmed:
            first = " and ".join(self.name_of(head) for head in self.alarmed[:2])
            more = f" and {len(self.alarmed) - 2} more" if len(self.alarmed) > 2 else ""
            parts.append(f"in {first}{more}")
        if self.departed is not None:
            parts.append(f"loss diverged at step {self.departed:,}")
            if self.lead is not None:
                parts.append(f"lead {self.lead:,} steps")
        if self.first_switch is not None:
            to = " and ".join(self.stabilizers)
            when = f"{', the first' * (self.switched > 1)} at step {self.first_switch:,}"
            parts.append(f"{self.switched} switched to {to}{when}")
        elif self.alarmed:
            parts.append("nothing is switched")
        return parts

    def name_of(self, head: Head) -> str:
        """Its layer and number."""
        layer, number = head
        # One value a layer may be the largest over its heads: their numbers are then not known.
        which = f", head {number}" if self.num_heads > self.num_layers else ""
        return f"layer {layer}{which}"

    def as_json(self) -> dict[str, Any]:
        """The same for a program; `outcome` is the state, `headline` the sentence."""
        fields = asdict(self)
        del fields["said"], fields["call_samples"], fields["watched_in_part"]
        fields["cause"], fields["risk"] = self.cause._asdict(), self.risk._asdict()
        if not math.isfinite(self.largest_logit or 0.0):
            fields["largest_logit"] = None  # JSON has no infinity
        fields["nonfinite"] = None if self.nonfinite is None else self.nonfinite._asdict()
        return {
            "outcome": fields.pop("state"),
            "verdict": self.verdict,
            "headline": self.headline,
            "advice": self.advice,
            **fields,
        }


def judge(
    evidence: Evidence,
    events: Iterable[Event] = (),
    metadata: Mapping[str, Any] | None = None,
    ended: Ended | None = None,
) -> Judgement:
    """Judges a run by its samples and events, its metadata, and how it ended, where known."""
    events = sorted(events, key=lambda event: event.step)
    alarms = [event for event in events if event.kind == "alarm"]
    alarmed, switched = evidence.first(alarms), evidence.switched(events)
    first_step, last_step = evidence.steps or (None, None)
    not_watched, measured = not_watched_of(metadata, evidence.layers), len(evidence.layers)
    # A head may have grown soundly from its switch to its alarm, as when all run switched from 0.
    since = {
        head: max(event.step, switched[head].step)
        for head, event in alarmed.items()
        if head in switched
    }
    growths = {head: evidence.growth(head, step) for head, step in since.items()}
    left = departed(alarms, evidence)
    first_alarm = min((event.step for event in alarms), default=None)
    judgement = Judgement(
        state="healthy",
        said="",
        cause=cause_of(evidence, alarms, metadata),
        risk=risk_of(evidence, metadata),
        severity="none",
        ended=ended,
        first_step=first_step,
        last_step=last_step,
        first_alarm=first_alarm,
        num_alarms=len(alarms),
        alarmed=tuple(alarmed),
        num_heads=sum(map(len, evidence.heads.values())),
        num_layers=measured,
        head_samples=evidence.head_steps[0],
        call_samples=evidence.call_steps[0],
        last_head_step=evidence.head_steps[1],
        head_samples_every=evidence.head_steps[2],
        num_modules=measured + len(set(not_watched) - evidence.layers.keys()),
        not_watched=not_watched,
        watched_in_part=_watched_in_part(metadata),
        without_attention=without_attention_of(metadata),
        first_switch=min((event.step for event in switched.values()), default=None),
        switched=len(switched),
        alarmed_and_switched=len(since),
        stabilizers=tuple(dict.fromkeys(event.stabilizer for event in switched.values())),
        alarming_again=len(_alarming_again(evidence, alarms, switched)),
        still_growing=sum(
            bool(found) and min(found.values()) > STILL_GROWING for found in growths.values()
        ),
        not_measured_since=sum(evidence.span(head)[1] <= step for head, step in since.items()),
        unknown_before=sum(evidence.span(head)[0] > alarmed[head].step for head in since),
        missing_loss=_missing_loss(evidence, alarms, switched),
        departed=left,
        lead=_lead(alarmed, left),
        rising=_rising(evidence),
        largest_logit=_logits(evidence)[0],
        loss_is_finite=evidence.loss.lost is None,
        nonfinite=evidence.nonfinite,
    )
    # Heads that were not what was moving need not fall: half of them is enough.
    fallen = sum(bool(found) and min(found.values()) <= FALLEN for found in growths.values())
    rises = any(found.get("max_logit", 0.0) > STILL_GROWING for found in growths.values())
    rises |= _is_broken(evidence)
    has_effect = 2 * fallen >= len(growths) > 0 and not rises and not _logits_rise(evidence)
    state, said = _outcome(
        judgement, _leaves_at_once(alarms), has_effect, is_judged(metadata, evidence)
    )
    return replace(judgement, state=state, said=said, severity=_severity(judgement, state))


def _lead(alarmed: Mapping[Head, Event], left: int | None) -> int | None:
    first = min((event.step for event in alarmed.values()), default=None)
    return None if left is None or first is None or first > left else left - first


def verdict_of(alarms: Sequence[Event], cause: Cause) -> tuple[Verdict, str]:
    """The verdict by the alarms of a run that goes on, and why."""
    if not alarms:
        return "stable", "no rule has fired"
    first = min(alarms, key=lambda event: event.step)
    if _leaves_at_once(alarms):
        return "learning-rate", f"all layers diverged together, at step {first.step:,}"
    return _VERDICTS[cause.what], cause.sentence


def _severity(found: Judgement, state: State) -> Severity:
    if state in ("healthy", "unclear", "saved"):
        return "none"
    is_high = (found.largest_logit or 0.0) > CRITICAL_LOGIT
    is_lost = found.departed is not None
    return "critical" if is_lost or is_high or _rises_alarmed(found) else "warning"


def severities(
    evidence: Evidence, steps: Iterable[int]
) -> dict[int, Literal["warning", "critical"]]:
    """The severity of alarms by their steps: critical if logits are high or the loss is unsound."""
    logits, losses = sorted(evidence.logits.items()), evidence.loss.critical

    def is_critical(step: int) -> bool:
        logit = bisect_right(logits, (step, math.inf)) - 1
        loss = bisect_right(losses, (step, True)) - 1
        return (logit >= 0 and logits[logit][1] > CRITICAL_LOGIT) or (loss >= 0 and losses[loss][1])

    return {step: "critical" if is_critical(step) else "warning" for step in set(steps)}


def _rises_alarmed(found: Judgement) -> bool:
    return bool(found.alarmed) and found.rising.startswith("the loss")


def _leaves_at_once(alarms: Sequence[Event]) -> bool:
    """Whether the whole model left before single heads did, as at too high a learning rate."""
    model = min((event.step for event in alarms if event.judges == "model"), default=None)
    heads = min((event.step for event in alarms if event.judges == "head"), default=math.inf)
    return model is not None and model <= heads + AT_ONCE


def cause_by(share: float, low: float, high: float) -> Cause:
    """The cause by rounding's measured share and the ends of its interval."""
    what = "rounding" if low > 0.5 else "not rounding" if high < 0.5 else "not settled"
    return Cause(what, "", share, (low, high))


def cause_of(
    evidence: Evidence, alarms: Sequence[Event], metadata: Mapping[str, Any] | None
) -> Cause:
    """The cause by the first of the alarmed heads whose share was measured since its alarm."""
    for head, alarm in evidence.first(alarms).items():
        step, measured = evidence.shares.get(head, (-1, {}))
        # Before its alarm a head may not have moved, and rounding not moved it.
        if step < alarm.step:
            continue
        if len(measured) == len(SHARES) and all(map(math.isfinite, measured.values())):
            return cause_by(*(measured[name] for name in SHARES))
    if nothing := nothing_to_correct(metadata):
        return Cause("not rounding", nothing)
    why = _at(metadata, "rounding_unmeasured")
    reason = f": {why}" if why else ""
    return Cause("not measured", f"what rounding adds to W_Q was not measured{reason}")


def risk_of(evidence: Evidence, metadata: Mapping[str, Any] | None) -> Risk:
    """The risk by the largest `key_common_mode`, at the step that the study looked at."""
    if nothing := nothing_to_correct(metadata) or delta_not_rounded(metadata):
        return Risk("hardly at risk", nothing)
    step, modes = evidence.common_modes
    if not modes:
        return Risk("of unknown risk", "key_common_mode was not measured")
    largest = max(modes.values())
    when = "early" if step < RISK_STEP else "late" if step > 1.5 * RISK_STEP else ""
    what = "of unknown risk"
    if not when and not HARDLY_AT_RISK <= largest <= AT_RISK:
        what = "at risk" if largest > AT_RISK else "hardly at risk"
    layers = sorted(layer for layer, mode in modes.items() if mode >= min(largest, AT_RISK))
    why = (
        f"the largest key_common_mode at step {step:,}{when and f', which is {when},'} is"
        f" {largest:.3f} (layer{'s' * (len(layers) > 1)} {', '.join(map(str, layers))})"
    )
    if when == "early":
        why += f"; it tells from step {RISK_STEP:,} on"
    else:
        why += (
            f"; of the study's eight kinds of model the three above {AT_RISK} at step"
            f" {RISK_STEP:,} were at risk, the five below {HARDLY_AT_RISK} hardly: a statistic, no"
            " promise"
        )
    return Risk(what, why, largest, step, tuple(layers))


def nothing_to_correct(metadata: Mapping[str, Any] | None) -> str:
    """Why attention of a run is next to free of rounding; "" where it is not."""
    precision = _at(metadata, "precision")
    if isinstance(precision, list | tuple) and precision and all(x in _WIDE for x in precision):
        return f"attention runs in {' and '.join(map(str, precision))}"
    return ""


def delta_not_rounded(metadata: Mapping[str, Any] | None) -> str:
    """How a run computes attention where none of it rounds delta; "" elsewhere."""
    sites = _at(metadata, "sites")
    ways = {_unrounded(module) for module in (sites.values() if isinstance(sites, Mapping) else ())}
    if not ways or "" in ways:
        return ""
    return f"attention {' or '.join(sorted(ways))}, which does not round delta"


def _unrounded(module: object) -> str:
    if _at(module, "kernels") == ["MATH"]:
        return "runs in PyTorch's math kernel"
    is_written_out = "written out" in str(_at(module, "not_switchable"))
    return "is written out in PyTorch" if is_written_out else ""


_WIDE = ("float32", "float64")


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
    said = "the losses scatter too much to say that they have not risen"
    return said if evidence.loss.is_unsure else ""


def departed(events: Iterable[Event], evidence: Evidence) -> int | None:
    """The step at which the loss diverged for good."""
    of_loss = (event.step for event in events if event.kind == "alarm" and event.judges == "loss")
    left = min(of_loss, default=None)
    lost = evidence.loss.lost
    if lost is not None:
        return lost if left is None else min(left, lost)
    has_come_back = evidence.loss.last is not None and evidence.loss.is_back
    return None if has_come_back else left


def _is_broken(evidence: Evidence) -> bool:
    return evidence.last_broken == evidence.call_steps[1]


def _rising(evidence: Evidence) -> str:
    """Says what rises, or is not finite: the loss, attention, or the largest logit."""
    if evidence.loss.rise:
        return f"the loss is {evidence.loss.rise:.2g} above its best"
    if _is_broken(evidence):
        return f"attention has NaN or infinity in its forward at step {evidence.last_broken:,}"
    logit, before = _logits(evidence)
    if logit is None or (logit < HIGH_LOGIT and not _logits_rise(evidence)):
        return ""
    since = "" if before is None else f", and {RISE_STEPS:,} steps earlier it was {before:,.0f}"
    return f"the largest logit is {logit:,.0f}{since}"


def _logits(evidence: Evidence) -> tuple[float | None, float | None]:
    """The largest logit of the last sample, and of the last one so many steps before."""
    last = max(evidence.logits, default=-1)
    before = max((step for step in evidence.logits if step <= last - RISE_STEPS), default=-1)
    return evidence.logits.get(last), evidence.logits.get(before)


def _logits_rise(evidence: Evidence) -> bool:
    logit, before = _logits(evidence)
    if logit is None or before is None:
        return False
    return logit >= RISING_LOGIT and logit > RISE * before


def _alarming_again(
    evidence: Evidence, alarms: Sequence[Event], switched: Mapping[Head, Event]
) -> set[Head]:
    """The heads with an alarm in the last steps of the run, long after their switch."""
    end = evidence.steps[1] if evidence.steps else 0
    return {
        head
        for event in alarms
        if event.step > end - LASTING
        for head in evidence.heads_of(event)
        if head in switched and event.step > switched[head].step + LASTING
    }


# --- what the metadata say -----------------------------------------------------------------------


def _at(metadata: object, *names: str) -> Any:
    """What metadata, which may hold anything, have under nested names; None for nothing."""
    for name in names:
        metadata = metadata.get(name) if isinstance(metadata, Mapping) else None
    return metadata


#: By what heads are judged where the metadata do not say it, as those of a table.
_JUDGED_BY = {"any rule": [["w_q_spectral_norm", "max_logit", "dq_coherent_error"]]}


def is_judged(metadata: Mapping[str, Any] | None, evidence: Evidence) -> bool:
    """Whether some rule could judge heads by what was measured of them, twice or more."""
    indicators = evidence.indicators
    if evidence.head_steps[0] < 2:
        return False
    judged_by = _at(metadata, "settings", "heads_judged_by")
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
    sites, unseen = _at(metadata, "sites"), _at(metadata, "unseen")
    called = sites if isinstance(sites, Mapping) else {}
    names = [name for name in called if name not in measured or _at(called, name, "unwatched")]
    # What the first step passed by may have been called since, as an expert without tokens then.
    later = map(str, unseen if isinstance(unseen, list | tuple) else ())
    return tuple(dict.fromkeys([*map(str, names), *(name for name in later if name not in called)]))


def _watched_in_part(metadata: Mapping[str, Any] | None) -> int:
    sites = _at(metadata, "sites")
    names = sites if isinstance(sites, Mapping) else ()
    of_several = [name for name in names if _at(sites, name, "several_calls")]
    return sum(not _at(sites, name, "unwatched") for name in of_several)


def without_attention_of(metadata: Mapping[str, Any] | None) -> tuple[int, int | None]:
    """In how many sampled steps no call of watched modules was measured, and the first of them."""
    samples, first = (_at(metadata, "without_attention", name) for name in ("samples", "first"))
    if isinstance(samples, int) and isinstance(first, int):
        return samples, first
    return 0, None


# --- sentences -----------------------------------------------------------------------------------

_ENDS: dict[Ended | None, str] = {
    "crashed": "the run crashed",
    "interrupted": "the run was interrupted",
    "not closed": "the run was not closed: it was killed, or it still runs",
}

_RESUME = "resume from the last checkpoint, with the folder that holds the samples as dirpath"
_GOING_ON: dict[Ended | None, str] = {
    **dict.fromkeys(("crashed", "interrupted"), f"To go on, {_RESUME}."),
    "not closed": f"If it was killed, {_RESUME}: nothing after step {{:,}} was recorded.",
}

_ADVICE: dict[State, str] = {
    "healthy": "Nothing is to be done.",
    "unclear": f"Go on: heads need {FEWEST_SAMPLES} samples of indicators that the rules read.",
    "warning": "See that a policy is attached; look at the loss, the largest logits and NaN.",
    "alarmed": "Switch the alarmed heads to exact_delta, or let a policy do so; keep a checkpoint.",
    "switched": "Wait for the next samples: logits and W_Q of the switched heads should fall.",
    "saved": "Go on training.",
    "lost": "Resume from a checkpoint before the first alarm, with the alarmed heads switched.",
    "learning-rate": "Resume from before the alarm with a lower rate or a longer warm-up.",
}


def _outcome(
    of: Judgement, is_at_once: bool, has_effect: bool, is_judged: bool
) -> tuple[State, str]:
    """The first state whose condition holds, and what is said of a run in it."""
    by_head = of.num_heads > of.num_layers
    total, noun = (of.num_heads, "head") if by_head else (of.num_layers, "layer")
    counted = f"{len(of.alarmed):,} of {total:,} {noun}{'s' * (total != 1)}"
    since = f"{counted} since step {of.first_alarm or 0:,}"
    when = f"{', the first' * (len(of.alarmed) > 1)} at step {of.first_alarm or 0:,}"
    if is_at_once and of.loss_is_finite:
        lost = f"; the loss diverged at step {of.departed:,}" if of.departed is not None else ""
        return "learning-rate", f"all layers diverged together, at step {of.first_alarm:,}{lost}"
    if of.departed is not None:
        return "lost", _how_it_was_lost(of, of.departed)
    if not of.num_heads:
        return "unclear", "no head was watched"
    if not of.num_alarms:
        return _without_alarm(of, is_judged)
    if not of.alarmed:
        return "alarmed", f"an alarm at step {of.first_alarm:,} names no measured head"
    goes_on = [
        (of.still_growing, f"{of.still_growing} still growing after the switch"),
        (of.alarming_again, f"{of.alarming_again} still alarming after the switch"),
        (of.cause.what == "not rounding", "rounding is not the cause"),
        (of.unknown_before, f"{of.unknown_before} not measured before the alarm"),
    ]
    for holds, said in goes_on:
        if holds:
            return "alarmed", f"{since}; {said}"
    if of.alarmed_and_switched < len(of.alarmed) or _rises_alarmed(of):
        done = f"{of.alarmed_and_switched or 'none'} switched"
        loss = of.rising or of.missing_loss or "no alarm on the loss"
        return "alarmed", f"{since}, {done}; {loss}"
    if of.not_measured_since:
        seen = f"{of.not_measured_since} not measured since the switch"
    elif of.missing_loss or not has_effect:
        broken = of.rising if of.rising.startswith("attention") else ""
        seen = of.missing_loss or broken or "logits and W_Q have not fallen yet"
    else:
        return "saved", f"{counted} alarmed{when}, corrected, loss unharmed"
    return "switched", f"{counted} alarmed{when}, all of them switched; {seen}"


def _without_alarm(of: Judgement, is_judged: bool) -> tuple[State, str]:
    last, last_of_heads = of.last_step or 0, of.last_head_step or 0
    is_short = of.head_samples < FEWEST_SAMPLES
    if not is_judged and not is_short:
        return "unclear", "no rule could judge the heads"
    if is_judged and of.rising:
        return "warning", f"no alarm, but {of.rising}"
    if is_short:
        samples = f"{of.head_samples} sample{'s' * (of.head_samples > 1)}"
        return "unclear", f"too short to judge: {samples}, {FEWEST_SAMPLES} needed"
    # The next sample is due a cadence after the last one.
    state = "healthy" if of.has_calls else "unclear"  # W_Q alone may be seen to grow, no more
    if last - last_of_heads <= (of.head_samples_every or 0):
        return state, f"no alarm up to step {last_of_heads:,}"
    samples = f"no alarm in {of.head_samples:,} samples of the heads"
    return state, f"{samples}, the last at step {last_of_heads:,} of {last:,}"


def _how_it_was_lost(of: Judgement, departed: int) -> str:
    said = f"the loss is not finite (NaN or infinity) from step {departed:,}"
    if of.loss_is_finite:
        said = f"the loss diverged at step {departed:,}"
    if of.lead is None:
        said += ", before any head alarmed" if of.num_heads else ", and no head was watched"
    elif of.lead == 0:
        said += ", with the first alarm"
    else:
        said += f", {of.lead:,} steps after the first alarm"
        is_earlier = of.first_switch is not None and of.first_switch < departed
        said += ", in spite of the switch" if is_earlier else ""
    if of.loss_is_finite or of.nonfinite is None:
        return said
    step, site, tensor, heads = of.nonfinite
    where = f"{tensor} of {site}, {named(heads)}, at step {step:,}"
    return f"{said}; the first such value was seen in {where}"
