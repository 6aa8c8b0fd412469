"""What several commands share: users' errors as sentences, and reading a run."""

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

#: What a report's metadata says about events that were not recorded.
REPLAYED = "found in the samples by `guardbit replay`; the run itself recorded none"


@contextlib.contextmanager
def user_errors(*errors: type[Exception]) -> Iterator[None]:
    """Prints the user's errors as a sentence, with exit code 2, and warnings as sentences."""
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


def load_with_events(path: Path) -> LoadedRun:
    """Reads a run; if it recorded no events, as a CSV, the detectors find those it would have."""
    from guardbit.dashboards.loading import load
    from guardbit.store import folder_of_run, is_run

    run = load(path)
    if is_run(folder_of_run(path)):
        return run
    from guardbit.monitor.replay import replay as replay_frame

    events = events_of_replay(replay_frame(run.samples))
    return dataclasses.replace(run, events=events, metadata={"events": REPLAYED})


def events_of_replay(result: Replay) -> pd.DataFrame:
    """Returns the alarms of a replay as the events that a run would have recorded."""
    import pandas as pd

    events = [event_of(alarm) for alarm in result.alarms]
    names = [field.name for field in dataclasses.fields(Event)]
    return pd.DataFrame([dataclasses.asdict(event) for event in events], columns=names)
