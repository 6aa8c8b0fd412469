"""`guardbit.load`: a run as an object, for reports, commands and notebooks."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property, partial
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd

from guardbit.dashboards.palette import OUTCOME_COLOURS
from guardbit.dashboards.tables import Diagnosed, Recorded
from guardbit.judgement import Ended, Judgement
from guardbit.records import from_zero, nearest
from guardbit.store import files, reading

if TYPE_CHECKING:
    from matplotlib.figure import Figure

#: The file in a run's folder in which `guardbit diagnose` keeps its answer.
DIAGNOSIS = Path("diagnosis", "diagnosis.json")
# What `guardbit.dashboards.figures` exports that `Plots` has as a method, or that draws no run.
_NO_FIGURES = ("story", "model_map", "CHARTS", "runs_over_steps")


def read_diagnosed(folder: Path) -> Diagnosed:
    """Reads a `Diagnosed` from a run's folder; answers that cannot be read are left out."""
    heads: list[dict[str, Any]] = []
    try:
        with open(folder / DIAGNOSIS, "rb") as file:
            heads = files.checked_diagnosis(file.read(files.MAX_DIAGNOSIS + 1))
    except (FileNotFoundError, NotADirectoryError):
        pass
    except (*files.UNREADABLE, TypeError, KeyError, AttributeError) as error:
        warnings.warn(
            f"left out {folder / DIAGNOSIS}, which cannot be read: {error!r}", stacklevel=3
        )
    return Diagnosed(len(list(folder.glob("snapshot-*.pt"))), heads)


def read(path: str | os.PathLike[str]) -> LoadedRun:
    """Reads a run with the events that it recorded; see `guardbit.load`."""
    frame, folder = reading.read_run(path), files.folder_of_run(path)
    if frame.empty:
        raise ValueError(f"the run at {path} holds no samples yet")
    metadata = reading.read_metadata(path)
    return LoadedRun(
        str(metadata.get("name") or files.names_of_runs([Path(path)])[0]),
        frame,
        reading.read_events(path),
        metadata,
        reading.read_end(path) or ("not closed" if files.is_run(folder) else None),
        read_diagnosed(folder),
        reading.read_modules(path),
    )


@dataclass(eq=False, repr=False)
class LoadedRun:
    """A run that was read, with tables as functions of `guardbit.store` return them."""

    name: str
    samples: pd.DataFrame
    events: pd.DataFrame | None = None
    metadata: Mapping[str, Any] = field(default_factory=dict)
    ended: Ended | None = None  # None where that is not known, as of a CSV
    diagnosed: Diagnosed = field(default_factory=Diagnosed)
    modules: pd.DataFrame = field(default_factory=lambda: files.MODULES.empty_table().to_pandas())

    @property
    def plot(self) -> Plots:
        return Plots(self)

    @property
    def alarms(self) -> pd.DataFrame:
        """Its alarms: step, site, heads, rule, and why."""
        return pd.DataFrame(self.recorded.alarms, columns=["step", "site", "heads", "rule", "why"])

    @cached_property
    def recorded(self) -> Recorded:
        """What figures and reports are made from."""
        return Recorded(
            self.samples, self.events, self.metadata, self.ended, self.diagnosed, self.modules
        )

    @property
    def judgement(self) -> Judgement:
        """What became of the run, what moved its heads, and what to do."""
        return self.recorded.judgement

    def summary(self, count: int = 10) -> pd.DataFrame:
        """The `count` heads to watch, worst first, with their latest values."""
        return self.recorded.heads_to_watch(from_zero(count, "count"))

    def __repr__(self) -> str:
        return f"{self.name}: {self.judgement.headline}\n{self.judgement.verdict_and_advice}"

    def _repr_html_(self) -> str:
        judgement = self.judgement
        colour = OUTCOME_COLOURS[judgement.state]
        return (
            f'<div><b style="color:{colour}">●</b> <b>{escape(judgement.headline)}</b><br>'
            f"<small>{escape(judgement.verdict_and_advice)}<br>{escape(self.name)}</small></div>"
        )


class Plots:
    """The figures of a run; a notebook shows what a method returns.

    Besides those below, every other figure of `guardbit.dashboards.figures` is a method of its
    name, as `max_logit()`.
    """

    def __init__(self, run: LoadedRun) -> None:
        from guardbit.dashboards import figures  # here, as it loads matplotlib

        self._run, self._figures = run.recorded, figures

    def __getattr__(self, name: str) -> Callable[..., Figure | None]:
        known = [] if name.startswith("_") else dir(self)
        if name not in known:
            raise AttributeError(f"there is no figure {name!r}{nearest(name, known)}")
        return partial(getattr(self._figures, name), self._run)

    def __dir__(self) -> list[str]:
        others = (name for name in self._figures.__all__ if name not in _NO_FIGURES)
        return ["heads", "map", *others]

    def heads(self) -> Figure | None:
        """Loss, and below it norm and logits of the worst heads; None without norms and logits."""
        return self._figures.story(self._run)

    def map(self, step: int | None = None) -> Figure | None:
        """The model map after a step; by default after the first alarm, or at the run's end."""
        return self._figures.model_map(self._run, step=step)
