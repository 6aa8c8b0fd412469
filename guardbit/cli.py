"""The command line: `guardbit demo | report | replay`.

What a command needs is imported inside it, so that help is quick and no command imports torch that
does not compute with it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    import pandas as pd

    from guardbit.monitor.detectors import Rule
    from guardbit.records import Alarm

app = typer.Typer(
    name="guardbit",
    help="Watches attention heads of low-precision training runs.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

RunPath = Annotated[
    Path, typer.Argument(help="Folder of a run, or a CSV of its samples.", show_default=False)
]


@contextlib.contextmanager
def _refusing(*errors: type[Exception]) -> Iterator[None]:
    """Turns the user's errors into a sentence and exit code 2, and warnings into sentences."""
    with warnings.catch_warnings():
        warnings.simplefilter("always", UserWarning)
        warnings.showwarning = lambda message, *_, **__: typer.echo(
            f"guardbit: {message}", err=True
        )
        try:
            yield
        except errors as error:
            typer.echo(f"guardbit: {error}", err=True)
            raise typer.Exit(2) from None


def _read_samples(path: Path) -> pd.DataFrame:
    from guardbit.store import read_run

    frame = read_run(path)
    if frame.empty:
        raise ValueError(f"the run at {path} holds no samples yet")
    return frame


def _print_version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        typer.echo(f"guardbit {version('guardbit')}")
        raise typer.Exit


@app.callback()
def _main(
    _version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version and exit."
        ),
    ] = False,
) -> None:
    pass


@app.command()
def report(
    path: RunPath,
    output: Annotated[
        Path | None,
        typer.Option(
            help="The HTML file, or its folder; by default in the run's folder or beside the CSV.",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Write a run's report: one self-contained HTML file, and its figures as PNGs beside it."""
    from guardbit.dashboards.report import write_report
    from guardbit.store import read_events, read_metadata

    with _refusing(OSError, ValueError):
        frame, events, metadata = _read_samples(path), read_events(path), read_metadata(path)
    name = path.resolve().name.removesuffix(".gz").removesuffix(".csv")
    if output is None:
        output = path if path.is_dir() else path.with_name(f"{name}-report.html")
    if output.is_dir():
        output /= "report.html"
    with _refusing(OSError):
        typer.echo(write_report(frame, events, metadata, output, title=name))


@app.command()
def replay(
    path: RunPath,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object and nothing else.")
    ] = False,
    threshold: Annotated[
        list[str] | None,
        typer.Option(
            metavar="RULE.NAME=NUMBER",
            help="A rule's threshold, such as norm_growth.ratio=3; may be repeated.",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Run the detectors over recorded telemetry again, with the same or other thresholds."""
    from guardbit.monitor.detectors import DEFAULT_RULES
    from guardbit.monitor.replay import replay as replay_frame

    with _refusing(OSError, ValueError):
        rules = _with_thresholds(DEFAULT_RULES, threshold or ())
        result = replay_frame(_read_samples(path), rules)
    if as_json:
        alarms = [
            {"step": alarm.step, "site": alarm.site, "heads": alarm.heads, "rule": alarm.rule}
            for alarm in result.alarms
        ]
        typer.echo(
            json.dumps(
                {"alarms": alarms, "first_alarm": result.first_alarm, "verdict": result.verdict}
            )
        )
        return

    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console()
    if result.alarms:
        table = Table("first step", "site", "heads", "rule", "alarms", box=None, pad_edge=False)
        by_rule: dict[tuple[str, str], list[Alarm]] = {}
        for alarm in result.alarms:
            by_rule.setdefault((alarm.site, alarm.rule), []).append(alarm)
        for (site, rule), alarms in by_rule.items():
            heads = sorted({head for alarm in alarms for head in alarm.heads})
            table.add_row(
                f"{alarms[0].step:,}",
                Text(site or "whole run"),
                ", ".join(map(str, heads)),
                rule,
                str(len(alarms)),
            )
        console.print(table)
    console.print(f"{result.verdict}: {result.why}", markup=False, highlight=False, soft_wrap=True)


def _with_thresholds(rules: Sequence[Rule], thresholds: Sequence[str]) -> tuple[Rule, ...]:
    """Returns the rules with thresholds replaced, each given as "rule.name=number"."""
    by_name: dict[str, Any] = {rule.name: rule for rule in rules}
    allowed = {
        f"{name}.{field.name}": type(getattr(rule, field.name))
        for name, rule in by_name.items()
        for field in dataclasses.fields(rule)
        if isinstance(getattr(rule, field.name), int | float)
    }
    for threshold in thresholds:
        key, _, number = threshold.partition("=")
        if key not in allowed:
            raise ValueError(
                f"--threshold must be RULE.NAME=NUMBER, got {threshold!r}; there are "
                f"{', '.join(allowed)}"
            )
        rule, _, field = key.partition(".")
        try:
            value = allowed[key](number)
            if math.isnan(value):
                raise ValueError
        except ValueError:
            kind = "a whole number" if allowed[key] is int else "a number"
            raise ValueError(f"--threshold {key} must be {kind}, got {number!r}") from None
        by_name[rule] = dataclasses.replace(by_name[rule], **{field: value})
    return tuple(by_name.values())


@app.command()
def demo(
    healthy: Annotated[
        bool, typer.Option("--healthy", help="Train a model that stays well instead.")
    ] = False,
    run_dir: Annotated[
        Path, typer.Option(help="Folder the run and its report are written to.")
    ] = Path("runs/demo"),
) -> None:
    """Train a small model on the CPU whose attention goes wrong, and watch GuardBit catch it."""
    from guardbit.demo import run_demo

    run_demo(healthy=healthy, run_dir=run_dir)
