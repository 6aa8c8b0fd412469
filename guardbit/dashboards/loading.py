"""`guardbit.load`: a run as an object, for reports, commands and notebooks."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import pandas as pd

from guardbit.dashboards import marks, ranking
from guardbit.dashboards.palette import OUTCOME_COLOURS
from guardbit.judgement import Ended, Judgement
from guardbit.store import (
    folder_of_run,
    is_run,
    place_of_run,
    read_end,
    read_events,
    read_metadata,
    read_run,
)

if TYPE_CHECKING:
    from matplotlib.figure import Figure

#: The file in a run's folder in which `guardbit diagnose` keeps its answer.
DIAGNOSIS = Path("diagnosis", "diagnosis.json")


class Diagnosed(NamedTuple):
    """What a run's folder holds to explain why heads diverge."""

    snapshots: int = 0  # number of steps with a snapshot of heads
    heads: Sequence[Mapping[str, Any]] = ()  # what was found of each head that was diagnosed


_NOTHING = Diagnosed()


def read_diagnosed(folder: Path) -> Diagnosed:
    """Reads a `Diagnosed` from a run's folder; an answer that cannot be read counts as none."""
    try:
        heads = json.loads((folder / DIAGNOSIS).read_text(encoding="utf-8"))["heads"]
        complete = [one for one in heads if {"site", "head", "answer", "left", "steps"} <= {*one}]
    except (OSError, ValueError, TypeError, KeyError):
        complete = []
    return Diagnosed(len(list(folder.glob("snapshot-*.pt"))), complete)


def load(path: str | os.PathLike[str]) -> LoadedRun:
    """Reads a run, for a look at it in a notebook.

        run = guardbit.load("lightning_logs/version_0")
        run                     # the judgement in a sentence
        run.plot.heads()        # what happened
        run.plot.map(step=6750)
        run.summary()           # the heads to watch, as a table

    Args:
        path: As in `guardbit.read_run`. What recorded no events, such as a CSV, has no alarms:
            `guardbit replay` finds those that the run would have had.

    Raises:
        FileNotFoundError: There is nothing at `path`.
        ValueError: What is there is no run, or holds no samples yet.
    """
    frame = read_run(path)
    if frame.empty:
        raise ValueError(f"the run at {path} holds no samples yet")
    return LoadedRun(
        place_of_run(Path(path)).name,
        frame,
        read_events(path),
        read_metadata(path),
        read_end(path) or ("not closed" if is_run(folder_of_run(path)) else None),
        read_diagnosed(folder_of_run(path)),
    )


@dataclass(eq=False, repr=False)
class LoadedRun:
    """A run that was read.

    Attributes:
        name: What it is called.
        samples: As `guardbit.read_run` returns them.
        events: As `guardbit.read_events` returns them.
        metadata: As `guardbit.read_metadata` returns it.
        ended: How it ended; None where that is not known, as of a CSV.
        diagnosed: What is known of why heads diverge.
    """

    name: str
    samples: pd.DataFrame
    events: pd.DataFrame | None = None
    metadata: Mapping[str, Any] = field(default_factory=dict)
    ended: Ended | None = None
    diagnosed: Diagnosed = _NOTHING

    @property
    def plot(self) -> Plots:
        """Its figures."""
        return Plots(self)

    @cached_property
    def judgement(self) -> Judgement:
        """What became of the run, what moved its heads, and what to do."""
        return marks.judgement_of(self.samples, self.events, self.metadata, self.ended)

    def summary(self, count: int = 10) -> pd.DataFrame:
        """The `count` heads to watch, worst first, with their latest values."""
        return ranking.heads_to_watch(self.samples, self.events, count)

    def __repr__(self) -> str:
        return f"{self.name}: {self.judgement.headline}"

    def _repr_html_(self) -> str:
        colour = OUTCOME_COLOURS[self.judgement.state]
        parts = escape(" · ".join(self.judgement.facts))
        return (
            f'<div><b style="color:{colour}">●</b> <b>{escape(self.judgement.headline)}</b><br>'
            f"<small>{escape(self.name)}{' · ' if parts else ''}{parts}</small></div>"
        )


class Plots:
    """The figures of a run; a notebook shows what a method returns."""

    def __init__(self, run: LoadedRun) -> None:
        self._run = run

    def heads(self) -> Figure | None:
        """Loss, and below it norm and logits of the worst heads; None without norms and logits."""
        from guardbit.dashboards import figures

        return figures.story(self._run.samples, self._run.events, self._run.judgement)

    def map(self, step: int | None = None) -> Figure | None:
        """The model map after a step; by default after the first alarm, or at the run's end."""
        from guardbit.dashboards import figures

        run = self._run
        if step is None:
            step = marks.first_step(run.samples, run.events, "alarm")
        return figures.model_map(run.samples, run.events, step)
