"""Names of runs, short but different."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from guardbit.store import RUN_FOLDER

#: Characters of all names together: one line below a figure's title.
MOST_CHARACTERS = 80


def place_of_run(path: Path) -> Path:
    """The folder that a run is called by: the log directory in which the run's own folder is."""
    path = Path(os.path.realpath(path))  # unlike `Path.resolve`, it takes a loop of links
    return path.parent if path.name == RUN_FOLDER and path.parent.name else path


def distinguished(names: Sequence[str]) -> list[str]:
    """Names without the parts that all have in common, if together they are too long."""
    if sum(map(len, names)) <= MOST_CHARACTERS:
        return list(names)
    shared = set.intersection(*(set(name.split("-")) for name in names))
    short = ["-".join(part for part in name.split("-") if part not in shared) for name in names]
    return short if all(short) and len(set(short)) == len(names) else list(names)


def fitted(names: Sequence[str]) -> list[str]:
    """Distinguished names, with as many characters of each as there is room for."""
    names = distinguished(names)
    most = max(map(len, names))
    while most > 3 and sum(min(len(name), most) for name in names) > MOST_CHARACTERS:
        most -= 1
    # Cut in the middle, as names of related runs differ at their ends.
    kept = (most - 1) // 2
    return [name if len(name) <= most else f"{name[:kept]}…{name[-kept:]}" for name in names]
