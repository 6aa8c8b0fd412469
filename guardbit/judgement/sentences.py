"""All sentences of a judgement."""

from __future__ import annotations

from typing import TYPE_CHECKING

from guardbit.judgement.evidence import (
    AT_RISK,
    FALL_AFTER,
    FALL_BEFORE,
    HARDLY_AT_RISK,
    LOSS_SAMPLES,
    RISK_STEP,
    Head,
)
from guardbit.judgement.facts import RISE_STEPS, Facts

if TYPE_CHECKING:
    from guardbit.judgement.judging import Cause, Ended, State

#: Characters of an error's text in a headline.
_MOST_OF_ERROR = 100
_NAMES = {"max_logit": "logits", "w_q_spectral_norm": "the norm of W_Q"}

ENDS: dict[Ended | None, str] = {
    "crashed": "the run crashed",
    "interrupted": "the run was interrupted",
    "not closed": "the run was not closed: it was killed, or it still runs",
}
_RESUME = "resume from the last checkpoint, with this folder as dirpath"
_GOING_ON: dict[Ended | None, str] = {
    **dict.fromkeys(("crashed", "interrupted"), f"To go on, {_RESUME}."),
    "not closed": f"If it was killed, {_RESUME}: nothing after step {{:,}} was recorded.",
}
_ADVICE: dict[State, str] = {
    "healthy": "No action needed.",
    "unclear": f"Train longer, or sample more often: rules need {LOSS_SAMPLES} samples.",
    "warning": "Look at the loss, the largest logits and NaN.",
    "alarmed": "Switch the alarmed heads, as AutoStabilizer or a Policy does; keep a checkpoint.",
    "switched": "Wait for the next samples: logits and W_Q of the switched heads should fall.",
    "saved": "Go on training.",
    "lost": "Resume from a checkpoint before the first alarm, with the alarmed heads switched.",
    "learning-rate": "Resume from before the alarm with a lower rate or a longer warm-up.",
}
_LOST = (
    "Resume from a checkpoint before the loss diverged, with a lower rate; look at the data there."
)
_RATE = "Look at the learning rate and the data: switching does not help."


# Clauses, first the complete ones, then the ones with fields.
EVERYWHERE = "too many at once for failures of single heads"
NOT_ROUNDING = "rounding is not the cause"
NOT_FALLEN = "logits and W_Q have not fallen yet"
NO_HEAD = "no head was watched"
NO_RULE = "no rule could judge the heads"
NO_LOSS_ALARM = "no alarm on the loss"
LOCATE = "locate_nonfinite=True can name the first place next time"
BAD_GRADIENTS = "the gradients are not finite"
NO_SAMPLES = "no attention was measured"
TOO_FEW = f"{FALL_BEFORE} samples before the switch and {FALL_AFTER} after it are needed"
WITHIN_SCATTER = "too few heads fell by more than their scatter"
CORRECTED = "the alarmed heads were switched before their alarm"
GROWING = "other logits grow"
OTHERWISE = "a measurement shows that rounding does not move one of the alarmed heads"
FEW_LOSSES = "too few losses since then to say that the loss is unharmed"
NOT_MEASURED = "{} not measured {}"
STILL = "{} still {} after the switch"
NOT_HEADS = "an alarm at step {:,} names no measured head"
TOGETHER = "all layers diverged together, at step {:,}"
THEN_LOST = "{}; the loss diverged at step {:,}"
NOT_SWITCHED = "{} switched; {}"
NOT_BY_SWITCH = "{}; whether the switch did that is not known: {}"
SAVED = "{}, and switched: {}, {}, loss unharmed"
WARNING = "no alarm, but {}"
FROM_STEP = "from step {:,} on, because {}"
NOTHING = "nothing is known {}"
TOO_SHORT = f"too short to judge ({{}} of {LOSS_SAMPLES} samples)"
NO_ALARM = "no alarm up to step {:,}"
ERROR_GONE = "{:.2g} of dQ was wrong along W_Q before the switch, at most {:.2g} after it"
SHARE = "rounding's share of W_Q's changes is {:z.2f} ({:z.2f} to {:z.2f})"
UNMEASURED = "what rounding adds to W_Q was not measured"
RISK = "The model is {}: {}."
TITLES = {"learning-rate": "Learning rate too high", "saved": "Corrected"}


def plural(count: int, noun: str) -> str:
    return f"{count:,} {noun}{'s' * (count != 1)}"


def _rounded(x: float) -> str:
    return f"{x:,.0f}" if abs(x) >= 100 else f"{x:.3g}"


def counted(of: Facts) -> str:
    # One value a layer may be the largest over its heads.
    by_head = of.num_heads > of.num_layers
    total = plural(of.num_heads, "head") if by_head else plural(of.num_layers, "layer")
    return f"{len(of.alarmed):,} of {total}"


def alarmed_when(of: Facts) -> str:
    first = ", the first" * (len(of.alarmed) > 1)
    return f"{counted(of)} alarmed{first} at step {of.first_alarm or 0:,}"


def lost(of: Facts) -> str:
    departed = of.departed or 0
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
        said += ", despite the switch" if is_earlier else ""
    if of.loss_is_finite:
        return said
    if of.nonfinite is not None:
        step, place = of.nonfinite
        return f"{said}; step {step:,}: {place}"
    return said if of.locates else f"{said}; {LOCATE}"


def fall(of: Facts) -> str:
    if of.largest_fall is None:
        return NOT_FALLEN
    head, name, _, before, after, *_ = of.largest_fall
    what = f"{_NAMES[name]} of {name_of(head, of)}"
    return f"{what} fell from {_rounded(before)} to {_rounded(after)}"


def rising(of: Facts) -> str:
    """Says what rises or is not finite, "" for nothing."""
    if not of.rises:
        return ""
    if of.loss_rise:
        return f"the loss is {of.loss_rise:.2g} above its best"
    before = of.logit_before
    since = "" if before is None else f", and {RISE_STEPS:,} steps earlier it was {before:,.0f}"
    return f"the largest logit is {of.largest_logit or 0:,.0f}{since}"


def unjudged(of: Facts) -> str:
    """From which step on a run is not judged, and why; "" where all of it is."""
    found = [(step, _failed(text, again)) for step, text, again in of.errors]
    if of.bad_gradients_since is not None:
        found.append((of.bad_gradients_since, BAD_GRADIENTS))
    first, last, ended = of.first_step or 0, of.last_step or 0, of.last_head_step or 0
    begin, end = of.hole
    if of.head_samples >= LOSS_SAMPLES:
        # The next sample is due a cadence after the last one.
        if last - ended > end - begin:
            found.append((ended + 1, NO_SAMPLES))
        if 2 * (end - begin) > last - first:
            found.append((begin + 1, f"{NO_SAMPLES} up to step {end:,}"))
    step, why = min(found, key=lambda one: one[0], default=(0, ""))
    return FROM_STEP.format(step, why) if why else ""


def _failed(text: str, again: int | None) -> str:
    stage, _, error = text.partition(":")
    what = stage if " " in stage else f"the stage '{stage}' failed"
    error = error.strip()
    cut = error if len(error) <= _MOST_OF_ERROR else f"{error[: _MOST_OF_ERROR - 3]}..."
    until = "" if again is None else f", which works again from step {again:,} on"
    return f"{what} ({cut}){until}" if cut else f"{what}{until}"


def limits(of: Facts, state: State) -> list[str]:
    """The end of a headline: what was not watched."""
    found = [found_in_modules(of)] if of.modules and state != "warning" else []
    since = unjudged(of)
    if since and state not in ("healthy", "unclear", "lost"):
        found.append(NOTHING.format(since))
    if of.num_heads and of.not_watched:
        were = "was" if of.num_watched == 1 else "were"
        modules = f"of {of.num_modules:,} attention modules {were} watched"
        of_weights = "no call of attention was watched, only weights"
        found.append(f"only {of.num_watched:,} {modules}" if of.num_watched else of_weights)
    if of.watched_in_part:
        modules = f"{of.watched_in_part:,} of {of.num_modules:,} attention modules"
        found.append(f"only one of several calls was measured in {modules}")
    count, first = of.without_attention
    if first is not None and count:
        found.append(
            f"no watched attention was measured in {count:,} of the sampled steps"
            f"{', the first' if count > 1 else ','} at step {first:,}"
        )
    if of.logits_are_high and not of.logits_have_grown:
        now, first = (_rounded(x or 0.0) for x in (of.largest_logit, of.first_logit))
        found.append(f"the largest logit is {now}, and was {first} at the first sample")
    return found


def found_in_modules(of: Facts) -> str:
    (name, why), *others = of.modules
    more = f"; {len(others)} more such findings" if others else ""
    return f"{name}: {why}{more}" if name else f"{why}{more}"


def advice(state: State, of: Facts, cause: Cause, ended: Ended | None) -> str:
    going_on = _GOING_ON.get(ended, "").format(of.last_step or 0)
    said = _advice(state, of, cause)
    if going_on and state in ("healthy", "switched", "saved"):
        return going_on
    return f"{said} {going_on}".strip() if state in ("warning", "unclear") else said


def _advice(state: State, of: Facts, cause: Cause) -> str:
    if state == "warning" and of.modules:
        return "Look at the module that is named."
    if state == "alarmed" and not of.alarmed:
        return _ADVICE["warning"]
    if state == "alarmed":
        if cause.what == "not rounding" or of.needless or of.are_many:
            return _RATE
        if of.switched >= of.num_heads:
            return "Go back to a checkpoint before the first alarm: switching has not helped."
        if of.alarmed_and_switched == len(of.alarmed):
            return "Keep a checkpoint; if the switched heads do not calm down, lower the rate."
        if of.has_policy:
            return "Switch the alarmed heads by hand, as the policy did not; keep a checkpoint."
    if state == "switched" and of.largest_fall is not None:
        return "Go on training, and keep a checkpoint."
    if state == "unclear" and of.errors:
        return "An error of GuardBit left steps unjudged: the log says what failed."
    if state == "unclear" and of.bad_gradients_since is not None:
        return "Look at the gradients: steps are skipped, or weights become NaN."
    if state == "unclear" and not (of.num_heads and of.has_calls):
        return "GuardBit watches no attention, so it judges little: the log says what is missing."
    if state == "lost" and (of.lead is None or cause.what == "not rounding"):
        return _LOST
    return _ADVICE[state]


def keys(step: int, largest: float, layers: list[int], when: str) -> str:
    of_layers = f"layer{'s' * (len(layers) > 1)} {', '.join(map(str, layers))}"
    why = f"the largest key_common_mode at step {step:,} is {largest:.3f} ({of_layers})"
    if when == "early":
        return f"{why}, and says more from step {RISK_STEP:,} on"
    late = f", which is {when}" * bool(when)
    return (
        f"{why}{late}; of the study's eight kinds of model the three above {AT_RISK} at step"
        f" {RISK_STEP:,} were at risk, the five below {HARDLY_AT_RISK} hardly"
    )


def name_of(head: Head, of: Facts) -> str:
    layer, number = head
    return f"layer {layer}{f', head {number}' if of.num_heads > of.num_layers else ''}"
