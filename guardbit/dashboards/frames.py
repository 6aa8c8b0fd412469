"""Pure helpers on the two tables of a run: what figures and report show is computed here.

`frame` holds the samples, one value a row: step, site, layer, head, indicator, value. `events` is
the journal: step, kind, site, heads, why and, where they apply, rule and stabilizer. Both are
accepted as a CSV reader leaves them (NaN for an empty site), empty, or without any column.

A head is named by the pair (layer, head), both counted from 0.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Literal, cast

import numpy as np
import pandas as pd

from guardbit.catalog import HEAD_INDICATORS, RUN_INDICATORS
from guardbit.dashboards.excess import EXCESS_INDICATORS, times_normal
from guardbit.dashboards.layers import Layers, is_shared
from guardbit.records import Event

SAMPLE_COLUMNS = ("step", "site", "layer", "head", "indicator", "value")
EVENT_COLUMNS = ("step", "kind", "site", "heads", "why")

#: What a figure marks; "undo" is a switch back to plain attention.
Mark = Literal["alarm", "switch", "undo"]
MARKS: tuple[Mark, ...] = ("alarm", "switch", "undo")

#: Samples that the run's "before" and "after" average over: enough to damp one sample's noise.
SAMPLES_AVERAGED = 5

Head = tuple[int, int]

_CHECKED = "guardbit.checked"


def check_samples(frame: pd.DataFrame) -> pd.DataFrame:
    """Returns the samples with "" for a missing site and one layer a site (see `Layers`).

    Raises:
        ValueError: A column is missing from a table that has rows.
    """
    if frame.empty:
        return pd.DataFrame(columns=list(SAMPLE_COLUMNS))
    if frame.attrs.get(_CHECKED):
        return frame
    _check_columns(frame, SAMPLE_COLUMNS, "samples")
    if np.asarray(frame["site"].isna()).any():
        frame = frame.assign(site=frame["site"].astype(object).fillna(""))
    frame = _with_one_layer_a_site(frame)
    frame.attrs[_CHECKED] = True
    return frame


def _with_one_layer_a_site(frame: pd.DataFrame) -> pd.DataFrame:
    """A copy, which shares the columns that stay."""
    codes, sites = pd.factorize(frame["site"])
    numbers, recorded = pd.factorize(frame["layer"])
    pairs = codes * len(recorded) + numbers
    layers = Layers()
    # In the order of the samples, as the first number of a site counts.
    found, first = np.unique(pairs, return_index=True)
    given = np.zeros(len(sites) * len(recorded), dtype=np.int64)
    several = np.bincount(found // len(recorded), minlength=len(sites)) > 1
    steps, numbered = frame["step"].to_numpy(), frame["layer"].to_numpy()
    shared = {
        int(site)
        for site in np.flatnonzero(several)
        if is_shared(steps[codes == site], numbered[codes == site])
    }
    for pair in found[np.argsort(first)].tolist():
        site, number = divmod(pair, len(recorded))
        layer = int(recorded[number])
        if sites[site]:
            layer = layers.layer(str(sites[site]), layer, is_shared=site in shared)
        given[pair] = layer
    renumbered = given[pairs]
    if (renumbered == numbered).all():
        return frame.copy(deep=False)
    return frame.assign(layer=renumbered)


def journal(events: pd.DataFrame | None) -> list[Event]:
    """Returns the events by step; columns rule and stabilizer may be missing.

    Raises:
        ValueError: Another column is missing from a table that has rows.
    """
    if events is None or events.empty:
        return []
    _check_columns(events, EVENT_COLUMNS, "events")
    found = [
        Event(
            step=int(row["step"]),
            kind=row["kind"],
            site=_text(row["site"]),
            heads=_heads(row["heads"]),
            why=_text(row["why"]),
            rule=_text(row.get("rule")),
            stabilizer=_text(row.get("stabilizer")),
        )
        for row in events.to_dict("records")
    ]
    return sorted(found, key=lambda event: event.step)


def _check_columns(table: pd.DataFrame, required: Sequence[str], what: str) -> None:
    missing = [name for name in required if name not in table.columns]
    if missing:
        raise ValueError(
            f"The table of {what} lacks the columns {', '.join(missing)}: it has "
            f"{', '.join(map(str, table.columns))} and needs {', '.join(required)}."
        )


def _text(value: object) -> str:
    return value if isinstance(value, str) else ""


def _heads(value: object) -> tuple[int, ...]:
    is_list = isinstance(value, list | tuple | np.ndarray)
    return tuple(int(head) for head in value) if is_list else ()


def _rows(table: pd.DataFrame, chosen: object) -> pd.DataFrame:
    return cast(pd.DataFrame, table[cast(pd.Series, chosen)])


def by_head(frame: pd.DataFrame, indicator: str) -> pd.DataFrame:
    """One indicator with a row a step and a column a head; NaN where a head was not measured.

    A step recorded twice, as a resumed run may do, keeps its later value.

    Returns:
        Index `step`, columns a MultiIndex (layer, head), both ascending; values float64.
    """
    samples = check_samples(frame)
    samples = _rows(samples, (samples["indicator"] == indicator) & (samples["site"] != ""))
    samples = samples.drop_duplicates(["step", "layer", "head"], keep="last")
    table = samples.pivot(index="step", columns=["layer", "head"], values="value")
    return table.astype(float).sort_index().sort_index(axis=1)


def of_run(frame: pd.DataFrame, indicator: str) -> pd.Series:
    """An indicator of the whole run (`loss`, `grad_norm`) by step, float64; non-finite is kept."""
    samples = check_samples(frame)
    samples = _rows(samples, (samples["indicator"] == indicator) & (samples["site"] == ""))
    samples = samples.drop_duplicates(["step"], keep="last").set_index("step")
    return cast(pd.Series, samples["value"]).astype(float).sort_index()


def by_layer(frame: pd.DataFrame, indicator: str) -> pd.DataFrame:
    """The worst head of each layer: the value of largest magnitude, with its sign.

    Returns:
        Index `step`, columns `layer`; values float64, NaN where no head was measured.
    """
    layers = by_head(frame, indicator).T.groupby(level="layer")
    largest = cast(pd.DataFrame, layers.max()).T
    smallest = cast(pd.DataFrame, layers.min()).T
    return largest.where(largest.abs() >= smallest.abs(), smallest)


def worst_heads(frame: pd.DataFrame, indicator: str, count: int) -> list[Head]:
    """The heads of the `count` largest magnitudes over the whole run, largest first."""
    peaks = by_head(frame, indicator).abs().max().dropna()
    largest = peaks.sort_values(ascending=False, kind="stable").head(count)
    return [(int(layer), int(head)) for layer, head in largest.index.to_list()]


def worst_layer(frame: pd.DataFrame, indicator: str = "w_q_spectral_norm") -> int | None:
    """The layer that holds the largest magnitude of the indicator; None where there is none."""
    heads = worst_heads(frame, indicator, 1)
    return heads[0][0] if heads else None


def excess(frame: pd.DataFrame, step: int | None = None) -> pd.DataFrame:
    """How far each head's worst indicator is above its own normal (`guardbit.dashboards.excess`).

    Args:
        frame: The samples.
        step: The last step taken into account; None for all.

    Returns:
        Index MultiIndex (layer, head), ascending, every recorded head; columns excess (float64; NaN
        without any of the indicators), indicator (the worst one's name) and value (its latest).
    """
    samples = check_samples(frame)
    samples = _rows(samples, samples["site"] != "")
    pairs = cast(pd.DataFrame, samples[["layer", "head"]].drop_duplicates())
    heads = pd.MultiIndex.from_frame(pairs).sort_values()
    if step is not None:
        samples = _rows(samples, samples["step"] <= step)
    table = pd.DataFrame({"excess": np.nan, "indicator": "", "value": np.nan}, index=heads)
    for indicator, floor in EXCESS_INDICATORS.items():
        measured = by_head(samples, indicator)
        if measured.empty:
            continue
        found = pd.DataFrame(
            {
                "excess": times_normal(measured.to_numpy(), floor),
                "indicator": indicator,
                "value": measured.ffill().iloc[-1],
            },
            index=measured.columns,
        ).reindex(heads)
        worse = found["excess"].gt(table["excess"]) | (
            table["excess"].isna() & found["excess"].notna()
        )
        table = table.mask(worse, found)
    return table.astype({"excess": float, "value": float})


def between(events: pd.DataFrame | None, first: int, last: int) -> pd.DataFrame | None:
    """The events of some steps, both ends included."""
    if events is None or events.empty:
        return events
    return _rows(events, (events["step"] >= first) & (events["step"] <= last))


def steps(frame: pd.DataFrame) -> tuple[int, int]:
    """The first and the last recorded step of a run that has samples."""
    recorded = check_samples(frame)["step"].to_numpy()
    return int(recorded.min()), int(recorded.max())


def layer_of_site(frame: pd.DataFrame) -> dict[str, int]:
    """Site name to layer, for every site with a sample."""
    samples = check_samples(frame)
    sites = _rows(samples, samples["site"] != "").drop_duplicates(["site"])
    return {site: int(layer) for site, layer in zip(sites["site"], sites["layer"], strict=True)}


def _site_of_layer(frame: pd.DataFrame) -> dict[int, str]:
    samples = check_samples(frame)
    layers = _rows(samples, samples["site"] != "").drop_duplicates(["layer"])
    return {int(layer): site for site, layer in zip(layers["site"], layers["layer"], strict=True)}


def heads_of_layer(frame: pd.DataFrame) -> dict[int, list[int]]:
    """Layer to the heads that have at least one sample, both ascending."""
    samples = check_samples(frame)
    pairs = _rows(samples, samples["site"] != "").drop_duplicates(["layer", "head"])
    heads: dict[int, list[int]] = {}
    for layer, head in sorted(zip(pairs["layer"], pairs["head"], strict=True)):
        heads.setdefault(int(layer), []).append(int(head))
    return heads


def head_label(layer: int, head: int, heads_in_layer: int) -> str:
    """The name of a head in figures and tables.

    A layer with a single value may hold the largest over its heads, so its head is not named.
    """
    return f"layer {layer}" if heads_in_layer <= 1 else f"layer {layer} · head {head}"


def mark_of(event: Event) -> Mark | None:
    """What a figure marks the event as; None for verdicts, errors, and switches not made."""
    if event.kind == "alarm":
        return "alarm"
    if event.kind == "switch" and event.stabilizer:
        return "undo" if event.stabilizer == "none" else "switch"
    return None


def what_of(event: Event) -> str:
    """The event's mark; "refusal" for a switch that was not made, else its kind."""
    return mark_of(event) or ("refusal" if event.kind == "switch" else event.kind)


def marks(events: Iterable[Event]) -> list[tuple[Event, Mark]]:
    """What is marked of a journal, in its order: first alarms, and all switches and undoings.

    First alarms are those of a head, and of the whole run those of a rule, such as the one on the
    loss. A run that has failed has thousands of later ones, which say nothing new.
    """
    seen: set[tuple[str, int | str]] = set()
    marked: list[tuple[Event, Mark]] = []
    for event in events:
        mark = mark_of(event)
        if mark is None:
            continue
        if mark == "alarm":
            alarmed = {(event.site, of) for of in event.heads or (event.rule,)}
            if alarmed <= seen:
                continue
            seen |= alarmed
        marked.append((event, mark))
    return marked


def marked_steps(events: pd.DataFrame | None, mark: Mark) -> list[int]:
    """The steps at which a mark is drawn, ascending, each once."""
    return sorted({event.step for event, found in marks(journal(events)) if found == mark})


def heads_of_events(
    frame: pd.DataFrame, events: pd.DataFrame | None
) -> list[tuple[Event, list[Head]]]:
    """The journal, each event with the heads it concerns.

    An event that lists none concerns every recorded head of its site; one without a recorded site
    (an alarm on the loss) concerns no head.
    """
    layers, recorded = layer_of_site(frame), heads_of_layer(frame)
    concerned: list[tuple[Event, list[Head]]] = []
    for event in journal(events):
        layer = layers.get(event.site, -1)
        heads = event.heads or recorded.get(layer, [])
        concerned.append((event, [(layer, head) for head in heads] if layer >= 0 else []))
    return concerned


def first_events(frame: pd.DataFrame, events: pd.DataFrame | None, mark: Mark) -> dict[Head, Event]:
    """Every head concerned by a mark with its first event, earliest first."""
    first: dict[Head, Event] = {}
    for event, heads in heads_of_events(frame, events):
        if mark_of(event) == mark:
            first.update({head: event for head in heads if head not in first})
    return first


def current_stabilizers(frame: pd.DataFrame, events: pd.DataFrame | None) -> dict[Head, str]:
    """The stabilizer of each head's last switch; heads that were never switched are absent."""
    return {
        head: event.stabilizer
        for event, heads in heads_of_events(frame, events)
        if mark_of(event) in ("switch", "undo")
        for head in heads
    }


def notable_heads(
    frame: pd.DataFrame,
    events: pd.DataFrame | None,
    indicator: str,
    count: int = 3,
    *,
    smallest: bool = False,
) -> list[Head]:
    """The heads a figure highlights: the first to alarm, then the largest magnitudes.

    Magnitudes count from the middle of the run on, so that nothing stands out for its warm-up. The
    last place is kept for the largest, so that no figure greys out its own peak.

    Args:
        frame: The samples.
        events: The journal.
        indicator: What the figure shows.
        count: Heads at most.
        smallest: Take the smallest magnitudes instead of the largest.
    """
    table = by_head(frame, indicator)
    alarmed = [head for head in first_events(frame, events, "alarm") if head in table.columns]
    later = table.iloc[len(table) // 2 :].abs()
    extremes = later.min() if smallest else later.max()
    extremes = extremes.dropna().sort_values(ascending=smallest, kind="stable")
    extreme = [(int(layer), int(head)) for layer, head in extremes.head(count).index]
    return list(dict.fromkeys([*alarmed[: count - 1], *extreme]))[:count]


def recorded_indicators(frame: pd.DataFrame) -> set[str]:
    """The indicators with at least one sample."""
    return set(check_samples(frame)["indicator"].unique())


def latest_values(frame: pd.DataFrame) -> pd.DataFrame:
    """The last recorded value of every head.

    Returns:
        Index MultiIndex (layer, head), ascending; a float64 column for each recorded indicator of
        `HEAD_INDICATORS`, in that order.
    """
    samples = check_samples(frame)
    known = samples["indicator"].isin(HEAD_INDICATORS) & (samples["site"] != "")
    samples = _rows(samples, known).sort_values(["step"], kind="stable")
    samples = samples.drop_duplicates(["layer", "head", "indicator"], keep="last")
    table = samples.pivot(index=["layer", "head"], columns="indicator", values="value")
    recorded = [name for name in HEAD_INDICATORS if name in table.columns]
    return table.reindex(columns=recorded).astype(float)


def heads_to_watch(
    frame: pd.DataFrame, events: pd.DataFrame | None, count: int = 10
) -> pd.DataFrame:
    """The heads a person should look at, worst first, with their latest values.

    Heads with an alarm come first, in the order of their first alarm; then those that are farthest
    above their own normal (`excess`), and, where that is the same, those with the largest latest
    magnitude of the first recorded indicator of `HEAD_INDICATORS`.

    Returns:
        At most `count` rows; columns layer, head, site, alarm_step (NaN without an alarm), rule,
        stabilizer, excess, then those of `latest_values`.
    """
    latest = latest_values(frame)
    alarms = first_events(frame, events, "alarm")
    stabilizers = current_stabilizers(frame, events)
    sites = _site_of_layer(frame)
    known = [
        (
            *head,
            sites[head[0]],
            alarms[head].step if head in alarms else np.nan,
            alarms[head].rule if head in alarms else "",
            stabilizers.get(head, "none"),
        )
        for head in latest.index
    ]
    columns = ["layer", "head", "site", "alarm_step", "rule", "stabilizer"]
    table = pd.DataFrame(known, columns=columns)
    if table.empty:
        return table
    table["excess"] = excess(frame)["excess"].reindex(latest.index).to_numpy()
    table = pd.concat([table, latest.reset_index(drop=True)], axis=1)
    table = table.assign(largest=latest.iloc[:, 0].abs().to_numpy())
    order = ["alarm_step", "excess", "largest"]
    table = table.sort_values(order, ascending=[True, False, False], kind="stable")
    return table.drop(columns=["largest"]).head(count).reset_index(drop=True)


def before_and_after(frame: pd.DataFrame, events: pd.DataFrame | None) -> pd.DataFrame:
    """What the switch did: the sick heads' indicators, and the run's, before it and at its end.

    Sick are the switched heads that had alarmed by their switch; all switched ones where none had.
    Before is a head's last sample up to its first switch, after its last one that came later; of a
    head that was given back, up to then. Of several heads it is the one of largest magnitude
    before, and the same one after: what a switch does is seen in one head, and not by a look at
    whichever is worst.

    The run's are means of `SAMPLES_AVERAGED` samples, as single losses are noise. For them the
    earliest switch counts, and the last head to be given back, if all were.

    Returns:
        Columns indicator, layer, head (-1 for the run), before, after; NaN where there is no such
        sample. Empty where no head was switched.
    """
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
            rows.append((indicator, *max(found, key=_size_before)))
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


def _size_before(row: tuple[int, int, float, float]) -> float:
    return -1.0 if math.isnan(row[2]) else abs(row[2])
