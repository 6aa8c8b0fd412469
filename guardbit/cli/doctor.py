"""`guardbit doctor`: whether attention is sound on this machine."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Annotated

import typer

from guardbit.cli.common import user_errors
from guardbit.records import printable


def doctor(
    shape: Annotated[
        list[str] | None,
        typer.Option(
            metavar="B,H,H_kv,N,D",
            help="Sequences, query heads, key heads, tokens and head size; may be repeated. By "
            "default common ones.",
        ),
    ] = None,
    mask: Annotated[
        list[str] | None,
        typer.Option(
            metavar="MASK",
            help="full, causal, documents, window:N, padding or additive; may be repeated. By "
            "default all but the first.",
        ),
    ] = None,
    dtype: Annotated[str, typer.Option(help="bf16 or fp16.")] = "bf16",
    seconds: Annotated[
        float, typer.Option(min=1, help="After how long nothing more is begun.")
    ] = 60,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object and nothing else.")
    ] = False,
) -> None:
    """Examine whether attention is sound on this machine; exit code 1 if something is broken."""
    from guardbit.doctor import text
    from guardbit.doctor.inputs import parse_shape, parse_window
    from guardbit.doctor.preflight import COMMON, COMMON_MASKS, Examiner, this_machine

    machine = this_machine()
    with user_errors(ValueError):
        shapes = [parse_shape(part) for part in shape or COMMON[machine.device]]
        for name in mask or ():
            parse_window(name)
        examiner = Examiner(machine.device, seconds, all_units=shape is not None)
        result = examiner.shapes(shapes, mask or COMMON_MASKS, dtype)
    if as_json:
        typer.echo(json.dumps({"machine": asdict(machine), **result.as_json()}))
    else:
        for lines in (text.describe_machine(machine), text.table(result), text.explain(result)):
            for line in lines:
                typer.echo(printable(line))
    if result.is_broken:
        raise typer.Exit(1)
