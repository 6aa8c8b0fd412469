"""One self-contained page about a run: what happened first, the evidence after it.

The page opens without a network: its figures are inline SVG that take the page's text colour, so
they read on light and dark alike. The same figures lie beside it as PNGs.
"""

from __future__ import annotations

import io
import json
import math
import re
import sys
from collections.abc import Mapping, Sequence
from html import escape
from importlib import resources
from pathlib import Path
from string import Template
from typing import Any

import matplotlib
import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from guardbit.dashboards import frames
from guardbit.dashboards.figures import CHARTS, HIGHLIGHTS, INK, MEDIAN_WINDOW, PAPER, STYLE, Chart
from guardbit.records import Event

HEADLINES = {
    "rounding": "Single heads show the signs of a rounding failure",
    "learning-rate": "The whole model diverges, as at too high a learning rate",
    "stable": "This run is stable",
    "unclear": "Something is wrong in this run, and its signs disagree",
}
LABELS = {
    "w_q_spectral_norm": "W_Q spectral norm",
    "w_k_spectral_norm": "W_K spectral norm",
    "qk_spectral_norm": "W_Q^T W_K spectral norm",
    "multiple_maxima": "Multiple maxima, FP32 (% of rows)",
    "multiple_maxima_bf16": "Multiple maxima, BF16 (% of rows)",
    "max_logit": "Max logit",
    "attention_entropy": "Entropy (nats)",
    "delta_bias": "Delta bias",
    "delta_bias_abs": "Delta bias, absolute",
    "delta_bias_cumulative": "Cumulative delta bias",
    "dq_relative_error": "dQ relative error",
    "dq_coherent_error": "dQ coherent error",
    "loss": "Training loss",
    "grad_norm": "Gradient norm",
}
PERCENTAGES = ("multiple_maxima", "multiple_maxima_bf16")
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


def write_report(
    frame: pd.DataFrame,
    events: pd.DataFrame | None,
    metadata: Mapping[str, Any] | None,
    output: str | Path,
    *,
    title: str = "Training run",
) -> Path:
    """Writes the page, and its figures as PNGs into the folder `<stem>_figures` beside it.

    Args:
        frame: Samples, as `guardbit.read_run` returns them.
        events: Journal, as `guardbit.read_events` returns it.
        metadata: Settings, versions and sites of the run; JSON-able.
        output: Path of the page; missing folders are made, an old page is replaced.
        title: What the run is called.

    Returns:
        The path of the page.

    Raises:
        ValueError: `output` is a folder, or a table lacks a column.
    """
    output = Path(output)
    if output.is_dir():
        raise ValueError(f"The report needs the path of an HTML file, but {output} is a folder.")
    folder = output.with_name(f"{output.stem}_figures")
    folder.mkdir(parents=True, exist_ok=True)
    journal = frames.journal(events)
    page = Template(_template()).substitute(
        title=escape(title),
        extent=escape(_extent(frame)),
        headline=escape(_headline(journal)),
        lede=_paragraphs(_summary(frame, events)),
        tiles=_tiles(frame, events),
        sections="\n".join(
            [
                _before_and_after(frame, events),
                _heads_to_watch(frame, events),
                _timeline(journal),
                _figures(frame, events, folder),
                _settings(metadata or {}),
            ]
        ),
    )
    output.write_text(page, encoding="utf-8")
    return output


def _template() -> str:
    return (
        resources.files("guardbit.dashboards").joinpath("report.html").read_text(encoding="utf-8")
    )


def _extent(frame: pd.DataFrame) -> str:
    if frame.empty:
        return "no samples"
    steps = frames.check_samples(frame)["step"].to_numpy()
    layers = frames.heads_of_layer(frame)
    heads = sum(map(len, layers.values()))
    extent = f"steps {int(steps.min()):,} to {int(steps.max()):,} · {_count(len(layers), 'layer')}"
    # One value a layer may be the largest over its heads: their number is then not known.
    return f"{extent} · {_count(heads, 'head')}" if heads > len(layers) else extent


def _verdict(journal: Sequence[Event]) -> Event | None:
    return next((event for event in reversed(journal) if event.kind == "verdict"), None)


def _headline(journal: Sequence[Event]) -> str:
    verdict = _verdict(journal)
    if verdict is not None:
        return HEADLINES.get(verdict.rule, f"Verdict: {verdict.rule}")
    if any(event.kind == "alarm" for event in journal):
        return "Alarms have fired; no verdict was recorded"
    return "No alarm has fired"


def _summary(frame: pd.DataFrame, events: pd.DataFrame | None) -> list[str]:
    """What happened, in a few sentences, most important first."""
    journal = frames.journal(events)
    verdict = _verdict(journal)
    sentences = [verdict.why] if verdict is not None else []
    if frame.empty:
        sentences.append("The run recorded no samples.")
    alarms = [event for event in journal if event.kind == "alarm"]
    if alarms:
        first = alarms[0]
        sentences.append(
            f"The first alarm came at step {first.step:,} ({_where(first)}): {first.why}"
        )
    elif verdict is not None:
        sentences.append("No alarm has fired.")
    switched = frames.first_events(frame, events, "switch")
    if switched:
        steps = sorted({event.step for event in switched.values()})
        sentences.append(
            f"{_count(len(switched), 'head')} went over to a stabilized kernel"
            + (f" at step {steps[0]:,}." if len(steps) == 1 else f", from step {steps[0]:,} on.")
        )
    elif alarms:
        sentences.append("No head was switched to a stabilized kernel.")
    loss = frames.of_run(frame, "loss")
    lost = loss.index.to_numpy()[~np.isfinite(loss.to_numpy())]
    if len(lost):
        sentences.append(f"The loss was first not finite at step {int(lost[0]):,}.")
    return sentences


def _tiles(frame: pd.DataFrame, events: pd.DataFrame | None) -> str:
    journal = frames.journal(events)
    verdict = _verdict(journal)
    alarms = [event for event in journal if event.kind == "alarm"]
    switched = frames.first_events(frame, events, "switch")
    current = frames.current_stabilizers(frame, events)
    stabilized = sorted({name for name in current.values() if name != "none"})
    undone = sum(name == "none" for name in current.values())
    loss = frames.of_run(frame, "loss")
    tiles = [
        (
            "Verdict",
            verdict.rule if verdict is not None else "none yet",
            f"given at step {verdict.step:,}" if verdict is not None else "",
        ),
        (
            "First alarm",
            f"step {alarms[0].step:,}" if alarms else "none",
            f"{_where(alarms[0])}; {_count(len(alarms), 'alarm')} in all" if alarms else "",
        ),
        (
            "Heads switched",
            f"{len(switched):,}",
            ", ".join([*stabilized, *([f"{undone} undone"] if undone else [])]),
        ),
        (
            "Loss at the end",
            _number(float(loss.tail(MEDIAN_WINDOW).median())) if len(loss) else "–",
            f"median of the last {min(MEDIAN_WINDOW, len(loss))} samples" if len(loss) else "",
        ),
    ]
    return "".join(
        f"<div><dt>{escape(name)}</dt><dd>{escape(value)}</dd><dd>{escape(note)}</dd></div>"
        for name, value, note in tiles
    )


def _before_and_after(frame: pd.DataFrame, events: pd.DataFrame | None) -> str:
    table = frames.before_and_after(frame, events)
    if table.empty:
        return ""
    rows = []
    for indicator, before, after in table.itertuples(index=False):
        comparable = math.isfinite(before) and math.isfinite(after) and before * after > 0
        change = f"× {after / before:.3g}" if comparable else "–"
        rows.append(
            [LABELS[indicator], _value(indicator, before), _value(indicator, after), change]
        )
    return (
        _heading("What the switch did")
        + _paragraphs(
            [
                "The worst of the switched heads, and the run as a whole: the mean of the last "
                f"{frames.SAMPLES_AVERAGED} samples before the switch and of the last "
                f"{frames.SAMPLES_AVERAGED} recorded."
            ],
            "quiet",
        )
        + _table(["", "before the switch", "at the end", "change"], rows, numbers_from=1)
    )


def _heads_to_watch(frame: pd.DataFrame, events: pd.DataFrame | None) -> str:
    watched = frames.heads_to_watch(frame, events)
    if watched.empty:
        return _heading("Heads to watch") + _paragraphs(["No head has been measured."], "quiet")
    heads = frames.heads_of_layer(frame)
    alarmed = len(frames.first_events(frame, events, "alarm"))
    shown = [name for name in HEAD_COLUMNS if name in watched.columns]
    rows, classes = [], []
    for row in watched.to_dict("records"):
        has_alarm = not math.isnan(row["alarm_step"])
        label = frames.head_label(row["layer"], row["head"], len(heads[row["layer"]]))
        rows.append(
            [
                (label, row["site"]),
                (f"step\N{NO-BREAK SPACE}{int(row['alarm_step']):,}", row["rule"])
                if has_alarm
                else "–",
                row["stabilizer"],
                *[_value(name, row[name]) for name in shown],
            ]
        )
        classes.append("alarmed" if has_alarm else "")
    note = (
        f"{_count(alarmed, 'head')} with an alarm, in the order of the first one"
        if alarmed
        else "No head has an alarm; these have the largest values"
    )
    return (
        _heading("Heads to watch")
        + _paragraphs([f"{note}. Latest samples; {len(rows)} of {_total(heads)} shown."], "quiet")
        + _table(
            ["Head", "First alarm", "Stabilizer", *[LABELS[name] for name in shown]],
            rows,
            numbers_from=3,
            classes=classes,
        )
    )


def _timeline(journal: Sequence[Event]) -> str:
    if not journal:
        return _heading("Timeline") + _paragraphs(["No event was recorded."], "quiet")
    alarms = [event for event in journal if event.kind == "alarm"]
    others = [event for event in journal if event.kind != "alarm"]
    # Alarms first: where a step has both, the alarm is what the switch answers.
    shown = sorted([*alarms[:MOST_ALARMS], *others], key=lambda event: event.step)
    hidden = max(len(alarms) - MOST_ALARMS, 0)
    items = "".join(
        f'<li class="{escape(frames.mark_of(event) or event.kind)}">'
        f"<time>{event.step:,}</time><b>{escape(_what(event))}</b><p>{escape(event.why)}</p></li>"
        for event in shown
    )
    note = f"{_count(hidden, 'later alarm')} not shown." if hidden else ""
    return (
        _heading("Timeline")
        + f'<ol class="timeline">{items}</ol>'
        + _paragraphs([note] if note else [], "quiet")
    )


def _figures(frame: pd.DataFrame, events: pd.DataFrame | None, folder: Path) -> str:
    drawn, missing = [], []
    for chart in CHARTS:
        figure = chart.draw(frame, events)
        picture = folder / f"{chart.name}.png"
        if figure is None:
            picture.unlink(missing_ok=True)
            needs = " or ".join(chart.needs)
            missing.append(f"{chart.title}: the run holds no sample of {needs} that can be drawn.")
            continue
        figure.savefig(picture, dpi=STYLE["savefig.dpi"])
        drawn.append(
            f"<figure>{_inline_svg(figure, chart)}"
            f"<figcaption>{escape(chart.caption)}</figcaption></figure>"
        )
    absent = ""
    if missing:
        lines = "".join(f"<li>{escape(line)}</li>" for line in missing)
        absent = f'<h3>Not drawn</h3><ul class="quiet">{lines}</ul>'
    return _heading("Figures") + "".join(drawn) + absent


def _inline_svg(figure: Figure, chart: Chart) -> str:
    """The figure as an SVG element that takes colours and typeface from the page."""
    buffer = io.StringIO()
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": chart.name}):
        figure.savefig(
            buffer,
            format="svg",
            transparent=True,
            dpi=STYLE["savefig.dpi"],
            metadata={"Date": None},
        )
    svg = buffer.getvalue()
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    # Inside HTML the parser knows the name spaces; without them the page names no address at all.
    svg = re.sub(r'\s(xmlns(:xlink)?|version)="[^"]*"', "", svg)
    opening, rest = svg.split(">", 1)
    opening = re.sub(r'\s(width|height)="[^"]*"', "", opening)
    # Names of elements are unique within a figure at best: those in use get the figure's name.
    used = set(re.findall(r'(?:url\(|href=")#([^)"]+)', rest))
    rest = re.sub(r' id="([^"]*)"', lambda m: m[0] if m[1] in used else "", rest)
    rest = re.sub(r'( id="|url\(#|href="#)', rf"\g<1>{chart.name}-", rest)
    rest = re.sub(r"font-family: [^;\"]*;? ?", "", rest)
    rest = rest.replace(INK, "currentColor").replace(PAPER, "var(--paper)")
    for index, (colour, _) in enumerate(HIGHLIGHTS):
        rest = rest.replace(colour, f"var(--highlight-{index})")
    return f'{opening} role="img" aria-label="{escape(chart.title)}">{rest}'


def _settings(metadata: Mapping[str, Any]) -> str:
    if not metadata:
        return ""
    plain = {name: value for name, value in metadata.items() if not isinstance(value, Mapping)}
    parts = [_key_values(plain)] if plain else []
    for name, value in metadata.items():
        if isinstance(value, Mapping) and value:
            table = _records(value) if _holds_records(value) else _key_values(value)
            parts.append(f"<h3>{escape(_title(name))}</h3>{table}")
    return _heading("Settings and versions") + "".join(parts)


def _holds_records(value: Mapping[str, Any]) -> bool:
    return all(isinstance(entry, Mapping) for entry in value.values())


def _records(value: Mapping[str, Mapping[str, Any]]) -> str:
    columns = list(dict.fromkeys(name for entry in value.values() for name in entry))
    rows = [
        [name, *[_setting(entry.get(column)) for column in columns]]
        for name, entry in value.items()
    ]
    return _table(["", *map(_title, columns)], rows)


def _key_values(value: Mapping[str, Any]) -> str:
    return _table([], [[_title(name), _setting(entry)] for name, entry in value.items()])


def _setting(value: object) -> str:
    if value is None:
        return "–"
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)


def _title(name: str) -> str:
    words = str(name).replace("_", " ")
    return words[:1].upper() + words[1:]


def _heading(text: str) -> str:
    return f"<h2>{escape(text)}</h2>"


def _paragraphs(sentences: Sequence[str], kind: str = "lede") -> str:
    return "".join(f'<p class="{kind}">{escape(sentence)}</p>' for sentence in sentences)


Cell = str | tuple[str, str]


def _table(
    header: Sequence[str],
    rows: Sequence[Sequence[Cell]],
    *,
    numbers_from: int | None = None,
    classes: Sequence[str] = (),
) -> str:
    """A table; a cell of two texts shows the second small below the first.

    Args:
        header: Names of the columns; none for a table without a header.
        rows: The cells.
        numbers_from: First of the columns that hold numbers, set flush right.
        classes: A class for each row.
    """
    flush = sys.maxsize if numbers_from is None else numbers_from

    def row(cells: Sequence[Cell], tag: str, kind: str = "") -> str:
        opened = [
            f'<{tag} class="number">' if i >= flush else f"<{tag}>" for i in range(len(cells))
        ]
        inner = "".join(
            f"{start}{_cell(cell)}</{tag}>" for start, cell in zip(opened, cells, strict=True)
        )
        return f'<tr class="{kind}">{inner}</tr>' if kind else f"<tr>{inner}</tr>"

    head = f"<thead>{row(header, 'th')}</thead>" if header else ""
    kinds = classes or [""] * len(rows)
    body = "".join(row(cells, "td", kind) for cells, kind in zip(rows, kinds, strict=True))
    return f'<div class="scroll"><table>{head}<tbody>{body}</tbody></table></div>'


def _cell(cell: Cell) -> str:
    if isinstance(cell, tuple):
        return f"{escape(cell[0])}<small>{escape(cell[1])}</small>"
    return escape(cell)


def _what(event: Event) -> str:
    what = {
        "alarm": f"Alarm: {event.rule}" if event.rule else "Alarm",
        "switch": f"Switched to {event.stabilizer}",
        "undo": "Switched back to plain attention",
        "verdict": f"Verdict: {event.rule}",
        "monitor_error": "Error in the monitor",
    }[frames.mark_of(event) or event.kind]
    where = _where(event)
    return f"{what} · {where}" if event.site else what


def _where(event: Event) -> str:
    if not event.site:
        return "the whole run"
    if not event.heads:
        return event.site
    return f"{event.site}, head{'s' * (len(event.heads) > 1)} {', '.join(map(str, event.heads))}"


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def _total(heads: Mapping[int, Sequence[int]]) -> str:
    return f"{sum(map(len, heads.values())):,}"


def _value(indicator: str, value: float) -> str:
    return _number(100 * value if indicator in PERCENTAGES else value)


def _number(value: float) -> str:
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
