"""A run in a notebook: `guardbit.load(run)`."""

from __future__ import annotations

import os
from functools import cached_property
from html import escape
from pathlib import Path
from typing import Any

import pandas as pd
from matplotlib.figure import Figure

from guardbit.dashboards import figures, marks, ranking
from guardbit.dashboards.names import place_of_run
from guardbit.dashboards.outcome import Outcome, facts, headline, outcome_of
from guardbit.dashboards.palette import OUTCOME_COLOURS
from guardbit.records import RunEnd
from guardbit.store import read_end, read_events, read_metadata, read_run


def load(path: str | os.PathLike[str]) -> LoadedRun:
    """Reads a run, to be looked at in a notebook.

        run = guardbit.load("lightning_logs/version_0")
        run                     # the outcome in a sentence
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
    name = place_of_run(Path(path)).name
    return LoadedRun(name, frame, read_events(path), read_metadata(path), read_end(path))


class LoadedRun:
    """A run that was read.

    Attributes:
        name: What it is called.
        samples: As `guardbit.read_run` returns them.
        events: As `guardbit.read_events` returns them.
        metadata: As `guardbit.read_metadata` returns it.
        end: How it ended: "finished", "interrupted" or "crashed"; None where that is not known.
        plot: Its figures.
    """

    def __init__(
        self,
        name: str,
        samples: pd.DataFrame,
        events: pd.DataFrame,
        metadata: dict[str, Any],
        end: RunEnd | None = None,
    ) -> None:
        self.name = name
        self.samples = samples
        self.events = events
        self.metadata = metadata
        self.end: RunEnd | None = end
        self.plot = Plots(self)

    @cached_property
    def outcome(self) -> Outcome:
        """What became of the run."""
        return outcome_of(self.samples, self.events, self.metadata, self.end)

    def summary(self, count: int = 10) -> pd.DataFrame:
        """The heads to watch, worst first, with their latest values.

        Args:
            count: Rows at most.
        """
        return ranking.heads_to_watch(self.samples, self.events, count)

    def __repr__(self) -> str:
        return f"{self.name}: {headline(self.outcome)}"

    def _repr_html_(self) -> str:
        colour = OUTCOME_COLOURS[self.outcome.kind]
        parts = escape(" · ".join(facts(self.outcome)))
        return (
            f'<div><b style="color:{colour}">●</b> <b>{escape(headline(self.outcome))}</b><br>'
            f"<small>{escape(self.name)}{' · ' if parts else ''}{parts}</small></div>"
        )


class Plots:
    """The figures of a run; a notebook shows what a method returns."""

    def __init__(self, run: LoadedRun) -> None:
        self._run = run

    def heads(self) -> Figure | None:
        """Loss, and below it norm and logits of the worst heads; None without any of both."""
        return figures.story(self._run.samples, self._run.events, self._run.outcome)

    def map(self, step: int | None = None) -> Figure | None:
        """The model map; None where nothing was recorded that it could draw.

        Args:
            step: What was known after this step; None for the first alarm, or, without any, for
                the end of the run.
        """
        run = self._run
        if step is None:
            step = marks.first_step(run.samples, run.events, "alarm")
        return figures.model_map(run.samples, run.events, step)
