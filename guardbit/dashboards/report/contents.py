"""What the report of one run says."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import groupby
from typing import Any

import numpy as np
import pandas as pd

from guardbit.dashboards import effect, marks, ranking, tables
from guardbit.dashboards.figures import CHARTS, story
from guardbit.dashboards.outcome import Outcome, headline, outcome_of
from guardbit.dashboards.report import words
from guardbit.dashboards.report.answers import answers_of
from guardbit.dashboards.report.diagnosed import Kept, why_heads_diverge
from guardbit.dashboards.report.document import (
    Alarmed,
    Document,
    Heads,
    Moment,
    Picture,
    Table,
    Tile,
)
from guardbit.records import Event, RunEnd

#: A wider table of heads does not fit the page.
HEAD_COLUMNS = (
    "w_q_spectral_norm",
    "max_logit",
    "multiple_maxima",
    "multiple_maxima_bf16",
    "delta_bias_cumulative",
    "dq_relative_error",
)
MOST_ALARMS = 40
_NOTHING = Kept()


@dataclass(frozen=True, slots=True)
class Run:
    """A run as reports take it.

    Attributes:
        title: What it is called.
        frame: Samples, as `guardbit.read_run` returns them.
        events: Events, as `guardbit.read_events` returns them.
        metadata: Settings, versions and attention modules; JSON-able.
        kept: What is known of why heads diverge.
        end: How it ended, as `guardbit.store.read_end` returns it.
    """

    title: str
    frame: pd.DataFrame
    events: pd.DataFrame | None = None
    metadata: Mapping[str, Any] = field(default_factory=dict)
    kept: Kept = _NOTHING
    end: RunEnd | None = None

    @property
    def outcome(self) -> Outcome:
        """What became of it."""
        return outcome_of(self.frame, self.events, self.metadata, self.end)


def document_of(run: Run) -> Document:
    """The outcome first, then the alarms, the heads to watch and the figures; last the settings."""
    frame, events = tables.check_samples(run.frame), run.events
    outcome = run.outcome
    pictures, not_drawn = _figures(frame, events, outcome)
    moments, note = timeline(marks.events_of(events))
    return Document(
        title=run.title,
        extent=extent(frame),
        headline=headline(outcome),
        outcome=outcome.kind,
        lede=summary(frame, events),
        tiles=tiles(frame, events),
        pictures=pictures,
        answers=None if frame.empty else answers_of(frame, events, run.title, run.metadata),
        runs=[heads_of(run)],
        settings=settings(run.metadata),
        effect=_before_and_after(frame, events),
        diagnosed=why_heads_diverge(run.kept),
        not_drawn=not_drawn,
        timeline=moments,
        timeline_note=note,
    )


def heads_of(run: Run) -> Heads:
    """What became of the heads: their alarms, and those to worry about."""
    frame = tables.check_samples(run.frame)
    alarms = _alarms_by_head(frame, run.events)
    hidden = len(alarms) - MOST_ALARMS
    return Heads(
        run.title,
        summary(frame, run.events),
        alarms[:MOST_ALARMS],
        f"{words.count(hidden, 'head')} that alarmed later not shown." if hidden > 0 else "",
        *_heads_to_watch(frame, run.events),
    )


def extent(frame: pd.DataFrame) -> str:
    if frame.empty:
        return "no samples"
    first, last = tables.steps(frame)
    layers = tables.heads_of_layer(frame)
    heads = sum(map(len, layers.values()))
    text = f"steps {first:,} to {last:,} · {words.count(len(layers), 'layer')}"
    # One value a layer may be the largest over its heads: their number is then not known.
    return f"{text} · {words.count(heads, 'head')}" if heads > len(layers) else text


def verdict(happened: Sequence[Event]) -> Event | None:
    return next((event for event in reversed(happened) if event.kind == "verdict"), None)


def summary(frame: pd.DataFrame, events: pd.DataFrame | None) -> list[str]:
    """What happened, in a few sentences, most important first."""
    happened = marks.events_of(events)
    given = verdict(happened)
    sentences = [f"Verdict {given.verdict}: {given.why}"] if given is not None else []
    if frame.empty:
        sentences.append("The run recorded no samples.")
    alarms = [event for event in happened if event.kind == "alarm"]
    # A verdict quotes the alarm it rests on.
    if alarms and given is None:
        first = alarms[0]
        sentences.append(
            f"The first alarm came at step {first.step:,} ({words.where(first)}): {first.why}"
        )
    loss = tables.of_run(frame, "loss")
    lost = loss.index.to_numpy()[~np.isfinite(loss.to_numpy())]
    if len(lost):
        sentences.append(f"The loss was first not finite at step {int(lost[0]):,}.")
    return sentences


def tiles(frame: pd.DataFrame, events: pd.DataFrame | None) -> list[Tile]:
    happened = marks.events_of(events)
    outcome = outcome_of(frame, events)
    alarms = [event for event in happened if event.kind == "alarm"]
    switched = marks.first_events(frame, events, "switch")
    current = marks.current_stabilizers(frame, events)
    stabilized = sorted({name for name in current.values() if name != "none"})
    undone = sum(name == "none" for name in current.values())
    loss = tables.of_run(frame, "loss")
    return [
        Tile(
            "First alarm",
            f"step {alarms[0].step:,}" if alarms else "none",
            f"{words.where(alarms[0])}; {words.count(len(alarms), 'alarm')} in all"
            if alarms
            else "",
        ),
        Tile(
            "Lead on the loss",
            "–" if outcome.lead is None else f"{outcome.lead:,} steps",
            f"the loss diverged at step {outcome.departed:,}"
            if outcome.departed is not None
            else outcome.missing_loss or "the loss has not left",
        ),
        Tile(
            "Heads switched",
            f"{len(switched):,}",
            "; ".join(
                [
                    *([f"{', '.join(stabilized)}"] if stabilized else []),
                    *([f"at step {outcome.first_switch:,}"] if switched else []),
                    *([f"{undone} undone"] if undone else []),
                ]
            ),
        ),
        Tile(
            "Loss at the end",
            _last_loss(loss),
            f"median of the last {min(effect.SAMPLES_AVERAGED, len(loss))} samples"
            if len(loss)
            else "",
        ),
    ]


def _last_loss(loss: pd.Series) -> str:
    last = loss.tail(effect.SAMPLES_AVERAGED).to_numpy()
    if not len(last):
        return "–"
    return words.number(float(np.median(last))) if np.isfinite(last[-1]) else "not finite"


def _before_and_after(frame: pd.DataFrame, events: pd.DataFrame | None) -> Table | None:
    table = effect.before_and_after(frame, events)
    if table.empty:
        return None
    heads = tables.heads_of_layer(frame)
    rows: list[list[str]] = []
    for indicator, layer, head, before, after in table.itertuples(index=False):
        comparable = math.isfinite(before) and math.isfinite(after) and before * after > 0
        rows.append(
            [
                words.LABELS[indicator],
                tables.head_label(layer, head, len(heads[layer])) if head >= 0 else "the run",
                words.value(indicator, before),
                words.value(indicator, after),
                f"× {after / before:.3g}" if comparable else "–",
            ]
        )
    return Table(["", "", "before the switch", "at the end", "change"], rows, numbers_from=2)


def _alarms_by_head(frame: pd.DataFrame, events: pd.DataFrame | None) -> list[Alarmed]:
    """One row a head, however often it has alarmed, in the order of the first alarm."""
    heads, current = tables.heads_of_layer(frame), marks.current_stabilizers(frame, events)
    of: dict[tuple[str, str], list[Event]] = {}
    stabilizers: dict[tuple[str, str], str] = {}
    for event, concerned in marks.heads_of_events(frame, events):
        if event.kind != "alarm":
            continue
        for layer, head in concerned:
            name = tables.head_label(layer, head, len(heads.get(layer, ())))
            of.setdefault((name, event.site), []).append(event)
            stabilizers[name, event.site] = current.get((layer, head), "none")
        if not concerned:
            of.setdefault((words.where(event), ""), []).append(event)
    return [
        Alarmed(
            name,
            site,
            [
                rule if times == 1 else f"{rule} × {times:,}"
                for rule, times in Counter(event.rule for event in alarms).items()
            ],
            words.span(alarms[0].step, alarms[-1].step),
            stabilizers.get((name, site), "none"),
            alarms[0].why,
        )
        for (name, site), alarms in of.items()
    ]


def _heads_to_watch(frame: pd.DataFrame, events: pd.DataFrame | None) -> tuple[Table | None, str]:
    """The heads to worry about, worst first, and a note that says which they are."""
    watched = ranking.heads_to_watch(frame, events)
    if watched.empty:
        return None, "No head has been measured."
    heads = tables.heads_of_layer(frame)
    alarmed = len(marks.first_events(frame, events, "alarm"))
    shown = [name for name in HEAD_COLUMNS if name in watched.columns]
    rows, kinds = [], []
    for row in watched.to_dict("records"):
        has_alarm = not math.isnan(row["alarm_step"])
        label = tables.head_label(row["layer"], row["head"], len(heads[row["layer"]]))
        rows.append(
            [
                (label, row["site"]),
                (f"step\N{NO-BREAK SPACE}{int(row['alarm_step']):,}", row["rule"])
                if has_alarm
                else "–",
                row["stabilizer"],
                times(row["excess"]),
                *[words.value(name, row[name]) for name in shown],
            ]
        )
        kinds.append("alarmed" if has_alarm else "")
    note = (
        f"{words.count(alarmed, 'head')} with an alarm, in the order of the first one"
        if alarmed
        else "No head has an alarm; these are farthest above their baseline"
    )
    header = ["Head", "First alarm", "Stabilizer", "Times its baseline"]
    return (
        Table([*header, *[words.LABELS[name] for name in shown]], rows, 3, kinds),
        f"{note}. Latest samples; {len(rows)} of {words.total(heads)} shown.",
    )


def times(excess: float) -> str:
    """An excess as a factor; beyond 1,000 its size says nothing more."""
    if math.isnan(excess):
        return "–"
    return "> 1,000 ×" if excess > 1000 else f"{excess:.2g} ×" if excess < 10 else f"{excess:.0f} ×"


def timeline(happened: Sequence[Event]) -> tuple[list[Moment], str]:
    """The events in their order. Later alarms are cut; a switch of many modules is one line."""
    if not happened:
        return [], "No event was recorded."
    alarms = [event for event in happened if event.kind == "alarm"]
    others = [event for event in happened if event.kind != "alarm"]
    # Alarms first: where a step has both, the alarm is what the switch answers.
    shown = sorted([*alarms[:MOST_ALARMS], *others], key=lambda event: event.step)
    hidden = len(alarms) - MOST_ALARMS
    moments = [
        Moment(some[0].step, marks.what_of(some[0]), words.what(some), some[0].why)
        for some in _together(shown)
    ]
    return moments, f"{words.count(hidden, 'later alarm')} not shown." if hidden > 0 else ""


def _together(events: Sequence[Event]) -> Iterator[list[Event]]:
    """Groups switches in a row, or refusals, that differ in their heads alone."""

    def without_heads(event: Event) -> Event:
        is_switch = event.kind in ("switch", "refusal")
        return replace(event, site="", heads=()) if is_switch else event

    for _, group in groupby(events, without_heads):
        yield list(group)


def _figures(
    frame: pd.DataFrame, events: pd.DataFrame | None, outcome: Outcome
) -> tuple[list[Picture], list[str]]:
    """The figures, and a sentence for each that cannot be drawn."""
    drawn: list[Picture] = []
    missing: list[str] = []
    for chart in CHARTS:
        draw = partial(story, outcome=outcome) if chart.draw is story else chart.draw
        figure = draw(frame, events)
        if figure is not None:
            drawn.append(Picture(chart.name, figure))
            continue
        recorded = tables.recorded_indicators(frame)
        if chart.name == "switch_before_and_after" and recorded & set(chart.needs):
            missing.append(f"{chart.title}: no head was switched.")
        else:
            needs = " or ".join(chart.needs)
            missing.append(f"{chart.title}: the run holds no sample of {needs} that can be drawn.")
    return drawn, missing


def settings(metadata: Mapping[str, Any]) -> list[tuple[str, Table]]:
    """Settings, versions and attention modules, as tables with their titles."""
    plain = {name: value for name, value in metadata.items() if not isinstance(value, Mapping)}
    nested = {name: value for name, value in metadata.items() if isinstance(value, Mapping)}
    titled = [("", _key_values(plain))] if plain else []
    for name, value in nested.items():
        if value:
            holds_records = all(isinstance(entry, Mapping) for entry in value.values())
            table = _records(value) if holds_records else _key_values(value)
            titled.append((words.title(name), table))
    return titled


def _records(value: Mapping[str, Mapping[str, Any]]) -> Table:
    columns = list(dict.fromkeys(name for entry in value.values() for name in entry))
    rows = [
        [name, *[words.setting(entry.get(column)) for column in columns]]
        for name, entry in value.items()
    ]
    return Table(["", *map(words.title, columns)], rows)


def _key_values(value: Mapping[str, Any]) -> Table:
    return Table([], [[words.title(name), words.setting(entry)] for name, entry in value.items()])
