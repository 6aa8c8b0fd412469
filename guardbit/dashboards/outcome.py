"""What became of a run: healthy, saved, alarmed, lost, too high a learning rate, or unclear.

The outcome is derived from what the run recorded, its events and its losses; nothing is judged
anew.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal, cast, get_args

import numpy as np
import pandas as pd

from guardbit.dashboards import marks, tables
from guardbit.dashboards.coverage import (
    Sampling,
    is_judged,
    not_watched_of,
    sampling_of,
    without_attention_of,
)
from guardbit.dashboards.tables import Head
from guardbit.records import Event, RunEnd

OutcomeKind = Literal["healthy", "saved", "alarmed", "lost", "learning-rate", "unclear"]
OUTCOMES: tuple[OutcomeKind, ...] = get_args(OutcomeKind)

#: A loss has come back when the median of this many last samples is within so many nats of the
#: smallest such median.
LOSS_SAMPLES, COME_BACK = 8, 0.1
#: A switched head is still alarming with an alarm in so many last steps; one within so many steps
#: of its switch is of the failure before.
LASTING = 1000
#: What the switch is to stop. A head whose values are all so many times those at its switch goes on
#: growing: a rule may be silent meanwhile, as `head_growth` is until it has grown by as much again.
GROWING, STILL_GROWING = ("w_q_spectral_norm", "max_logit"), 1.1


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a run.

    Attributes:
        kind: One of `OUTCOMES`. "saved": all alarmed heads were switched and measured since, none
            of them goes on alarming or growing, and the loss has not diverged. "alarmed": nor has
            the loss diverged, but heads are not switched, not measured since, or go on; or losses
            are missing. "lost": single heads alarmed, and the loss has diverged.
        verdict: The last verdict. Where none was recorded: "" if there was an alarm, else "stable",
            or "unclear" if no rule could judge heads.
        first_step: First recorded step, None without samples.
        last_step: The last one.
        first_alarm: Step of the first alarm, None without any.
        model_alarm: Step of the first alarm on the whole model, None without any.
        num_alarms: Alarms in all.
        alarmed: The heads alarmed, in the order of their first alarm; (layer, head).
        num_heads: Heads measured.
        num_layers: Attention modules measured.
        head_samples: Steps at which heads were measured.
        last_head_step: The last of them, None without any.
        head_samples_every: The most steps between two of them, None without two.
        num_modules: Attention modules that were measured or that the run's metadata name.
        not_watched: Names of those that called no attention that could be watched, and of those of
            which no head was measured. Of some of them the weights were measured all the same.
        without_attention: Number of sampled steps in which no module that is watched called
            attention, so that at most weights were measured.
        first_without_attention: The first of them, None without any.
        first_switch: Step of the first switch to a stabilizer, None without any.
        switched: Number of heads that were switched.
        stabilizers: What they were switched to.
        alarming_again: Number of switched heads that go on alarming at the end.
        still_growing: Number of alarmed heads that have grown since their switch, or since their
            alarm if that is later: largest logit and W_Q norm, where both were measured.
        not_measured_since: Number of alarmed heads that were switched, and of which no sample has
            come since then, or since their alarm if that is later.
        missing_loss: Which training losses are missing to say that the loss has not diverged, a
            clause; "" if none.
        departed: Step at which the loss has diverged, None where it has not or has come back.
        lead: Steps from the first alarm on a head to that one; None without either.
        end: How the run ended, one of `guardbit.records.RUN_ENDS`; None where that is not known.
    """

    kind: OutcomeKind
    verdict: str
    first_step: int | None
    last_step: int | None
    first_alarm: int | None
    model_alarm: int | None
    num_alarms: int
    alarmed: tuple[Head, ...]
    num_heads: int
    num_layers: int
    head_samples: int
    last_head_step: int | None
    head_samples_every: int | None
    num_modules: int
    not_watched: tuple[str, ...]
    without_attention: int
    first_without_attention: int | None
    first_switch: int | None
    switched: int
    stabilizers: tuple[str, ...]
    alarming_again: int
    still_growing: int
    not_measured_since: int
    missing_loss: str
    departed: int | None
    lead: int | None
    end: RunEnd | None

    def as_json(self) -> dict[str, Any]:
        """The same for a program; `outcome` is the kind, `headline` the sentence."""
        fields = asdict(self)
        kind = fields.pop("kind")
        return {"outcome": kind, "headline": headline(self), **fields}


def outcome_of(
    frame: pd.DataFrame,
    events: pd.DataFrame | None,
    metadata: Mapping[str, Any] | None = None,
    end: RunEnd | None = None,
    *,
    sampling: Sampling | None = None,
) -> Outcome:
    """Derives the outcome of a run."""
    frame = tables.check_samples(frame)
    sampling = sampling_of(frame) if sampling is None else sampling
    happened = marks.events_of(events)
    alarms = [event for event in happened if event.kind == "alarm"]
    of_heads = [event for event in alarms if event.site]
    alarmed = marks.first_events(frame, events, "alarm")
    switched = marks.first_events(frame, events, "switch")
    first, last = (None, None) if frame.empty else tables.steps(frame)
    heads = tables.heads_of_layer(frame)
    measured = tables.layer_of_site(frame).keys()
    not_watched = not_watched_of(metadata, measured)
    without_attention, first_without_attention = without_attention_of(metadata)
    loss = tables.of_run(frame, "loss")
    departed = _departed(alarms, loss)
    given = [event.verdict for event in happened if event.kind == "verdict"]
    unalarmed = "stable" if is_judged(metadata, sampling.indicators) else "unclear"
    verdict = given[-1] if given else "" if alarms else unalarmed
    again = _alarming_again(frame, events, switched, last)
    # A head may have grown soundly from its switch to its alarm, as when all run switched from 0.
    since = {
        head: max(event.step, switched[head].step)
        for head, event in alarmed.items()
        if head in switched
    }
    growing, unmeasured = _still_growing(frame, since), _not_measured_since(frame, since)
    missing_loss = _missing_loss(loss, first, alarms, switched)
    is_saved = not missing_loss and not again | growing | unmeasured
    return Outcome(
        kind=_kind(verdict, heads, alarms, alarmed, switched, is_saved, departed),
        verdict=verdict,
        first_step=first,
        last_step=last,
        first_alarm=min((event.step for event in alarms), default=None),
        model_alarm=min((event.step for event in alarms if event.judges == "model"), default=None),
        num_alarms=len(alarms),
        alarmed=tuple(alarmed),
        num_heads=sum(map(len, heads.values())),
        num_layers=len(heads),
        head_samples=sampling.count,
        last_head_step=sampling.last,
        head_samples_every=sampling.every,
        num_modules=len(heads) + len(set(not_watched) - measured),
        not_watched=not_watched,
        without_attention=without_attention,
        first_without_attention=first_without_attention,
        first_switch=min((event.step for event in switched.values()), default=None),
        switched=len(switched),
        stabilizers=tuple(dict.fromkeys(event.stabilizer for event in switched.values())),
        alarming_again=len(again),
        still_growing=len(growing),
        not_measured_since=len(unmeasured),
        missing_loss=missing_loss,
        departed=departed,
        lead=departed - min(event.step for event in of_heads)
        if departed is not None and of_heads
        else None,
        end=end,
    )


def _kind(
    verdict: str,
    heads: dict[int, list[int]],
    alarms: Sequence[Event],
    alarmed: dict[Head, Event],
    switched: dict[Head, Event],
    is_saved: bool,
    departed: int | None,
) -> OutcomeKind:
    if verdict == "learning-rate":
        return "learning-rate"
    if verdict == "unclear" or not heads:
        return "unclear"
    if departed is not None:
        return "lost" if alarmed else "unclear"
    if not alarmed:  # on the whole run, or on modules without samples
        return "alarmed" if alarms else "healthy"
    return "saved" if alarmed.keys() <= switched.keys() and is_saved else "alarmed"


def _missing_loss(
    loss: pd.Series, first: int | None, alarms: Sequence[Event], switched: Mapping[Head, Event]
) -> str:
    if loss.empty:
        return "no loss was recorded"
    # A resumed run may have had its alarms before its first sample.
    if loss.index[0] > max(first or 0, min((event.step for event in alarms), default=math.inf)):
        return "no loss was recorded before the first alarm"
    if loss.index[-1] <= max((event.step for event in switched.values()), default=-1):
        return "no loss was recorded after the last switch"
    return ""


def _departed(alarms: Sequence[Event], loss: pd.Series) -> int | None:
    """The step at which the loss has diverged for good."""
    left = min((event.step for event in alarms if event.judges == "loss"), default=None)
    if loss.empty:
        return left
    finite = loss.map(math.isfinite).to_numpy()
    if not finite[-1]:
        before = finite.nonzero()[0]
        lost = int(loss.index[before[-1] + 1 if len(before) else 0])
        return lost if left is None else min(left, lost)
    medians = cast(pd.Series, loss.rolling(LOSS_SAMPLES, min_periods=1).median()).to_numpy()
    return None if medians[-1] <= np.nanmin(medians) + COME_BACK else left


def _alarming_again(
    frame: pd.DataFrame,
    events: pd.DataFrame | None,
    switched: dict[Head, Event],
    last: int | None,
) -> set[Head]:
    """The heads with an alarm in the last steps of the run, long after their switch."""
    if last is None:
        return set()
    return {
        head
        for event, heads in marks.heads_of_events(frame, events)
        if event.kind == "alarm" and event.step > last - LASTING
        for head in heads
        if head in switched and event.step > switched[head].step + LASTING
    }


def _still_growing(frame: pd.DataFrame, since: dict[Head, int]) -> set[Head]:
    """The heads whose last values are above those at their step, in all of `GROWING`."""
    grown: dict[Head, list[bool]] = {}
    for table in [tables.by_head(frame, name) for name in GROWING] if since else []:
        for head, step in since.items():
            if head not in table:
                continue
            values = cast(pd.Series, table[head]).dropna()
            before = values.loc[:step]
            if before.empty or len(before) == len(values):
                continue
            has_grown = bool(values.iloc[-1] > STILL_GROWING * before.iloc[-1])
            grown.setdefault(head, []).append(has_grown)
    return {head for head, found in grown.items() if all(found)}


def _not_measured_since(frame: pd.DataFrame, since: dict[Head, int]) -> set[Head]:
    """The heads without a sample after their step: what the switch did to them is not known."""
    if not since:
        return set()
    measured = tables.rows_of(frame, (frame["site"] != "") & frame["value"].notna())
    last = cast(pd.Series, measured.groupby(["layer", "head"])["step"].max())
    last_of = cast(dict[Head, int], last.to_dict())
    return {head for head, step in since.items() if last_of.get(head, step) <= step}


def headline(outcome: Outcome, *, is_running: bool = False) -> str:
    """The outcome in a sentence, most important first, with what limits it."""
    return "; ".join([what_became(outcome, is_running=is_running), *limits(outcome)])


def what_became(outcome: Outcome, *, is_running: bool = False) -> str:
    """The headline without what limits it."""
    so_far = _SO_FAR.get(outcome.kind) if is_running else None
    return (so_far or _HEADLINES[outcome.kind])(outcome)


def limits(outcome: Outcome) -> list[str]:
    """What the outcome does not say by itself: that a run broke off, or is watched in part only."""
    found = [f"the run {_BROKEN_OFF[outcome.end]}"] if outcome.end in _BROKEN_OFF else []
    if outcome.num_heads and outcome.not_watched:
        total = outcome.num_modules
        watched = total - len(outcome.not_watched)
        share = f"{watched:,}" if watched else f"the weights of {outcome.num_layers:,}"
        were = "was" if watched == 1 else "were"
        found.append(f"only {share} of {total:,} attention modules {were} watched")
    if outcome.first_without_attention is not None:
        several = outcome.without_attention > 1
        found.append(
            f"no watched attention was called in {outcome.without_attention:,} of the sampled steps"
            f"{', the first' if several else ','} at step {outcome.first_without_attention:,}"
        )
    return found


_BROKEN_OFF = {"crashed": "crashed", "interrupted": "was interrupted"}


def _healthy(outcome: Outcome) -> str:
    assert outcome.last_step is not None
    measured = outcome.last_step if outcome.last_head_step is None else outcome.last_head_step
    # The next sample is due a cadence after the last one.
    if outcome.last_step - measured <= (outcome.head_samples_every or 0):
        return f"Healthy: no alarm up to step {measured:,}"
    if outcome.head_samples == 1:
        sampled = "1 sample of the heads,"
    else:
        sampled = f"{outcome.head_samples:,} samples of the heads, the last"
    return f"Healthy: no alarm in {sampled} at step {measured:,} of {outcome.last_step:,}"


def _when(outcome: Outcome) -> str:
    of_several = ", the first" if len(outcome.alarmed) > 1 else ""
    return f"{of_several} at step {outcome.first_alarm:,}"


def _saved(outcome: Outcome) -> str:
    return f"Saved: {_counted(outcome)} alarmed{_when(outcome)}, corrected, loss unharmed"


def _alarmed(outcome: Outcome) -> str:
    if not outcome.alarmed:
        return f"Alarmed: since step {outcome.first_alarm:,}, and no measured head says why"
    since = f"Alarmed: {_counted(outcome)} since step {outcome.first_alarm:,}"
    if outcome.still_growing:
        return f"{since}; {outcome.still_growing} still growing after the switch"
    if outcome.alarming_again:
        return f"{since}; {outcome.alarming_again} still alarming after the switch"
    if outcome.not_measured_since:
        return f"{since}; {outcome.not_measured_since} not measured since the switch"
    if outcome.switched:
        done = (
            f"{outcome.switched} switched" if outcome.missing_loss else "not all of them switched"
        )
    else:
        done = "none switched"
    return f"{since}, {done}; {outcome.missing_loss or 'no alarm on the loss'}"


def _lost(outcome: Outcome) -> str:
    assert outcome.lead is not None and outcome.departed is not None
    if outcome.lead <= 0:
        return f"Lost: the loss diverged at step {outcome.departed:,}, before any head alarmed"
    despite = ", in spite of the switch" if outcome.switched else ""
    return f"Lost: the loss diverged {outcome.lead:,} steps after the first alarm{despite}"


def _learning_rate(outcome: Outcome) -> str:
    if outcome.model_alarm is not None:
        return f"Learning rate too high: all layers left at once, at step {outcome.model_alarm:,}"
    return f"Learning rate too high: alarms since step {outcome.first_alarm:,}, of no single layer"


def _unclear(outcome: Outcome) -> str:
    if outcome.departed is not None and not outcome.alarmed:
        blame = "no head says why" if outcome.num_heads else "no head was watched"
        return f"Unclear: the loss diverged at step {outcome.departed:,}, and {blame}"
    if not outcome.num_heads:
        return "Unclear: no head was watched"
    if outcome.num_alarms:
        return f"Unclear: alarms since step {outcome.first_alarm:,}, and their signs disagree"
    return "Unclear: no rule could judge the heads"


_HEADLINES = {
    "healthy": _healthy,
    "saved": _saved,
    "alarmed": _alarmed,
    "lost": _lost,
    "learning-rate": _learning_rate,
    "unclear": _unclear,
}


def _healthy_so_far(outcome: Outcome) -> str:
    return "Running: no alarm so far"


def _saved_so_far(outcome: Outcome) -> str:
    return f"Running: {_counted(outcome)} alarmed{_when(outcome)}, corrected, loss unharmed so far"


def _alarmed_so_far(outcome: Outcome) -> str:
    if not outcome.alarmed:
        return f"Running: alarms since step {outcome.first_alarm:,}"
    named = name_of_head(outcome, outcome.alarmed[0])
    more = f" and {len(outcome.alarmed) - 1} more" if len(outcome.alarmed) > 1 else ""
    if outcome.not_measured_since:
        of_them = outcome.not_measured_since
        return f"Running: alarms in {named}{more}; {of_them} not measured since the switch"
    if outcome.verdict == "rounding":
        return f"Running: rounding has taken hold in {named}{more}"
    return f"Running: alarms in {named}{more}"


#: Of outcomes that are not final while a run goes on.
_SO_FAR = {"healthy": _healthy_so_far, "saved": _saved_so_far, "alarmed": _alarmed_so_far}


def facts(outcome: Outcome) -> list[str]:
    """What the headline rests on, in one line's worth of parts: alarms, lead, what was done."""
    parts = []
    if outcome.first_alarm is not None:
        parts.append(f"first alarm at step {outcome.first_alarm:,}")
    if outcome.alarmed:
        alarmed = outcome.alarmed
        named = [name_of_head(outcome, head) for head in alarmed[:3]]
        if outcome.num_heads > outcome.num_layers:
            # Once in full: the others are then understood.
            named[0] += " (layer {}, head {})".format(*alarmed[0])
        more = f" and {len(alarmed) - 3} more" if len(alarmed) > 3 else ""
        parts.append(f"in {', '.join(named)}{more}")
    if outcome.departed is not None:
        parts.append(f"loss diverged at step {outcome.departed:,}")
        if outcome.lead is not None:
            parts.append(f"lead {outcome.lead:,} steps")
    if outcome.first_switch is not None:
        to = " and ".join(outcome.stabilizers)
        parts.append(f"{outcome.switched} switched to {to} at step {outcome.first_switch:,}")
    elif outcome.alarmed:
        parts.append("nothing was switched")
    return parts


def name_of_head(outcome: Outcome, head: Head) -> str:
    """A short name: "head 2.6" is head 6 of layer 2."""
    layer, number = head
    # One value a layer may be the largest over its heads: their numbers are then not known.
    return f"head {layer}.{number}" if outcome.num_heads > outcome.num_layers else f"layer {layer}"


def _counted(outcome: Outcome) -> str:
    by_head = outcome.num_heads > outcome.num_layers
    total, noun = (outcome.num_heads, "head") if by_head else (outcome.num_layers, "layer")
    return f"{len(outcome.alarmed):,} of {total:,} {noun}{'s' * (total != 1)}"
