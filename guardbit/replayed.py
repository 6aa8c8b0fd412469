"""`guardbit demo --recorded`: a real failure and its rescued copy, which come with the package."""

from __future__ import annotations

import sys
import webbrowser
from importlib import resources
from pathlib import Path

from rich.console import Console

from guardbit.dashboards.forks import against_each_other
from guardbit.dashboards.loading import LoadedRun, load
from guardbit.dashboards.report import write_reports
from guardbit.dashboards.tables import of_run

#: What the two runs are called, and what they are.
RUNS = {
    "lost": "GPT-2 small, left alone",
    "saved": "a copy from step 4,000 on, its heads switched at its own first alarm",
}


def show_recorded(run_dir: Path) -> Path:
    """Writes reports of the recorded runs, prints their outcomes, opens the comparison."""
    recorded = resources.files("guardbit").joinpath("recorded")
    runs: list[LoadedRun] = []
    for name in RUNS:
        with resources.as_file(recorded.joinpath(name)) as folder:
            runs.append(load(folder))
    outcomes = against_each_other(
        {run.name: run.judgement for run in runs},
        {run.name: of_run(run.samples, "loss") for run in runs},
    )
    console = Console(highlight=False)
    for name, outcome in outcomes.items():
        console.print(f"\n[bold]{outcome.headline}[/bold]  ({RUNS[name]})")
        console.print(" · ".join(outcome.facts))
    console.print(
        "\nSide by side, a loss has left where it leaves the other copy's; by itself, where it has"
        " left its own best, which is later. Writing the reports ..."
    )
    comparison = write_reports(runs, run_dir / "comparison.html")
    for run in runs:
        write_reports([run], run_dir / f"{run.name}.html")
    console.print(f"\nSide by side: [bold]{comparison}[/bold]", soft_wrap=True)
    console.print(f"Each by itself: {', '.join(f'{name}.html' for name in RUNS)} beside it")
    if sys.stdout.isatty():
        webbrowser.open(comparison.resolve().as_uri())
    return comparison
