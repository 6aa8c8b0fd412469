"""Which heads stand out, by alarms and by how far they are above their baseline."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pandas as pd

from guardbit.dashboards import tables
from guardbit.dashboards.excess import EXCESS_INDICATORS, times_baseline
from guardbit.dashboards.marks import current_stabilizers, first_events
from guardbit.dashboards.tables import Head


def excess(
    frame: pd.DataFrame, events: pd.DataFrame | None = None, step: int | None = None
) -> pd.Series:
    """How far each head's worst indicator is above its baseline (`guardbit.dashboards.excess`)."""
    samples = tables.check_samples(frame)
    moved = [
        (head, event.step)
        for found in (first_events(frame, events, "alarm"), first_events(frame, events, "switch"))
        for head, event in found.items()
        if step is None or event.step <= step
    ]
    has_moved = {head for head, _ in moved}
    first = min((at for _, at in moved), default=None)
    pairs = [(at, head) for at, some in tables.heads_of_layer(frame).items() for head in some]
    heads = pd.MultiIndex.from_tuples(pairs, names=["layer", "head"])
    if step is not None:
        samples = tables.rows_of(samples, samples["step"] <= step)
    found: dict[str, pd.Series] = {}
    for indicator, floor in EXCESS_INDICATORS.items():
        measured = tables.by_head(samples, indicator)
        of_heads = times_baseline(
            measured.to_numpy(),
            floor,
            np.array([head in has_moved for head in measured.columns], dtype=bool),
            None if first is None else int(np.count_nonzero(measured.index <= first)),
        )
        found[indicator] = pd.Series(of_heads, measured.columns)
    return pd.DataFrame(found, heads).max(axis=1)


def notable_heads(
    table: pd.DataFrame, story: Sequence[Head], *, smallest: bool = False
) -> list[Head]:
    """The heads that a figure names: those of the story, then the extreme of its table."""
    later = table.iloc[len(table) // 2 :].abs().replace(np.inf, np.nan)
    extremes = later.min() if smallest else later.max()
    extremes = extremes.dropna().sort_values(ascending=smallest, kind="stable")
    extreme = [(int(layer), int(head)) for layer, head in extremes.head(1).index]
    return list(dict.fromkeys([*[head for head in story if head in table.columns], *extreme]))


def heads_of_story(frame: pd.DataFrame, events: pd.DataFrame | None, count: int = 3) -> list[Head]:
    """The heads that all figures of a run are about, each in one colour."""
    alarmed = first_events(frame, events, "alarm")
    if len(alarmed) >= count:
        return list(alarmed)[:count]
    far = excess(frame, events)
    far = far.where(far > 1).dropna()  # 1 is usual
    worst = far.sort_values(ascending=False, kind="stable").index.to_list()
    return list(dict.fromkeys([*alarmed, *worst]))[:count]


def heads_to_watch(
    frame: pd.DataFrame, events: pd.DataFrame | None, count: int = 10
) -> pd.DataFrame:
    """The heads a person should look at, worst first, with their latest values."""
    latest = tables.latest_values(frame)
    alarms = first_events(frame, events, "alarm")
    stabilizers = current_stabilizers(frame, events)
    sites = tables.site_of_layer(frame)
    heads = latest.index.to_frame()
    heads["site"] = [sites[layer] for layer, _ in latest.index]
    heads["alarm_step"] = [alarms[head].step if head in alarms else np.nan for head in latest.index]
    heads["rule"] = [alarms[head].rule if head in alarms else "" for head in latest.index]
    heads["stabilizer"] = [stabilizers.get(head, "none") for head in latest.index]
    if heads.empty:
        return heads
    heads["excess"] = excess(frame, events)
    heads["largest"] = latest.iloc[:, 0].abs()
    order = ["alarm_step", "excess", "largest"]
    heads = heads.sort_values(order, ascending=[True, False, False], kind="stable").head(count)
    return heads.drop(columns=["largest"]).join(latest).reset_index(drop=True)
