"""What the report of two or more runs says: side by side, one after the other below."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

import pandas as pd
from matplotlib.figure import Figure

from guardbit.catalog import VALIDATION_LOSS
from guardbit.dashboards import ranking, tables
from guardbit.dashboards.figures import runs_over_steps
from guardbit.dashboards.figures.run import RUN_LINES, of_run_or_worst_head
from guardbit.dashboards.loading import LoadedRun
from guardbit.dashboards.page import CATALOG_OF_PAGES, plain_numbers, thinned
from guardbit.dashboards.report import contents, words
from guardbit.dashboards.report.contents import Document, Table, Tile
from guardbit.judgement import Judgement

#: What is drawn over one another: indicator, title, label of the axis.
OVERLAYS = (
    ("loss", "Training loss", "loss"),
    (VALIDATION_LOSS, "Validation loss", "loss"),  # the paper's figure 7
    ("w_q_spectral_norm", "Largest W_Q spectral norm", "largest singular value"),
    ("max_logit", "Largest max logit", "largest logit"),
    ("multiple_maxima_bf16", "Largest share of rows with several maxima, BF16", "share of rows"),
)
_WORST_LAST = (
    "healthy", "saved", "unclear", "warning", "switched", "alarmed", "learning-rate", "lost",
)  # fmt: skip
#: Losses in common that make runs copies of one.
FEWEST_SHARED = 20
#: Names of all figures a comparison may have.
PICTURES = tuple(f"runs_{overlay[0]}" for overlay in OVERLAYS)


def compared(runs: Sequence[LoadedRun]) -> Document:
    """Two runs or more side by side."""
    titles = [run.name for run in runs]
    if len(runs) > len(RUN_LINES):
        raise ValueError(
            f"A report compares {len(RUN_LINES)} runs at most, as more cannot be distinguished in "
            f"one figure; got {len(runs)}."
        )
    if len(set(titles)) < len(titles):
        raise ValueError(f"Compared runs need different titles, got {', '.join(titles)}.")
    fork = fork_of({run.name: tables.of_run(run.samples, "loss") for run in runs})
    samples = {run.name: _from(fork, run) for run in runs}
    outcomes = {run.name: run.judgement for run in runs}
    kinds = Counter(_short(outcome.state) for outcome in outcomes.values())
    told = ", ".join(f"{number} {kind}" for kind, number in kinds.items())
    worst = max((outcome.state for outcome in outcomes.values()), key=_WORST_LAST.index)
    return {
        "title": " · ".join(titles),
        "extent": words.count(len(runs), "run"),
        "headline": f"{words.count(len(runs), 'run')}: {told}",
        "outcome": worst,
        "lede": []
        if fork is None
        else [f"They are copies of one run up to step {fork:,}, and drawn from there on."],
        "tiles": [
            Tile(name, _short(outcome.state).capitalize(), outcome.headline, outcome.state)
            for name, outcome in outcomes.items()
        ],
        "pictures": _pictures(samples, outcomes),
        "answers": _answers(samples, outcomes),
        "runs": [contents.heads_of(run) for run in runs],
        "settings": _settings(runs),
        "side_by_side": _side_by_side(runs, outcomes),
    }


def fork_of(losses: Mapping[str, pd.Series]) -> int | None:
    """The last step up to which all losses are equal; None if they share too few or all of them."""
    table = pd.concat(losses, axis=1, join="inner").dropna()
    same = table.nunique(axis=1).to_numpy() == 1
    shared = int(same.argmin()) if len(same) else 0
    return int(table.index[shared - 1]) if shared >= FEWEST_SHARED else None


def _short(state: str) -> str:
    return "diverged by its learning rate" if state == "learning-rate" else state


def _side_by_side(runs: Sequence[LoadedRun], outcomes: Mapping[str, Judgement]) -> Table:
    facts = [_facts(run, outcomes[run.name]) for run in runs]
    rows = [[name, *[one[name] for one in facts]] for name in facts[0]]
    return Table(["", *[run.name for run in runs]], rows)


def _facts(run: LoadedRun, outcome: Judgement) -> dict[str, str]:
    first_alarm, _, switched, loss = contents.tiles(run)
    return {
        "Recorded": contents.extent(run),
        "Outcome": outcome.state,
        "First alarm": f"{first_alarm.value} {first_alarm.note}".strip(),
        "Lead on the loss": "–" if outcome.lead is None else f"{outcome.lead:,} steps",
        "Heads switched": f"{switched.value} {switched.note}".strip(),
        "Loss at the end": loss.value,
        "Farthest above its baseline": _worst_head(run),
    }


def _worst_head(run: LoadedRun) -> str:
    excess = ranking.excess(run.samples, run.events).dropna()
    if excess.empty:
        return "–"
    layer, head = excess.index.to_list()[excess.argmax()]
    label = tables.head_label(layer, head, len(tables.heads_of_layer(run.samples)[layer]))
    return f"{label}, {contents.times(excess.max())}"


def _from(fork: int | None, run: LoadedRun) -> pd.DataFrame:
    """The samples from the fork on."""
    frame = tables.check_samples(run.samples)
    return frame if fork is None else tables.rows_of(frame, frame["step"] >= fork)


def _answers(
    samples: Mapping[str, pd.DataFrame], outcomes: Mapping[str, Judgement]
) -> Document | None:
    """What the page draws: the same overlays as the figures."""
    overlays: list[Document] = []
    for indicator, title, label in OVERLAYS:
        series = {name: of_run_or_worst_head(frame, indicator) for name, frame in samples.items()}
        series = {name: thinned(values) for name, values in series.items() if len(values)}
        if not series:
            continue
        table = pd.concat(series, axis=1).sort_index()
        overlays.append(
            {
                "name": indicator,
                "title": title,
                "axis": label,
                "steps": table.index.tolist(),
                "lines": [
                    {"label": name, "values": plain_numbers(table[name].to_numpy(dtype=float))}
                    for name in series
                ],
            }
        )
    if not overlays:
        return None
    validation = {VALIDATION_LOSS: {"label": "validation loss", "is_signed": False}}
    marks = [
        {"step": step, "kind": kind, "run": number}
        for number, name in enumerate(samples)
        for kind, step in _marked(outcomes[name]).items()
    ]
    return {"overlays": overlays, "catalog": CATALOG_OF_PAGES | validation, "marks": marks}


def _marked(outcome: Judgement) -> dict[str, int]:
    """The steps of a run that are marked where it is drawn with others."""
    steps = {
        "alarm": outcome.first_alarm,
        "switch": outcome.first_switch,
        "departed": outcome.departed,
    }
    return {kind: step for kind, step in steps.items() if step is not None}


def _pictures(
    samples: Mapping[str, pd.DataFrame], outcomes: Mapping[str, Judgement]
) -> dict[str, Figure]:
    said = {"alarm": "alarm", "switch": "switched", "departed": "✕ loss diverged"}
    marked = {
        name: {said[kind]: step for kind, step in _marked(outcome).items()}
        for name, outcome in outcomes.items()
    }
    samples = {name: frame for name, frame in samples.items() if not frame.empty}
    pictures = {
        f"runs_{indicator}": runs_over_steps(samples, indicator, title, label, marked)
        for indicator, title, label in OVERLAYS
        if samples
    }
    return {name: figure for name, figure in pictures.items() if figure is not None}


def _settings(runs: Sequence[LoadedRun]) -> list[tuple[str, Table]]:
    """Only what differs is worth comparing; everything else stands in each run's own report."""
    flat = [_flat(run.metadata) for run in runs]
    names = list(dict.fromkeys(name for settings in flat for name in settings))
    rows = [
        [name, *values]
        for name in names
        if len(set(values := [settings.get(name, "–") for settings in flat])) > 1
    ]
    titles = ["", *[run.name for run in runs]]
    return [("Settings that differ", Table(titles, rows))] if rows else []


def _flat(metadata: object, prefix: str = "") -> dict[str, str]:
    if not isinstance(metadata, dict):
        return {prefix: words.setting(metadata)}
    flat: dict[str, str] = {}
    for name, value in metadata.items():
        flat |= _flat(value, f"{prefix}.{name}" if prefix else str(name))
    return flat
