"""`guardbit demo`: a head that diverges, in a small model or in a recorded run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from guardbit.cli.reading import refusing

#: What the two recorded runs are to each other, and why other commands give other dates.
WHICH_IS_WHICH = (
    "saved is a copy of lost from step 4,000 on. Its heads were switched at its own first alarm, at"
    " step 6,750 in head 2.11; up to there its loss was like the other's, but not bit by bit.\n"
    "The alarms above are those of the rules of then, and so are those of guardbit report. Of lost"
    " alone the report has a lead of 7,148 steps, to the alarm on its own loss; guardbit replay"
    " asks today's rules: first alarm at step 3,800, lead 10,060."
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
            "runs/recorded with --recorded.",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Watch GuardBit catch a diverging head: in a small model on the CPU, or in a recorded run."""
    if recorded:
        from guardbit.replayed import show_recorded

        with refusing(OSError, ValueError):
            if healthy:
                raise ValueError("--recorded shows runs that were made: leave --healthy out")
            show_recorded(run_dir or Path("runs/recorded"))
        typer.echo(f"\n{WHICH_IS_WHICH}")
        return
    from guardbit.demo import run_demo

    run_demo(healthy=healthy, run_dir=run_dir or Path("runs/demo"))
