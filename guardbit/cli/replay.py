"""`guardbit replay`: the detectors over recorded telemetry again."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from guardbit.cli.common import json_of, user_errors
from guardbit.records import printable

if TYPE_CHECKING:
    from guardbit.judgement import Judgement
    from guardbit.monitor.detectors import Rule
    from guardbit.monitor.replay import Replay
    from guardbit.records import Alarm


def replay(
    path: Annotated[
        Path, typer.Argument(metavar="RUN", help="Folder of a run, or a CSV of its samples.")
    ],
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object and nothing else.")
    ] = False,
    threshold: Annotated[
        list[str] | None,
        typer.Option(
            metavar="RULE.NAME=NUMBER",
            help="A rule's threshold, such as head_growth.norm=0.5; may be repeated.",
        ),
    ] = None,
) -> None:
    """Run the detectors over recorded telemetry again, with the same or other thresholds."""
    from guardbit.dashboards.loading import load
    from guardbit.dashboards.marks import events_of
    from guardbit.monitor.replay import normalised_sites
    from guardbit.monitor.replay import replay as replay_frame

    with user_errors(OSError, ValueError):
        rules = _with_thresholds(threshold or ())
        run = load(path)
        result = replay_frame(run.samples, rules, normalised_sites(run.metadata))
        # By the alarms of the replay, and by what the run recorded of switches, and before them.
        first, _ = result.evidence.steps or (0, 0)
        kept = [
            event
            for event in events_of(run.events)
            if event.kind == "switch" or (event.kind == "alarm" and event.step < first)
        ]
        judgement = result.judgement(kept, run.metadata, run.ended)
    if as_json:
        names = ("step", "site", "heads", "rule", "severity")
        alarms = [{name: getattr(alarm, name) for name in names} for alarm in result.alarms]
        typer.echo(json.dumps({"alarms": alarms, **json_of(judgement, run)}))
        return

    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console()
    if result.alarms:
        table = Table("first step", "module", "heads", "rule", "alarms", box=None, pad_edge=False)
        by_rule: dict[tuple[str, str], list[Alarm]] = {}
        for alarm in result.alarms:
            by_rule.setdefault((alarm.site, alarm.rule), []).append(alarm)
        for (site, rule), alarms in by_rule.items():
            heads = sorted({head for alarm in alarms for head in alarm.heads})
            table.add_row(
                f"{alarms[0].step:,}",
                Text(printable(site) or "whole run"),
                ", ".join(map(str, heads)),
                rule,
                str(len(alarms)),
            )
        console.print(table)
    for line in _lines(judgement, result):
        console.print(printable(line), markup=False, highlight=False, soft_wrap=True)


def _lines(judgement: Judgement, result: Replay) -> Iterator[str]:
    """The headline, the verdict on alarms, what to do, and which rules could not judge."""
    yield judgement.headline
    if judgement.num_alarms:  # else the headline says what is to be said: it may be a warning
        yield f"Verdict by today's rules: {judgement.verdict}: {judgement.why}"
    yield judgement.advice
    yield judgement.risk.sentence
    for rule, names in result.unjudged.items():
        yield f"Not judged by {rule}: the telemetry lacks {', '.join(names)}"
    begins, first_alarm = judgement.first_step, judgement.first_alarm
    if begins is not None and first_alarm is not None and first_alarm < begins:
        yield (
            f"The samples begin at step {begins:,}. The run's own alarms before it are counted, and"
            " could not be replayed."
        )


def _with_thresholds(thresholds: Sequence[str]) -> tuple[Rule, ...]:
    """Returns the rules with thresholds replaced, each given as "rule.name=number"."""
    from guardbit.monitor.detectors import DEFAULT_RULES

    by_name: dict[str, Any] = {rule.name: rule for rule in DEFAULT_RULES}
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
