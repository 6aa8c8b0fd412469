"""`guardbit live`: a run, or the runs below a folder, in the browser."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from guardbit.cli.common import user_errors
from guardbit.records import printable


def live(
    path: Annotated[
        Path,
        typer.Argument(
            metavar="FOLDER",
            help="Folder of a run, which need not exist yet, or one with runs below it.",
        ),
    ],
    port: Annotated[
        int, typer.Option(min=0, max=65535, help="Port on this machine; 0 for any free one.")
    ] = 0,
    notify: Annotated[
        str | None,
        typer.Option(
            metavar="URL",
            help="A webhook that gets a line for new alarms, as Slack or Discord takes it.",
        ),
    ] = None,
) -> None:
    """Show a run, or the runs below a folder, in the browser while they go on; Ctrl-C ends it."""
    from guardbit.alerts import Webhook
    from guardbit.store import read_metadata

    with user_errors(OSError, ValueError):
        if path.is_file():
            raise ValueError(f"live shows the folder of a run, but {path} is a file; try report")
        try:
            from guardbit.dashboards.live import LiveRuns, LiveServer
        except ModuleNotFoundError as error:
            raise ValueError(
                f"live needs the package {error.name}: pip install starlette uvicorn"
            ) from None
        runs = LiveRuns(path, None if notify is None else Webhook(notify).tell)
        server = LiveServer(runs, port=port)
        if not runs.is_list:
            try:
                read_metadata(path)
            except (OSError, ValueError) as error:
                typer.echo(f"guardbit: {printable(str(error))}; the page waits for one", err=True)
        typer.echo(
            f"Live page of {printable(str(path))}: {server.address}\n"
            f"From another machine: ssh -L {server.port}:127.0.0.1:{server.port} <this machine>, "
            "then the same address there.\nCtrl-C ends the page; the run goes on."
        )
        server.run()
