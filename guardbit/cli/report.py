"""`guardbit report`: the report of a run, or of several side by side."""

from __future__ import annotations

import dataclasses
import enum
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from guardbit.cli.common import json_of, load_with_events, user_errors, writing_to
from guardbit.records import printable


class ReportFormat(enum.StrEnum):
    """The formats of `guardbit.dashboards.report`, which is imported when a report is written."""

    html = "html"
    png = "png"


def report(
    paths: Annotated[
        list[Path],
        typer.Argument(
            metavar="RUN",
            help="Folder of a run, or a CSV of its samples; two to four stand side by side.",
        ),
    ],
    output: Annotated[
        Path | None,
        typer.Option(
            help="The file, or its folder; by default in the run's folder or beside the CSV."
        ),
    ] = None,
    format: Annotated[
        ReportFormat,
        typer.Option(
            help="One page that opens offline, with its figures beside it; or a folder of the "
            "figures alone."
        ),
    ] = ReportFormat.html,
    open_it: Annotated[
        bool, typer.Option("--open", help="Open the report in the browser.")
    ] = False,
    as_json: Annotated[
        bool,
        typer.Option(
            "--json",
            help="Write no report: print the judgement as one JSON object, of several runs as "
            'one with "runs".',
        ),
    ] = False,
) -> None:
    """Write the report of a run, or of several side by side."""
    if as_json:
        with user_errors(OSError, ValueError):
            if output is not None or format is not ReportFormat.html:
                raise ValueError("--json writes no report: leave --output and --format out")
            runs = [load_with_events(path) for path in paths]
            outcomes = [
                {"run": str(path), **json_of(run.judgement, run)}
                for path, run in zip(paths, runs, strict=True)
            ]
        typer.echo(json.dumps(outcomes[0] if len(paths) == 1 else {"runs": outcomes}))
        return
    from guardbit.dashboards.report import write_reports
    from guardbit.store.files import names_of_runs

    with user_errors(OSError, ValueError):
        place = _report_path(paths, output, format)
        named = zip(names_of_runs(paths), paths, strict=True)
        runs = [dataclasses.replace(load_with_events(path), name=name) for name, path in named]
        with writing_to(place):
            written = write_reports(runs, place, format=format.value)
    for run in runs:  # not to stdout, which has the place alone
        resumed = f" The run was {run.resumed}." if run.resumed else ""
        said = f"{run.name}: {run.judgement.headline}. {run.judgement.advice}{resumed}"
        typer.echo(printable(said), err=True)
    typer.echo(printable(str(written)))
    if open_it:
        typer.launch(written.resolve().as_uri())


def _report_path(paths: Sequence[Path], output: Path | None, format: ReportFormat) -> Path:
    """Where a report goes: a file, or the folder of the PNGs."""
    name = "report" if len(paths) == 1 else "comparison"
    name += "_pictures" if format is ReportFormat.png else ".html"
    if output is not None:
        # A name without a suffix is a folder's, whether it exists already or not.
        is_folder = format is not ReportFormat.png and (output.is_dir() or not output.suffix)
        return output / name if is_folder else output
    if len(paths) > 1:
        if Path(name).exists():
            raise ValueError(f"{name} is there already: --output {name} overwrites it")
        return Path(name)
    from guardbit.store.files import stem_of_run

    path = paths[0]
    return path / name if path.is_dir() else path.with_name(f"{stem_of_run(path)}-{name}")
