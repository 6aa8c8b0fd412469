"""What several commands share: users' errors as sentences, and reading a run."""

from __future__ import annotations

import contextlib
import dataclasses
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from guardbit.records import event_of, printable

if TYPE_CHECKING:
    from guardbit.dashboards.loading import LoadedRun
    from guardbit.judgement import Judgement

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


@contextlib.contextmanager
def writing_to(place: Path) -> Iterator[None]:
    """Turns an error of writing into a sentence that says what to do."""
    try:
        yield
    except OSError as error:
        raise ValueError(
            f"nothing can be written to {place} ({error.strerror or error}): give another folder"
            " by --output, or use --json, which writes nothing"
        ) from error


def json_of(judgement: Judgement, run: LoadedRun) -> dict[str, Any]:
    """What `--json` prints of a run: its judgement, and where it was resumed if it was."""
    from guardbit.store.reading import resumptions

    resumed = resumptions(run.metadata)
    return {**judgement.as_json(), **({"resumed": resumed} if resumed else {})}


def load_with_events(path: Path) -> LoadedRun:
    """Reads a run; if it recorded no events, as a CSV, the detectors find those it would have."""
    from guardbit.dashboards.loading import load
    from guardbit.store import folder_of_run, is_run

    run = load(path)
    if is_run(folder_of_run(path)):
        return run
    import pandas as pd

    from guardbit.monitor.replay import replay as replay_frame
    from guardbit.store.files import EVENT_COLUMNS

    alarms = replay_frame(run.samples).alarms
    events = pd.DataFrame([event_of(alarm) for alarm in alarms], columns=EVENT_COLUMNS)
    return dataclasses.replace(run, events=events, metadata={"events": REPLAYED})
