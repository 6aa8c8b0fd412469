"""What the page of a report may ask, answered ahead: it opens without a server."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa

from guardbit.dashboards import marks, ranking, tables
from guardbit.dashboards.views import RunViews

Json = dict[str, Any]

#: Resolution in steps, even.
BUCKETS = 300
#: Model maps of the player, evenly spread, beside those of the first alarm and the first switch.
MAPS = 40
#: Characters of the maps together, and of the histories of single heads, worst heads first.
MOST_OF_MAPS, MOST_OF_HEADS = 600_000, 1_500_000


def answers_of(
    frame: pd.DataFrame,
    events: pd.DataFrame | None,
    title: str,
    metadata: Mapping[str, Any] | None = None,
) -> Json:
    """Returns all that the page shows of a run, JSON-able."""
    frame = tables.check_samples(frame)
    views = RunViews(BUCKETS)
    views.metadata = metadata or {}
    views.events = marks.events_of(events)
    views.take(_batch(frame))
    views.take_picture(title)
    state = views.picture(None)
    maps = _maps(views, frame, events)
    start = len(maps) - 1
    alarm = marks.first_step(frame, events, "alarm")
    if alarm is not None and maps:
        known = [one["map"]["step"] for one in maps]
        start = min(int(np.searchsorted(known, alarm)), start)
    return {
        "state": {**state, "events": [], "version": 0},
        "maps": maps,
        "start": start,
        "curves": {name: views.curves(name) for name in state["indicators"]},
        "heads": _heads(views, frame, events),
    }


def _batch(frame: pd.DataFrame) -> pa.RecordBatch:
    names = {name: pa.array(frame[name].astype(str).tolist()) for name in ("site", "indicator")}
    numbers = {name: frame[name].to_numpy(np.int64) for name in ("step", "layer", "head")}
    columns = {
        **numbers,
        **{name: texts.dictionary_encode() for name, texts in names.items()},
        "value": frame["value"].to_numpy(np.float64),
    }
    return pa.RecordBatch.from_pydict(columns)


def _maps(views: RunViews, frame: pd.DataFrame, events: pd.DataFrame | None) -> list[Json]:
    state = views.picture(None)
    steps = state["steps"]
    first = [marks.first_step(frame, events, mark) for mark in ("alarm", "switch")]
    size = len(json.dumps(state["map"])) + len(json.dumps(state["worst"]))
    count = int(np.clip(MOST_OF_MAPS // max(size, 1), 2, MAPS))
    chosen = {steps[round(at)] for at in np.linspace(0, len(steps) - 1, count)} if steps else set()
    maps: dict[int, Json] = {}
    # Of a step within a bucket the whole bucket is taken, which knows what happened at it.
    ends = [
        steps[min(int(np.searchsorted(steps, step)), len(steps) - 1)]
        for step in first
        if step is not None and steps
    ]
    for step in sorted({*chosen, *ends}):
        picture = views.picture(step)
        at = picture["map"]["step"]
        if at >= 0:
            maps[at] = {"map": picture["map"], "worst": picture["worst"]}
    return [maps[step] for step in sorted(maps)]


def _heads(views: RunViews, frame: pd.DataFrame, events: pd.DataFrame | None) -> Json:
    """The histories of the alarmed heads, then of those farthest above their baseline."""
    excess = ranking.excess(frame).fillna({"excess": 0.0})
    excess = excess.sort_values(["excess"], ascending=False, kind="stable")
    alarmed = marks.first_events(frame, events, "alarm")
    heads: Json = {}
    room = MOST_OF_HEADS
    for layer, head in dict.fromkeys([*alarmed, *excess.index.to_list()]):
        try:
            history = views.head(int(layer), int(head))
        except LookupError:
            continue  # an alarm may name a head without samples
        history["events"] = history["events"][:5]
        room -= len(json.dumps(history, separators=(",", ":")))
        if room < 0:
            break
        heads[f"{layer},{head}"] = history
    return heads
