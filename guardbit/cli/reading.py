"""What several commands need: errors as sentences, and runs as they are read."""

from __future__ import annotations

import contextlib
import dataclasses
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from guardbit.records import Event, event_of, printable

if TYPE_CHECKING:
    import pandas as pd

    from guardbit.dashboards.loading import LoadedRun
    from guardbit.monitor.replay import Replay

#: What the metadata of a report say about events that were not recorded.
REPLAYED = "found in the samples by `guardbit replay`; the run itself recorded none"


@contextlib.contextmanager
def refusing(*errors: type[Exception]) -> Iterator[None]:
    """Turns the user's errors into a sentence and exit code 2, and warnings into sentences."""
    said: set[str] = set()

    def say_once(message: Warning | str, *_: object, **__: object) -> None:
        if str(message) not in said:
            said.add(str(message))
            typer.echo(f"guardbit: {printable(str(message))}", err=True)

    with warnings.catch_warnings():
        warnings.simplefilter("always", UserWarning)
        warnings.showwarning = say_once
        try:
            yield
        except errors as error:
            typer.echo(f"guardbit: {printable(str(error))}", err=True)
            raise typer.Exit(2) from None


def load_judged(path: Path) -> LoadedRun:
    """Reads a run; of data from elsewhere the detectors find the events that it would have had."""
    from guardbit.dashboards.loading import load
    from guardbit.store import folder_of_run, is_run

    run = load(path)
    if is_run(folder_of_run(path)):
        return run
    from guardbit.monitor.replay import replay as replay_frame

    events = events_of_replay(replay_frame(run.samples))
    return dataclasses.replace(run, events=events, metadata={"events": REPLAYED})


def events_of_replay(result: Replay) -> pd.DataFrame:
    """What a replay has found, as the events that a run would have recorded."""
    import pandas as pd

    events = [event_of(alarm) for alarm in result.alarms]
    names = [field.name for field in dataclasses.fields(Event)]
    return pd.DataFrame([dataclasses.asdict(event) for event in events], columns=names)
