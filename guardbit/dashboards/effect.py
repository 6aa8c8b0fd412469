"""What a switch did: indicators before it and after it."""

from __future__ import annotations

import math
from typing import cast

import pandas as pd

from guardbit.catalog import HEAD_INDICATORS, RUN_INDICATORS
from guardbit.dashboards.marks import first_events, heads_of_events, mark_of
from guardbit.dashboards.tables import by_head, of_run

#: Samples that the run's "before" and "after" average over: enough to damp one sample's noise.
SAMPLES_AVERAGED = 5


def effect_of_switch(frame: pd.DataFrame, events: pd.DataFrame | None) -> pd.DataFrame:
    """Compares the worst switched head, and the run, before and after the switch."""
    switched = first_events(frame, events, "switch")
    ends = {
        head: event.step if mark_of(event) == "undo" else math.inf
        for event, heads in heads_of_events(frame, events)
        if mark_of(event) in ("switch", "undo")
        for head in heads
    }
    alarms = first_events(frame, events, "alarm")
    alarmed = [
        head for head in switched if head in alarms and alarms[head].step <= switched[head].step
    ]
    rows: list[tuple[str, int, int, float, float]] = []
    for indicator in HEAD_INDICATORS if switched else ():
        table = by_head(frame, indicator)
        measured = [head for head in alarmed or switched if head in table.columns]
        found: list[tuple[int, int, float, float]] = []
        for head in measured:
            series = cast(pd.Series, table[head]).dropna()
            found.append((*head, *_around(series, switched[head].step, ends[head], 1)))
        if found:
            largest = max(found, key=lambda row: -1.0 if math.isnan(row[2]) else abs(row[2]))
            rows.append((indicator, *largest))
    for indicator in RUN_INDICATORS if switched else ():
        series = of_run(frame, indicator)
        if not series.empty:
            first = min(event.step for event in switched.values())
            sides = _around(series, first, max(ends.values()), SAMPLES_AVERAGED)
            rows.append((indicator, -1, -1, *sides))
    return pd.DataFrame(rows, columns=["indicator", "layer", "head", "before", "after"])


def _around(series: pd.Series, step: int, end: float, samples: int) -> tuple[float, float]:
    """The mean of the last samples up to a step, and of those after it up to the end."""
    before = series.loc[:step].tail(samples)
    after = series.loc[step + 1 : end].tail(samples)
    return float(before.mean()), float(after.mean())
