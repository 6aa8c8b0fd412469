"""The events of a run, and what figures and pages mark of them.

Events have the columns step, kind, site, heads and why and, where they apply, rule, stabilizer,
verdict and judges. They are accepted as a CSV reader leaves them (NaN for what is empty), empty, or
without any column.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Literal

import pandas as pd

from guardbit.records import Event
from guardbit.store.files import EVENT_COLUMNS, check_columns

#: Columns that a table of events must have.
NEEDED_COLUMNS = ("step", "kind", "site", "heads", "why")

#: What a figure marks; "undo" is a switch back to the run's own attention.
Mark = Literal["alarm", "switch", "undo"]


def events_of(events: pd.DataFrame | None) -> list[Event]:
    """The events of a table by step, but for verdicts: a run is judged again."""
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


def mark_of(event: Event) -> Mark | None:
    """What a figure marks the event as; None for refusals, verdicts and errors."""
    if event.kind == "switch":
        return "undo" if event.stabilizer == "none" else "switch"
    return "alarm" if event.kind == "alarm" else None


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
