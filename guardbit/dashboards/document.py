"""What the report of one run says."""

from __future__ import annotations

import json
import math
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, cast

import pandas as pd
from matplotlib.figure import Figure

from guardbit.catalog import (
    BY_NAME,
    CATALOG,
    HEAD_INDICATORS,
    RUN_INDICATORS,
    SHARE_OF_ROWS,
    Indicator,
)
from guardbit.dashboards import marks, ranking, tables
from guardbit.dashboards.figures import CHARTS, story
from guardbit.dashboards.loading import Diagnosed, LoadedRun
from guardbit.dashboards.page import MOST_ALARMS, SAMPLES_AVERAGED, RunPage, last_loss
from guardbit.judgement import Judgement
from guardbit.records import Event, named

#: A wider table of heads does not fit the page.
HEAD_COLUMNS = (
    "w_q_spectral_norm",
    "max_logit",
    "multiple_maxima",
    "multiple_maxima_bf16",
    "delta_bias_cumulative",
    "dq_relative_error",
)
#: Steps that the page resolves, even.
BUCKETS = 300
#: Diagnosed heads that are shown.
_MOST_DIAGNOSED = 8

#: A cell of two texts shows the second small below the first.
Cell = str | tuple[str, str]
#: What `report.html` renders: names of its parts -> what they show.
Document = dict[str, Any]


class Table(NamedTuple):
    """A table, without a header if that is empty."""

    header: Sequence[str]
    rows: Sequence[Sequence[Cell]]
    #: First of the columns that hold numbers, set flush right.
    numbers_from: int = sys.maxsize
    #: A kind for each row ("alarmed" or ""), or none.
    kinds: Sequence[str] = ()


class Tile(NamedTuple):
    """A number to be seen first, with its name and a note; an outcome gives it a colour."""

    name: str
    value: str
    note: str
    outcome: str = ""


def document_of(run: LoadedRun) -> Document:
    """The outcome first, then the alarms, the heads to watch and the figures; last the settings."""
    frame, events = tables.check_samples(run.samples), run.events
    judgement = run.judgement
    page = RunPage(run.name, BUCKETS)
    page.metadata, page.events = run.metadata, marks.events_of(events)
    page.ended = run.ended
    page.take(frame)
    page.update_state()
    return {
        "title": run.name,
        "extent": extent(run),
        "headline": judgement.headline,
        "outcome": judgement.state,
        "lede": summary(run),
        "tiles": tiles(run),
        "pictures": _figures(frame, events, judgement),
        "answers": None if frame.empty else page.answers(),
        "runs": [heads_of(run)],
        "settings": settings(run.metadata),
        "side_by_side": None,
        "effect": _before_and_after(frame, events),
        "diagnosed": _why_heads_diverge(run.diagnosed),
    }


def heads_of(run: LoadedRun) -> Document:
    """What became of the heads: their alarms, and those to worry about."""
    frame = tables.check_samples(run.samples)
    alarms = _alarms_by_head(frame, run.events)
    more = len(alarms) - MOST_ALARMS
    return {
        "run": run.name,
        "summary": summary(run),
        "alarms": alarms[:MOST_ALARMS],
        "alarms_note": f"{plural(more, 'head')} that alarmed later not shown." * (more > 0),
        **_heads_to_watch(frame, run.events),
    }


def extent(run: LoadedRun) -> str:
    frame = tables.check_samples(run.samples)
    if frame.empty:
        return "no samples"
    first, last = tables.steps(frame)
    layers = tables.heads_of_layer(frame)
    heads = sum(map(len, layers.values()))
    text = f"steps {first:,} to {last:,} · {plural(len(layers), 'layer')}"
    # One value a layer may be the largest over its heads: their number is then not known.
    text += f" · {plural(heads, 'head')}" if heads > len(layers) else ""
    return f"{text} · {run.resumed}" if run.resumed else text


def summary(run: LoadedRun) -> list[str]:
    """What happened, in a few sentences, most important first."""
    frame, judgement = run.samples, run.judgement
    alarms = [event for event in marks.events_of(run.events) if event.kind == "alarm"]
    sentences = ["The run recorded no samples."] if frame.empty else []
    if alarms or not frame.empty:
        sentences.append(judgement.verdict_and_advice)
    sentences += [
        f"The first alarm came at step {first.step:,} ({where(first)}): {first.why}"
        for first in alarms[:1]
    ]
    return sentences if frame.empty else [*sentences, judgement.risk.sentence]


def tiles(run: LoadedRun) -> list[Tile]:
    """First alarm, lead, heads switched and loss at the end."""
    frame, events, outcome = run.samples, run.events, run.judgement
    alarms = [event for event in marks.events_of(events) if event.kind == "alarm"]
    current = marks.current_stabilizers(frame, events).values()
    undone = sum(name == "none" for name in current)
    switched = [
        ", ".join(sorted({name for name in current if name != "none"})),
        f"at step {outcome.first_switch:,}" if outcome.switched else "",
        f"{undone} undone" if undone else "",
    ]
    first_alarm, said = "none", ""
    if alarms:
        first_alarm = f"step {alarms[0].step:,}"
        said = f"{where(alarms[0])}; {plural(len(alarms), 'alarm')} in all"
    departed = outcome.missing_loss or "the loss has not diverged"
    if outcome.departed is not None:
        departed = f"the loss diverged at step {outcome.departed:,}"
    lead = "–" if outcome.lead is None else f"{outcome.lead:,} steps"
    losses = tables.of_run(frame, "loss").tail(SAMPLES_AVERAGED).tolist()
    last = last_loss(losses)
    median = f"median of the last {len(losses)} samples" if isinstance(last, float) else ""
    return [
        Tile("First alarm", first_alarm, said),
        Tile("Lead on the loss", lead, departed),
        Tile("Heads switched", f"{outcome.switched:,}", "; ".join(filter(None, switched))),
        Tile("Loss at the end", loss_of(last), median),
    ]


def effect_of_switch(frame: pd.DataFrame, events: pd.DataFrame | None) -> pd.DataFrame:
    """Compares the worst switched head, and the run, before and after the switch."""
    switched = marks.first_events(frame, events, "switch")
    ends = {
        head: event.step if event.stabilizer == "none" else math.inf
        for event, heads in marks.heads_of_events(frame, events)
        if event.kind == "switch"
        for head in heads
    }
    alarms = marks.first_events(frame, events, "alarm")
    alarmed = [
        head for head in switched if head in alarms and alarms[head].step <= switched[head].step
    ]
    rows: list[tuple[str, int, int, float, float]] = []
    for indicator in HEAD_INDICATORS if switched else ():
        if BY_NAME[indicator].sum_of:
            continue  # a sum keeps what was there before
        table = tables.by_head(frame, indicator)
        measured = [head for head in alarmed or switched if head in table.columns]
        found: list[tuple[int, int, float, float]] = []
        for head in measured:
            series = cast(pd.Series, table[head]).dropna()
            found.append((*head, *_around(series, switched[head].step, ends[head], 1)))
        if found:
            largest = max(found, key=lambda row: -1.0 if math.isnan(row[2]) else abs(row[2]))
            rows.append((indicator, *largest))
    for indicator in RUN_INDICATORS if switched else ():
        series = tables.of_run(frame, indicator)
        if not series.empty:
            first = min(event.step for event in switched.values())
            sides = _around(series, first, max(ends.values()), SAMPLES_AVERAGED)
            rows.append((indicator, -1, -1, *sides))
    return pd.DataFrame(rows, columns=["indicator", "layer", "head", "before", "after"])


def _around(series: pd.Series, step: int, end: float, samples: int) -> tuple[float, float]:
    """The median of the last samples up to a step, and of those after it up to the end."""
    before = series.loc[:step].tail(samples)
    after = series.loc[step + 1 : end].tail(samples)
    return float(before.median()), float(after.median())


def _before_and_after(frame: pd.DataFrame, events: pd.DataFrame | None) -> Table | None:
    table = effect_of_switch(frame, events)
    if table.empty:
        return None
    heads = tables.heads_of_layer(frame)
    rows: list[list[str]] = []
    for indicator, layer, head, before, after in table.itertuples(index=False):
        comparable = math.isfinite(before) and math.isfinite(after) and before * after > 0
        rows.append(
            [
                LABELS[indicator],
                tables.head_label(layer, head, len(heads[layer])) if head >= 0 else "the run",
                value_of(indicator, before),
                value_of(indicator, after),
                f"× {after / before:.3g}" if comparable else "–",
            ]
        )
    return Table(["", "", "before the switch", "at the end", "change"], rows, numbers_from=2)


def _alarms_by_head(frame: pd.DataFrame, events: pd.DataFrame | None) -> list[Document]:
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
            of.setdefault((where(event), ""), []).append(event)
    return [
        {
            "name": name,
            "site": site,
            "rules": [
                rule if times == 1 else f"{rule} × {times:,}"
                for rule, times in Counter(event.rule for event in alarms).items()
            ],
            "when": range_of([alarm.step for alarm in alarms]),
            "stabilizer": stabilizers.get((name, site), "none"),
            "why": alarms[0].why,
        }
        for (name, site), alarms in of.items()
    ]


def _heads_to_watch(frame: pd.DataFrame, events: pd.DataFrame | None) -> Document:
    """The heads to worry about, worst first, and a note that says which they are."""
    watched = ranking.heads_to_watch(frame, events)
    if watched.empty:
        return {"watched": None, "watched_note": "No head has been measured."}
    heads = tables.heads_of_layer(frame)
    alarmed = len(marks.first_events(frame, events, "alarm"))
    shown = [name for name in HEAD_COLUMNS if name in watched.columns]
    rows, kinds = [], []
    for row in watched.to_dict("records"):
        has_alarm = not math.isnan(row["alarm_step"])
        label = tables.head_label(row["layer"], row["head"], len(heads[row["layer"]]))
        step = f"step\N{NO-BREAK SPACE}{int(row['alarm_step']):,}" if has_alarm else ""
        rows.append(
            [
                (label, row["site"]),
                (step, row["rule"]) if has_alarm else "–",
                row["stabilizer"],
                times(row["excess"]),
                *[value_of(name, row[name]) for name in shown],
            ]
        )
        kinds.append("alarmed" if has_alarm else "")
    note = (
        f"{plural(alarmed, 'head')} with an alarm, in the order of the first one"
        if alarmed
        else "No head has an alarm; these are farthest above their baseline"
    )
    total = f"{sum(map(len, heads.values())):,}"
    header = ["Head", "First alarm", "Stabilizer", "Times its baseline"]
    return {
        "watched": Table([*header, *[LABELS[name] for name in shown]], rows, 3, kinds),
        "watched_note": f"{note}. Latest samples; {len(rows)} of {total} shown.",
    }


def times(excess: float) -> str:
    """An excess as a factor; beyond 1,000 its size says nothing more."""
    if math.isnan(excess):
        return "–"
    return "> 1,000 ×" if excess > 1000 else f"{excess:.2g} ×" if excess < 10 else f"{excess:.0f} ×"


def _figures(
    frame: pd.DataFrame, events: pd.DataFrame | None, judgement: Judgement
) -> dict[str, Figure]:
    """The figures that can be drawn, by the stem of their files."""
    others = {name: draw(frame, events) for name, draw in CHARTS.items() if draw is not story}
    drawn = {"story": story(frame, events, judgement)} | others
    return {name: figure for name, figure in drawn.items() if figure is not None}


def settings(metadata: Mapping[str, Any]) -> list[tuple[str, Table]]:
    """Settings, versions and attention modules, as tables with their titles."""
    plain = {name: value for name, value in metadata.items() if not isinstance(value, Mapping)}
    nested = {name: value for name, value in metadata.items() if isinstance(value, Mapping)}
    titled = [("", _key_values(plain))] if plain else []
    for name, value in nested.items():
        if value:
            holds_records = all(isinstance(entry, Mapping) for entry in value.values())
            table = _records(value) if holds_records else _key_values(value)
            titled.append((title_of(name), table))
    return titled


def _records(value: Mapping[str, Mapping[str, Any]]) -> Table:
    columns = list(dict.fromkeys(name for entry in value.values() for name in entry))
    rows = [
        [name, *[setting(entry.get(column)) for column in columns]] for name, entry in value.items()
    ]
    return Table(["", *map(title_of, columns)], rows)


def _key_values(value: Mapping[str, Any]) -> Table:
    return Table([], [[title_of(name), setting(entry)] for name, entry in value.items()])


def _why_heads_diverge(diagnosed: Diagnosed) -> Document | None:
    """The answer of each diagnosed head, then what is left with each remedy."""
    if not diagnosed.snapshots and not diagnosed.heads:
        return None
    if not diagnosed.heads:
        steps = plural(diagnosed.snapshots, "step")
        said = f"Inputs of heads were kept at {steps}; guardbit diagnose says why they diverge."
        return {"said": said, "heads": [], "note": "", "left": None}
    shown = diagnosed.heads[:_MOST_DIAGNOSED]
    more = len(diagnosed.heads) - len(shown)
    note = "What is left of the summed error of dQ without a rounding, and with a remedy."
    rows = [
        [
            name,
            *(percent(one["left"][name]) if name in one["left"] else "–" for one in shown),
        ]
        for name in dict.fromkeys(name for one in shown for name in one["left"])
    ]
    names = [f"{one['site']} head {one['head']}" for one in shown]
    return {
        "said": "",
        "heads": [
            (f"{name}, {range_of(one['steps'])}", " ".join(one["answer"]))
            for name, one in zip(names, shown, strict=True)
        ],
        "note": note + (f" {plural(more, 'more head')} not shown." if more else ""),
        "left": Table(["", *names], rows, numbers_from=1),
    }


# --- words and numbers ----------------------------------------------------------------------------


def _label(indicator: Indicator) -> str:
    """What a column of an indicator's values is headed; shares are shown in percent."""
    unit = "% of rows" if indicator.unit == SHARE_OF_ROWS else indicator.unit
    return f"{indicator.title} ({unit})" if unit else indicator.title


LABELS = {indicator.name: _label(indicator) for indicator in CATALOG}


def where(event: Event) -> str:
    if not event.site:
        return "the whole run"
    return f"{event.site}, {named(event.heads)}" if event.heads else event.site


def plural(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def range_of(steps: Sequence[int]) -> str:
    first, last = min(steps), max(steps)
    return f"step {first:,}" if first == last else f"steps {first:,} to {last:,}"


def value_of(indicator: str, number: float) -> str:
    return three_digits(100 * number if BY_NAME[indicator].unit == SHARE_OF_ROWS else number)


def percent(part: float) -> str:
    """A part in percent; beyond ten times the whole its size says nothing more."""
    return "over 1,000 %" if part > 10 else f"{100 * part:.3g} %"


def three_digits(value: float) -> str:
    """Three significant digits, without an exponent where that stays short."""
    if math.isnan(value):
        return "–"
    if math.isinf(value):
        return "∞" if value > 0 else "−∞"
    if value == 0 or 1e-3 <= abs(value) < 1e3:
        text = f"{value:.3g}"
    elif 1e3 <= abs(value) < 1e7:
        text = f"{value:,.0f}"
    else:
        text = f"{value:.2e}"
    return text.replace("-", "−") if value < 0 else text


def loss_of(last: float | str | None) -> str:
    return three_digits(last) if isinstance(last, int | float) else last or "–"


def setting(value: object) -> str:
    if value is None:
        return "–"
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)


def title_of(name: object) -> str:
    words = {"sites": "attention modules"}.get(str(name), str(name)).replace("_", " ")
    return words[:1].upper() + words[1:]
