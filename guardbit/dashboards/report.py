"""Reports about runs: what happened first, the evidence after it.

A report is one page (`page.py`) with its figures as PNGs beside it; its policy lets nothing be
fetched.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

import pandas as pd
from matplotlib.figure import Figure

from guardbit.dashboards import document
from guardbit.dashboards.document import Document, Table, Tile
from guardbit.dashboards.figures import CHARTS, runs_over_steps
from guardbit.dashboards.figures.run import RUN_LINES, of_runs_or_worst_heads
from guardbit.dashboards.figures.style import STYLE
from guardbit.dashboards.loading import LoadedRun
from guardbit.dashboards.page import (
    OVERLAYS,
    RunPage,
    plain_numbers,
    rendered,
    source_of_script,
    thinned,
)
from guardbit.dashboards.tables import Recorded
from guardbit.judgement import Judgement
from guardbit.judgement.sentences import TITLES, plural

#: What a page says, what it draws, and the pictures beside it.
Report = tuple[Document, Document | None, Mapping[str, Figure | None]]
_WORST_LAST = (
    "healthy", "saved", "unclear", "warning", "switched", "alarmed", "learning-rate", "lost",
)  # fmt: skip
#: Losses in common that make runs copies of one.
FEWEST_SHARED = 20
#: Names of all figures a comparison may have.
PICTURES = tuple(f"runs_{overlay[0]}" for overlay in OVERLAYS)


def write_reports(runs: Sequence[LoadedRun], output: str | Path) -> Path:
    """Writes the report of one run, or of two to four side by side."""
    output = Path(output)
    if output.suffix.lower() not in ("", ".html"):
        raise ValueError(f"A report is an HTML file: {output} must end in .html, or be a folder.")
    if len(runs) > 1:
        shown, answers, figures = compared(runs)
    else:
        recorded = runs[0].recorded
        shown = document.document_of(runs[0].name, recorded)
        answers = RunPage(recorded).answers() if recorded.evidence.steps else None
        figures = {name: draw(recorded) for name, draw in CHARTS.items()}
    folder = output.with_name(f"{output.stem}_figures")
    drawn = {name: figure for name, figure in figures.items() if figure is not None}
    pictures = {folder / f"{name}.png": figure for name, figure in drawn.items()}
    # A run's folder may be another person's, and what lies in it point at the reader's files.
    for path in (output, folder, *pictures):
        if path.is_symlink():
            raise ValueError(
                f"The report is not written through the link {path} to {path.readlink()}: remove "
                "it, or give another output."
            )
    folder.mkdir(parents=True, exist_ok=True)
    # Figures of an earlier report that this one does not have.
    for name in (*CHARTS, *PICTURES):
        if folder / f"{name}.png" not in pictures:
            (folder / f"{name}.png").unlink(missing_ok=True)
    for path, figure in pictures.items():
        figure.savefig(path, dpi=STYLE["savefig.dpi"])
    page = rendered(
        "page.html",
        document=shown,
        answers=answers,
        is_live=False,
        is_part=False,
        folder=folder.name if pictures else "",
        policy=f"default-src 'none'; script-src {source_of_script('page.html')}; "
        "style-src 'unsafe-inline'; img-src data:; base-uri 'none'; form-action 'none'",
    )
    output.write_text(page, encoding="utf-8")
    return output


def compared(runs: Sequence[LoadedRun]) -> Report:
    titles = [run.name for run in runs]
    if len(runs) > len(RUN_LINES):
        raise ValueError(
            f"A report compares {len(RUN_LINES)} runs at most, as more cannot be distinguished in "
            f"one figure; got {len(runs)}."
        )
    if len(set(titles)) < len(titles):
        raise ValueError(f"Compared runs need different titles, got {', '.join(titles)}.")
    recorded = {run.name: run.recorded for run in runs}
    fork = fork_of({name: run.of_run("loss") for name, run in recorded.items()})
    # From a little before the fork, so that what is one is seen to be one.
    last = max((run.steps[1] for run in recorded.values() if run.evidence.steps), default=0)
    first = 0 if fork is None else max(0, fork - (last - fork) // 8)
    outcomes = {run.name: run.judgement for run in runs}
    losses = of_runs_or_worst_heads(recorded, "loss", first)
    common = min((int(loss.index[-1]) for loss in losses.values() if len(loss)), default=0)
    facts = [_facts_of(run, losses[run.name], common) for run in runs]
    kinds = Counter(_short_state(outcome.state) for outcome in outcomes.values())
    told = ", ".join(f"{number} {kind}" for kind, number in kinds.items())
    worst = max((outcome.state for outcome in outcomes.values()), key=_WORST_LAST.index)
    shown = {
        "title": " · ".join(titles),
        "extent": plural(len(runs), "run"),
        "headline": f"{plural(len(runs), 'run')}: {told}",
        "outcome": worst,
        "lede": [] if fork is None else [f"They are copies of one run up to step {fork:,}."],
        "tiles": [
            Tile(name, state.capitalize(), outcome.headline.partition(": ")[2], outcome.state)
            for name, outcome in outcomes.items()
            if (state := _short_state(outcome.state))
        ],
        "runs": [document.heads_of(run.name, run.recorded) for run in runs],
        "settings": _settings(runs),
        "side_by_side": Table(
            ["", *titles], [[name, *[one[name] for one in facts]] for name in facts[0]]
        ),
    }
    return shown, _answers(recorded, outcomes, first), _pictures(recorded, outcomes, first)


def fork_of(losses: Mapping[str, pd.Series]) -> int | None:
    """The last step up to which all losses are equal; None if they share too few or all of them."""
    table = pd.concat(losses, axis=1, join="inner").dropna()
    same = table.nunique(axis=1).to_numpy() == 1
    shared = int(same.argmin()) if len(same) else 0
    return int(table.index[shared - 1]) if shared >= FEWEST_SHARED else None


def _short_state(state: str) -> str:
    long = state == "learning-rate"
    return "diverged by its learning rate" if long else TITLES.get(state, state).lower()


def _facts_of(run: LoadedRun, losses: pd.Series, common: int) -> dict[str, str]:
    first_alarm, lead, switched, _ = document.tiles(run.recorded)
    loss = document.last_loss(losses.to_numpy()[losses.index <= common][-1:].tolist())
    return {
        "Recorded": document.extent(run.recorded),
        "Outcome": _short_state(run.judgement.state),
        "Ended": run.judgement.ended or "–",
        "First alarm": f"{first_alarm.value} {first_alarm.note}".strip(),
        "Lead on the loss": lead.value,
        "Heads switched": f"{switched.value} {switched.note}".strip(),
        f"Loss at step {common:,}, as drawn": document.loss_of(loss),
    }


def _answers(
    recorded: Mapping[str, Recorded], outcomes: Mapping[str, Judgement], first: int
) -> Document | None:
    """What the page draws: the same overlays as the figures."""
    drawn = {name: of_runs_or_worst_heads(recorded, name, first) for name, *_ in OVERLAYS}
    runs: list[Document] = []
    for name, outcome in outcomes.items():
        known = {indicator: thinned(of[name]) for indicator, of in drawn.items() if len(of[name])}
        table = pd.concat(known, axis=1).sort_index() if known else pd.DataFrame()
        runs.append(
            {
                "name": name,
                "steps": table.index.tolist(),
                "lines": {one: plain_numbers(table[one].to_numpy(float)) for one in known},
                "marks": [{"step": at, "kind": kind} for kind, at in _marked(outcome).items()],
            }
        )
    return {"overlays": OVERLAYS, "runs": runs} if any(run["lines"] for run in runs) else None


def _marked(outcome: Judgement) -> dict[str, int]:
    """The steps of a run that are marked where it is drawn with others."""
    numbers = {"alarm": "first_alarm", "switch": "first_switch", "departed": "departed"}
    steps = {kind: outcome.numbers[name] for kind, name in numbers.items()}
    return {kind: step for kind, step in steps.items() if step is not None}


def _pictures(
    recorded: Mapping[str, Recorded], outcomes: Mapping[str, Judgement], first: int
) -> dict[str, Figure | None]:
    said = {"alarm": "alarm", "switch": "switched", "departed": "✕ loss diverged"}
    marked = {
        name: {said[kind]: step for kind, step in _marked(outcome).items()}
        for name, outcome in outcomes.items()
    }
    return {
        f"runs_{overlay[0]}": runs_over_steps(recorded, *overlay, marked, first)
        for overlay in OVERLAYS
    }


def _settings(runs: Sequence[LoadedRun]) -> list[tuple[str, Table]]:
    """Only what differs is worth comparing; everything else stands in each run's own report."""
    flat = [_flattened(run.metadata) for run in runs]
    rows = [
        [name, *values]
        for name in dict.fromkeys(name for settings in flat for name in settings)
        if len(set(values := [settings.get(name, "–") for settings in flat])) > 1
    ]
    titles = ["", *[run.name for run in runs]]
    return [("Settings that differ", Table(titles, rows))] if rows else []


def _flattened(metadata: object, prefix: str = "") -> dict[str, str]:
    if not isinstance(metadata, dict):
        return {prefix: document.setting(metadata)}
    flat: dict[str, str] = {}
    for name, value in metadata.items():
        flat |= _flattened(value, f"{prefix}.{name}" if prefix else str(name))
    return flat
