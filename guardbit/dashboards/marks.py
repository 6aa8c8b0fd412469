"""The events of a run: what figures mark, and the heads that an event concerns.

Events have the columns step, kind, site, heads and why and, where they apply, rule, stabilizer,
verdict and judges. They are accepted as a CSV reader leaves them (NaN for what is empty), empty, or
without any column.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Literal

import pandas as pd

from guardbit.dashboards import tables
from guardbit.dashboards.tables import Head
from guardbit.judgement import Ended, Evidence, Judgement, departed, judge
from guardbit.records import Event
from guardbit.store.files import EVENT_COLUMNS, check_columns
from guardbit.store.reading import samples_of

#: Columns that a table of events must have.
NEEDED_COLUMNS = ("step", "kind", "site", "heads", "why")

#: What a figure marks; "undo" is a switch back to the run's own attention.
Mark = Literal["alarm", "switch", "undo"]
MARKS: tuple[Mark, ...] = ("alarm", "switch", "undo")


def events_of(events: pd.DataFrame | None) -> list[Event]:
    """The events of a table by step, but for verdicts: a run is judged again (`judgement_of`)."""
    if events is None or events.empty:
        return []
    check_columns(events.columns, NEEDED_COLUMNS, "the table of events")
    table = events.reindex(columns=EVENT_COLUMNS)
    found = [
        Event(**{**row, "step": int(row["step"]), "heads": tuple(map(int, row["heads"]))})
        for row in table.astype(object).where(table.notna(), "").to_dict("records")
        if row["kind"] != "verdict"
    ]
    return sorted(found, key=lambda event: event.step)


def judgement_of(
    frame: pd.DataFrame,
    events: pd.DataFrame | None,
    metadata: Mapping[str, Any] | None = None,
    ended: Ended | None = None,
) -> Judgement:
    """Judges a run by its tables."""
    evidence = Evidence()
    evidence.add(samples_of(tables.check_samples(frame)))
    return judge(evidence, events_of(events), metadata, ended)


def departed_of(frame: pd.DataFrame, events: pd.DataFrame | None) -> int | None:
    """The step at which the loss diverged, as `judgement_of` has it."""
    evidence, samples = Evidence(), tables.check_samples(frame)
    evidence.add(samples_of(tables.rows_of(samples, samples["indicator"] == "loss")))
    return departed(events_of(events), evidence)


def mark_of(event: Event) -> Mark | None:
    """What a figure marks the event as; None for refusals, verdicts and errors."""
    if event.kind == "alarm":
        return "alarm"
    if event.kind == "switch":
        return "undo" if event.stabilizer == "none" else "switch"
    return None


def marked(events: Iterable[Event]) -> Iterator[tuple[Event, Mark]]:
    """The events that figures mark, in their order: first alarms, and all switches and undoings."""
    seen: set[tuple[str, int | str]] = set()
    for event in events:
        mark = mark_of(event)
        alarmed = {(event.site, of) for of in event.heads or (event.rule,)}
        if mark is not None and not (mark == "alarm" and alarmed <= seen):
            yield event, mark
        if mark == "alarm":
            seen |= alarmed


def marked_steps(events: pd.DataFrame | None, mark: Mark) -> list[int]:
    """The steps at which a mark is drawn, ascending, each once."""
    return sorted({event.step for event, found in marked(events_of(events)) if found == mark})


def heads_of_events(
    frame: pd.DataFrame, events: pd.DataFrame | None
) -> Iterator[tuple[Event, list[Head]]]:
    """Each event with the heads it concerns, ordered by step."""
    layers, recorded = tables.layer_of_site(frame), tables.heads_of_layer(frame)
    for event in events_of(events):
        layer = layers.get(event.site)
        yield event, [] if layer is None else [(layer, h) for h in event.heads or recorded[layer]]


def first_events(frame: pd.DataFrame, events: pd.DataFrame | None, mark: Mark) -> dict[Head, Event]:
    """Every head that events with this mark concern -> the first of them, earliest first."""
    first: dict[Head, Event] = {}
    for event, heads in heads_of_events(frame, events):
        if mark_of(event) == mark:
            first.update({head: event for head in heads if head not in first})
    return first


def first_step(frame: pd.DataFrame, events: pd.DataFrame | None, mark: Mark) -> int | None:
    """The step of the first mark on any head, None if there is none."""
    return min((event.step for event in first_events(frame, events, mark).values()), default=None)


def current_stabilizers(frame: pd.DataFrame, events: pd.DataFrame | None) -> dict[Head, str]:
    """Head -> the stabilizer of its last switch; heads that were never switched are absent."""
    return {
        head: event.stabilizer
        for event, heads in heads_of_events(frame, events)
        if event.kind == "switch"
        for head in heads
    }
