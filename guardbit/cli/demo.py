"""`guardbit demo`: a head that diverges, in a small model or in a recorded run."""

from __future__ import annotations

import sys
from importlib import resources
from pathlib import Path
from typing import Annotated

import typer

from guardbit.cli.common import user_errors

#: The two recorded runs of the package, and what they are.
RUNS = {
    "lost": "GPT-2 small, left alone",
    "saved": "a copy from step 4,000 on, its heads switched at step 6,750",
}
#: How the two are related.
WHICH_IS_WHICH = (
    "saved is a copy of lost from step 4,000 on, with the same losses up to there. All its heads"
    " were switched at step 6,750, when the rules of that time first alarmed. The alarms shown are"
    " those of today's rules, which come earlier."
)


def demo(
    healthy: Annotated[
        bool, typer.Option("--healthy", help="Leave the model alone; no alarm should come.")
    ] = False,
    recorded: Annotated[
        bool,
        typer.Option(
            "--recorded",
            help="Train nothing: show a real failure of GPT-2 small and its rescued copy.",
        ),
    ] = False,
    run_dir: Annotated[
        Path | None,
        typer.Option(
            help="Folder the run and its report are written to; runs/demo by default, "
            "runs/recorded with --recorded."
        ),
    ] = None,
) -> None:
    """Watch GuardBit catch a diverging head: in a small model on the CPU, or in a recorded run."""
    if recorded:
        with user_errors(OSError, ValueError):
            if healthy:
                raise ValueError("--recorded shows runs that were made: leave --healthy out")
            _show_recorded(run_dir or Path("runs/recorded"))
        typer.echo(f"\n{WHICH_IS_WHICH}")
        return
    from guardbit.demo import run_demo

    run_demo(healthy=healthy, run_dir=run_dir or Path("runs/demo"))


def _show_recorded(run_dir: Path) -> None:
    """Writes reports of the recorded runs, prints their outcomes, opens the comparison."""
    from rich.console import Console

    from guardbit.dashboards.loading import load
    from guardbit.dashboards.report import write_reports

    runs = []
    for name in RUNS:
        with resources.as_file(resources.files("guardbit") / "recorded" / name) as folder:
            runs.append(load(folder))
    console = Console(highlight=False)
    for run in runs:
        console.print(f"\n[bold]{run.judgement.headline}[/bold]  ({RUNS[run.name]})")
        console.print(" · ".join(run.judgement.facts))
    console.print("\nWriting the reports ...")
    comparison = write_reports(runs, run_dir / "comparison.html")
    for run in runs:
        write_reports([run], run_dir / f"{run.name}.html")
    console.print(f"\nSide by side: [bold]{comparison}[/bold]", soft_wrap=True)
    console.print(f"Each by itself: {', '.join(f'{name}.html' for name in RUNS)} beside it")
    if sys.stdout.isatty():
        typer.launch(comparison.resolve().as_uri())
