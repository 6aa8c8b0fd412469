"""Runs' names, short enough to be told apart."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from guardbit.store import RUN_FOLDER

#: Of all names together: what stands in one line below a figure's title.
MOST_CHARACTERS = 80


def place_of_run(path: Path) -> Path:
    """Where a run lies, by which it is called: the log directory that its own folder lies in."""
    path = path.resolve()
    return path.parent if path.name == RUN_FOLDER and path.parent.name else path


def told_apart(names: Sequence[str]) -> list[str]:
    """Names without what all have in common, if together they are too long.

    Args:
        names: Each different from the others.

    Returns:
        The names, in their order; parted at dashes, and without the parts that stand in each of
        them, if so much is left of each that they still differ.
    """
    if sum(map(len, names)) <= MOST_CHARACTERS:
        return list(names)
    shared = set.intersection(*(set(name.split("-")) for name in names))
    told = ["-".join(part for part in name.split("-") if part not in shared) for name in names]
    return told if all(told) and len(set(told)) == len(names) else list(names)


def fitted(names: Sequence[str]) -> list[str]:
    """Names told apart, as many characters of each as there is room for."""
    names = told_apart(names)
    most = max(map(len, names))
    while most > 3 and sum(min(len(name), most) for name in names) > MOST_CHARACTERS:
        most -= 1
    # Cut in the middle, as names of related runs differ at their ends.
    kept = (most - 1) // 2
    return [name if len(name) <= most else f"{name[:kept]}…{name[-kept:]}" for name in names]
