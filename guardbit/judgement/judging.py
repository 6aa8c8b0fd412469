"""One judgement of a run: what became of it, what moved its heads, how it ended, what to do."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from guardbit.judgement import sentences as say
from guardbit.judgement.evidence import (
    AT_RISK,
    HARDLY_AT_RISK,
    LOSS_SAMPLES,
    RISK_STEP,
    SHARES,
    Change,
    Evidence,
)
from guardbit.judgement.facts import (
    CRITICAL_LOGIT,
    PRECISE,
    Facts,
    at,
    corrected_before,
    leaves_at_once,
    nothing_to_correct,
)
from guardbit.records import Event, Verdict

State = Literal[
    "healthy", "unclear", "warning", "alarmed", "switched", "saved", "lost", "learning-rate"
]

#: How a run ended. A run that was killed could not say so, and neither can one that still runs.
Ended = Literal["finished", "interrupted", "crashed", "not closed"]

Severity = Literal["none", "warning", "critical"]


class Cause(NamedTuple):
    """What moves the alarmed heads."""

    # By the interval: above one half, below it, or around it; "not measured" without any.
    what: Literal["rounding", "not rounding", "not settled", "not measured"]
    why: str = ""  # why it is not measured, cannot be rounding, or is without a share; else ""
    share: float | None = None  # rounding's share of what the norm of W_Q does
    interval: tuple[float, float] | None = None  # the 95 % interval of the share

    @property
    def sentence(self) -> str:
        if self.share is None or self.interval is None:
            return self.why
        return say.SHARE.format(self.share, *self.interval)


class Risk(NamedTuple):
    """Whether a model is of a kind whose heads rounding moves, by the study's limits."""

    what: Literal["at risk", "hardly at risk", "of unknown risk"]
    why: str
    key_common_mode: float | None = None  # the largest of any head
    step: int | None = None  # at which it was measured
    layers: tuple[int, ...] = ()  # with a value above the limit of risk, or with the largest

    @property
    def sentence(self) -> str:
        return say.RISK.format(self.what, self.why)


_VERDICTS: dict[str, Verdict] = {"rounding": "rounding", "not rounding": "not-rounding"}


@dataclass(frozen=True, slots=True)
class Judgement:
    """What became of a run, why, and what to do."""

    # "healthy": rules judged the heads to the end, and neither the loss nor the logits rise.
    # "unclear": they did not. "warning": something rises, or the audit of modules found something,
    # without an alarm. "alarmed": heads alarmed, and are not switched, or go on alarming or
    # growing. "switched": all are switched, and nobody knows what that does. "saved": rounding was
    # measured as the cause, half of the alarmed heads or more fell by more than they scatter, and
    # the loss is sound. "lost": the loss diverged, or is not finite.
    state: State
    cause: Cause
    risk: Risk
    # "critical" for logits that have grown above 10,000, a loss that is lost, or one that rises
    # with an alarmed head.
    severity: Severity
    ended: Ended | None  # None if unknown
    sentence: str  # the judgement, most important first
    unwatched: tuple[str, ...]  # what the judgement leaves out
    advice: str  # what to do
    numbers: dict[str, Any]  # `Facts`, by their names

    @property
    def verdict(self) -> Verdict:
        """The cause in one word, "stable" without an alarm."""
        if self.state == "learning-rate":
            return "learning-rate"
        if not self.numbers["alarms"]:
            return "unclear" if self.state in ("unclear", "lost") else "stable"
        return _VERDICTS.get(self.cause.what, "unclear")

    @property
    def why(self) -> str:
        together = say.TOGETHER.format(self.numbers["first_alarm"] or 0)
        return together if self.state == "learning-rate" else self.cause.sentence

    @property
    def verdict_and_advice(self) -> str:
        verdict = f"Verdict {self.verdict}: {self.why}. " if self.numbers["alarmed"] else ""
        return f"{verdict}{self.advice}"

    @property
    def limits(self) -> list[str]:
        """How the run broke off, and what was not watched."""
        ends = [say.ENDS[self.ended]] if self.ended in say.ENDS else []
        return [*ends, *self.unwatched]

    @property
    def headline(self) -> str:
        return "; ".join([self.sentence, *self.limits])

    @property
    def headline_so_far(self) -> str:
        """The headline without how the run ended, for where that is said anyhow."""
        return "; ".join([self.sentence, *self.unwatched])

    @property
    def headline_running(self) -> str:
        so_far = self.headline_so_far
        return f"Running, {so_far[0].lower()}{so_far[1:]}"

    def as_json(self) -> dict[str, Any]:
        """The same for a program; `outcome` is the state."""
        return {
            "outcome": self.state,
            "verdict": self.verdict,
            "headline": self.headline,
            "advice": self.advice,
            "severity": self.severity,
            "ended": self.ended,
            "cause": self.cause._asdict(),
            "risk": self.risk._asdict(),
            **{name: _as_plain(value) for name, value in self.numbers.items()},
        }


def _as_plain(value: Any) -> Any:
    if isinstance(value, Change):
        return {name: _as_plain(part) for name, part in value._asdict().items()}
    # JSON has no infinity.
    return None if isinstance(value, float) and not math.isfinite(value) else value


def judge(
    evidence: Evidence,
    events: Iterable[Event] = (),
    metadata: Mapping[str, Any] | None = None,
    ended: Ended | None = None,
    diagnosed: Iterable[Mapping[str, Any]] = (),
) -> Judgement:
    """Judges a run; `diagnosed` is what `guardbit diagnose` has said of heads."""
    events = sorted(events, key=lambda event: event.step)
    facts = Facts(evidence, events, metadata, diagnosed)
    risk = risk_of(evidence, metadata)
    cause = cause_of(evidence, events, metadata)
    if cause.what == "not measured" and facts.error_gone and _has_fallen(facts):
        cause = Cause("rounding", say.ERROR_GONE.format(*facts.error_gone))
    state, clause = _outcome(facts, cause)
    sentence = f"{say.TITLES.get(state, state.capitalize())}: {clause}"
    unwatched = tuple(say.limits(facts, state))
    advice = say.advice(state, facts, cause, ended)
    severity = _severity(facts, state)
    return Judgement(state, cause, risk, severity, ended, sentence, unwatched, advice, vars(facts))


def _outcome(of: Facts, cause: Cause) -> tuple[State, str]:
    """Returns the first state whose condition holds, and the clause that says why."""
    if of.leaves_at_once and of.loss_is_finite:
        together = say.TOGETHER.format(of.first_alarm)
        lost = of.departed is not None
        return "learning-rate", say.THEN_LOST.format(together, of.departed) if lost else together
    if of.departed is not None:
        return "lost", say.lost(of)
    if of.modules and not of.alarms and not of.errors:
        return "warning", say.found_in_modules(of)
    if not of.num_heads:
        return "unclear", say.unjudged(of) or say.NO_HEAD
    if not of.alarms:
        return _without_alarm(of)
    if not of.alarmed:
        return "alarmed", say.NOT_HEADS.format(of.first_alarm)
    since = f"{say.counted(of)} since step {of.first_alarm or 0:,}"
    goes_on = [
        (of.still_growing, say.STILL.format(of.still_growing, "growing")),
        (of.alarming_again, say.STILL.format(of.alarming_again, "alarming")),
        (cause.what == "not rounding", say.NOT_ROUNDING),
        (bool(of.needless), of.needless),
        (of.are_many and cause.what != "rounding", say.EVERYWHERE),
        (of.unknown_before, say.NOT_MEASURED.format(of.unknown_before, "before the alarm")),
    ]
    for holds, why in goes_on:
        if holds:
            return "alarmed", f"{since}; {why}"
    if of.alarmed_and_switched < len(of.alarmed) or of.loss_rise:
        loss = say.rising(of) or of.missing_loss or say.NO_LOSS_ALARM
        number = of.alarmed_and_switched or "none"
        return "alarmed", f"{since}, {say.NOT_SWITCHED.format(number, loss)}"
    if why := _not_saved(of, cause):
        return "switched", f"{say.alarmed_when(of)}; {why}"
    return "saved", say.SAVED.format(say.alarmed_when(of), cause.sentence, say.fall(of))


def _without_alarm(of: Facts) -> tuple[State, str]:
    is_short = of.head_samples < LOSS_SAMPLES
    if not of.is_judged and not is_short:
        return "unclear", say.NO_RULE
    if of.is_judged and of.rises:
        return "warning", say.WARNING.format(say.rising(of))
    if since := say.unjudged(of):
        return "unclear", since
    if is_short:
        return "unclear", say.TOO_SHORT.format(of.head_samples)
    # Weights without calls can show growth, but not health.
    return "healthy" if of.has_calls else "unclear", say.NO_ALARM.format(of.last_head_step or 0)


def _has_fallen(of: Facts) -> bool:
    """Whether half of the switched heads fell; heads switched before their alarm need not."""
    return 2 * of.fallen >= of.alarmed_and_switched - of.corrected_before > 0


def _not_saved(of: Facts, cause: Cause) -> str:
    """Why nobody can say that a switch has saved a run, "" where one can."""
    if of.not_measured_since:
        return say.NOT_MEASURED.format(of.not_measured_since, "since the switch")
    if of.missing_loss:
        return of.missing_loss
    if of.largest_fall is None:
        return say.NOT_FALLEN
    since = say.unjudged(of)
    reasons = [
        (of.corrected_before == of.alarmed_and_switched, say.CORRECTED),
        (of.growing or of.logits_rise, say.GROWING),
        (since, say.NOTHING.format(since)),
        (not _has_fallen(of) and not of.are_enough, say.TOO_FEW),
        (not _has_fallen(of), say.WITHIN_SCATTER),
        (of.few_losses, say.FEW_LOSSES),
        (of.is_refuted, say.OTHERWISE),
        (cause.what != "rounding", cause.sentence),
    ]
    return next((say.NOT_BY_SWITCH.format(say.fall(of), why) for so, why in reasons if so), "")


def _severity(of: Facts, state: State) -> Severity:
    if state in ("healthy", "unclear", "saved"):
        return "none"
    # If logits had grown before the first sample, e.g. in a resumed run, their level decides.
    had_grown = of.first_step is not None and (of.first_alarm or math.inf) < of.first_step
    is_high = (of.largest_logit or 0.0) > CRITICAL_LOGIT and (of.logits_have_grown or had_grown)
    is_lost = of.departed is not None
    return "critical" if is_lost or is_high or (of.alarmed and of.loss_rise) else "warning"


def verdict_of(alarms: Sequence[Event], cause: Cause) -> tuple[Verdict, str]:
    """The verdict by the alarms of a run that goes on, and why."""
    if not alarms:
        return "stable", "no rule has fired"
    if leaves_at_once(alarms):
        return "learning-rate", say.TOGETHER.format(min(event.step for event in alarms))
    return _VERDICTS.get(cause.what, "unclear"), cause.sentence


def cause_by(share: float, low: float, high: float) -> Cause:
    """The cause by rounding's measured share and the ends of its interval."""
    what = "rounding" if low > 0.5 else "not rounding" if high < 0.5 else "not settled"
    return Cause(what, "", share, (low, high))


def cause_of(
    evidence: Evidence, events: Sequence[Event], metadata: Mapping[str, Any] | None
) -> Cause:
    """The cause by the first of the alarmed heads whose share was measured since its alarm."""
    alarmed = evidence.first(event for event in events if event.kind == "alarm")
    corrected = corrected_before(alarmed, evidence.switched(events))
    for head, alarm in alarmed.items():
        step, measured = evidence.shares.get(head, (-1, {}))
        # Before its alarm a head may not have moved; a corrected head's share raised no alarm.
        if step < alarm.step or head in corrected:
            continue
        if len(measured) == len(SHARES) and all(map(math.isfinite, measured.values())):
            return cause_by(*(measured[name] for name in SHARES))
    if nothing := nothing_to_correct(metadata, PRECISE, {alarm.site for alarm in alarmed.values()}):
        return Cause("not rounding", nothing)
    if len(corrected) == len(alarmed) > 0:
        return Cause("not measured", say.CORRECTED)
    why = str(at(metadata, "rounding_unmeasured") or "")
    return Cause("not measured", f"{say.UNMEASURED}{f': {why}' * bool(why)}")


def risk_of(evidence: Evidence, metadata: Mapping[str, Any] | None) -> Risk:
    """The risk by the largest `key_common_mode`, at the step that the study looked at."""
    if nothing := nothing_to_correct(metadata):
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
    return Risk(what, say.keys(step, largest, layers, when), largest, step, tuple(layers))
