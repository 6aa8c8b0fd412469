"""What the report of two or more runs says: side by side, one after the other below."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from guardbit.dashboards import marks, ranking, tables
from guardbit.dashboards.figures import model_map, runs_over_steps
from guardbit.dashboards.figures.run import RUN_LINES
from guardbit.dashboards.names import distinguished
from guardbit.dashboards.report import contents, words
from guardbit.dashboards.report.contents import Run
from guardbit.dashboards.report.document import (
    Block,
    Document,
    Heading,
    Paragraph,
    Picture,
    Table,
    Tile,
)
from guardbit.records import Event

#: What is drawn over one another: indicator, title, label of the axis, caption.
OVERLAYS = (
    ("loss", "Training loss", "training loss", "Running median of 25 samples."),
    (
        "w_q_spectral_norm",
        "Largest W_Q spectral norm",
        "largest singular value",
        "The largest over all heads of each run: look for one that leaves the others.",
    ),
    (
        "max_logit",
        "Largest max logit",
        "largest attention score",
        "The largest over all heads of each run.",
    ),
    (
        "multiple_maxima_bf16",
        "Largest share of rows with several maxima, BF16",
        "share of rows",
        "The largest over all heads of each run.",
    ),
)
#: Names of all figures a comparison may have.
PICTURES = (
    *[f"runs_{overlay[0]}" for overlay in OVERLAYS],
    *[f"run_{number}_model_map" for number in range(len(RUN_LINES))],
)


def compared(runs: Sequence[Run]) -> Document:
    """Two runs or more side by side; the text calls them by what distinguishes their names.

    Raises:
        ValueError: There are more than four, or two have the same title.
    """
    titles = [run.title for run in runs]
    if len(runs) > len(RUN_LINES):
        raise ValueError(
            f"A report compares {len(RUN_LINES)} runs at most, as more cannot be distinguished in "
            f"one figure; got {len(runs)}."
        )
    if len(set(titles)) < len(titles):
        raise ValueError(f"Compared runs need different titles, got {', '.join(titles)}.")
    runs = [replace(run, title=name) for run, name in zip(runs, distinguished(titles), strict=True)]
    happened = [marks.events_of(run.events) for run in runs]
    alarmed = [run.title for run, some in zip(runs, happened, strict=True) if _has_alarm(some)]
    if not alarmed:
        headline = f"No alarm in any of the {len(runs)} runs"
    elif len(alarmed) == len(runs):
        headline = f"All {len(runs)} runs have alarms"
    else:
        has = "has" if len(alarmed) == 1 else "have"
        headline = f"{len(alarmed)} of {len(runs)} runs {has} alarms: {', '.join(alarmed)}"
    return Document(
        title=" · ".join(titles),
        extent=words.count(len(runs), "run"),
        headline=headline,
        lede=tuple(
            f"{run.title}: {contents.headline(some)}."
            for run, some in zip(runs, happened, strict=True)
        ),
        tiles=tuple(
            Tile(run.title, tiles[0].value, f"first alarm: {tiles[1].value}")
            for run in runs
            if (tiles := contents.tiles(run.frame, run.events))
        ),
        blocks=[_side_by_side(runs), *_overlays(runs), *_each(runs), *_settings(runs)],
    )


def _has_alarm(happened: Sequence[Event]) -> bool:
    return any(event.kind == "alarm" for event in happened)


def _side_by_side(runs: Sequence[Run]) -> Table:
    columns: list[list[str]] = []
    for run in runs:
        verdict, first_alarm, switched, loss = contents.tiles(run.frame, run.events)
        columns.append(
            [
                contents.extent(run.frame),
                verdict.value,
                f"{first_alarm.value} {first_alarm.note}".strip(),
                f"{switched.value} {switched.note}".strip(),
                loss.value,
                _worst_head(run),
            ]
        )
    names = (
        "Recorded",
        "Verdict",
        "First alarm",
        "Heads switched",
        "Loss at the end",
        "Farthest above its baseline",
    )
    rows = [[name, *cells] for name, *cells in zip(names, *columns, strict=True)]
    return Table(["", *[run.title for run in runs]], rows)


def _worst_head(run: Run) -> str:
    excess = ranking.excess(run.frame)["excess"].dropna()
    if excess.empty:
        return "–"
    position = int(excess.to_numpy().argmax())
    layer, head = excess.index.to_list()[position]
    heads = tables.heads_of_layer(run.frame)
    label = tables.head_label(layer, head, len(heads[layer]))
    return f"{label}, {contents.times(float(excess.to_numpy()[position]))}"


def _overlays(runs: Sequence[Run]) -> list[Block]:
    blocks: list[Block] = [Heading("Side by side")]
    samples = {run.title: run.frame for run in runs if not run.frame.empty}
    for indicator, title, label, caption in OVERLAYS:
        figure = runs_over_steps(samples, indicator, title, label) if samples else None
        if figure is not None:
            blocks.append(Picture(f"runs_{indicator}", title, caption, figure))
    for number, run in enumerate(runs):
        figure = None if run.frame.empty else model_map(run.frame, run.events, name=run.title)
        if figure is not None:
            title = f"Model map: {run.title}"
            caption = "Every head at the end of the run; the same colours in all runs."
            blocks.append(Picture(f"run_{number}_model_map", title, caption, figure))
    return blocks


def _each(runs: Sequence[Run]) -> list[Block]:
    blocks: list[Block] = []
    for run in runs:
        sections = [
            *contents.heads_to_watch(run.frame, run.events),
            *contents.timeline(marks.events_of(run.events)),
        ]
        blocks += [
            Heading(run.title),
            *[Paragraph(text, quiet=False) for text in contents.summary(run.frame, run.events)],
            *[Heading(b.text, 3) if isinstance(b, Heading) else b for b in sections],
        ]
    return blocks


def _settings(runs: Sequence[Run]) -> list[Block]:
    """Only what differs is worth comparing; everything else stands in each run's own report."""
    flat = [_flat(run.metadata) for run in runs]
    names = list(dict.fromkeys(name for settings in flat for name in settings))
    rows = [
        [name, *values]
        for name in names
        if len(set(values := [settings.get(name, "–") for settings in flat])) > 1
    ]
    if not rows:
        return []
    return [Heading("Settings that differ"), Table(["", *[run.title for run in runs]], rows)]


def _flat(metadata: object, prefix: str = "") -> dict[str, str]:
    if not isinstance(metadata, dict):
        return {prefix: words.setting(metadata)}
    flat: dict[str, str] = {}
    for name, value in metadata.items():
        flat |= _flat(value, f"{prefix}.{name}" if prefix else str(name))
    return flat
