"""The command line: `guardbit demo | doctor | diagnose | report | live | replay`.

Each command has a file; `common` is what several share. A command imports inside its function, so
that help is quick and only commands that compute import torch.
"""

from __future__ import annotations

from typing import Annotated

import typer

from guardbit.cli.demo import demo
from guardbit.cli.diagnose import diagnose
from guardbit.cli.doctor import doctor
from guardbit.cli.live import live
from guardbit.cli.replay import replay
from guardbit.cli.report import report

app = typer.Typer(
    name="guardbit",
    help="Watches attention heads of low-precision training runs.",
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
    pretty_exceptions_enable=False,
)


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


for _command in (report, replay, live, demo, doctor, diagnose):
    app.command()(_command)
