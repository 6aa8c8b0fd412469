"""`guardbit diagnose`: why alarmed heads diverge."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Annotated

import typer

from guardbit.cli.common import user_errors, writing_to
from guardbit.records import printable


def diagnose(
    path: Annotated[Path, typer.Argument(metavar="RUN", help="Folder of a run.")],
    head: Annotated[
        list[str] | None,
        typer.Option(
            metavar="SITE:NUMBER",
            help="A head, such as net.h.3.attn:7; may be repeated. By default all that were kept.",
        ),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(help="Folder of the figures, by default `diagnosis` in the run's folder."),
    ] = None,
    verbose: Annotated[
        bool,
        typer.Option(
            "--verbose", help="Print what each rounding and each stabilizer leaves of the error."
        ),
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object, and draw no figures.")
    ] = False,
) -> None:
    """Say why alarmed heads diverge: which rounding moves dQ, and whether it adds up."""
    from guardbit.dashboards.figures.diagnosis import head_diagnosis
    from guardbit.dashboards.loading import DIAGNOSIS, read_diagnosed
    from guardbit.dashboards.marks import judgement_of
    from guardbit.doctor import text
    from guardbit.doctor.diagnose import diagnose as diagnose_head
    from guardbit.doctor.snapshots import heads_of_run
    from guardbit.store import folder_of_run, read_events, read_metadata, read_run
    from guardbit.store.files import publish

    with user_errors(OSError, ValueError):
        folder = folder_of_run(path)
        heads = heads_of_run(folder, head or ())
        run = judgement_of(read_run(folder), read_events(folder), read_metadata(folder))
        verdict = f"{run.verdict}: {run.why}" if run.num_alarms else run.verdict
        figures = output or folder / "diagnosis"
        if not as_json:
            with writing_to(figures):  # before a minute's work is wasted
                figures.mkdir(parents=True, exist_ok=True)
                tempfile.TemporaryFile(dir=figures).close()
        told = []
        for kept in heads:
            found = diagnose_head([one.inputs for one in kept])
            told.append(text.as_json(kept, found))
            if as_json:
                continue
            for line in text.page(kept, found, verbose=verbose):
                typer.echo(printable(line))
            place = figures / text.file_name(kept[-1])
            head_diagnosis(
                printable(text.heading(kept, found)),
                text.parts_left(found),
                found.roots.row_push.flatten().tolist(),
                found.roots.key_push.sum(0).tolist(),
                found.roots.column_push.tolist(),
                found.row,
            ).savefig(place)
            typer.echo(f"Figure: {printable(str(place))}\n")
        if output is None and not as_json:
            # Beside the figures, for the report; other heads' answers stay.
            new = {(one["site"], one["head"]) for one in told}
            known = read_diagnosed(folder).heads
            told += [one for one in known if (one["site"], one["head"]) not in new]
            publish(folder / DIAGNOSIS, json.dumps({"heads": told}).encode())
    if as_json:
        typer.echo(json.dumps({"heads": told, "verdict": verdict, "risk": run.risk._asdict()}))
        return
    if run.num_alarms:
        typer.echo(f"The rules' own verdict on the run is {printable(verdict)}")
    typer.echo(run.risk.sentence)
