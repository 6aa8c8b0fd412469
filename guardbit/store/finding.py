"""Finds runs: which folder is one, and what lies below a folder."""

from __future__ import annotations

import os
from pathlib import Path

from guardbit.store.files import RUN_FOLDER, Listing, list_folder

#: Levels below a folder at which runs are looked for, how many are, and how many an error names.
_DEEPEST_RUN, _MOST_RUNS, _NAMED_RUNS = 4, 1000, 5


def is_run(path: str | os.PathLike[str]) -> bool:
    """Whether a path is the folder of a run."""
    path = Path(path)
    if not path.is_dir():
        return False
    listing = list_folder(path)
    return bool(listing.sessions) or any(listing.segments.values())


def folder_of_run(path: str | os.PathLike[str]) -> Path:
    """Returns the folder of the run: `path`, or the one in this log directory."""
    path = Path(path)
    inner = path / RUN_FOLDER
    return path if is_run(path) or not is_run(inner) else inner


def runs_below(folder: str | os.PathLike[str]) -> list[Path]:
    """The runs below a folder, each as the folder that people call it by; by name."""
    found: list[Path] = []
    for place, inner, _ in os.walk(folder):
        inner.sort()
        path = Path(place)
        depth = len(path.relative_to(folder).parts)
        if depth and is_run(folder_of_run(path)):
            found.append(path)
            inner.clear()
        elif depth >= _DEEPEST_RUN or len(found) >= _MOST_RUNS:
            inner.clear()
    return found


def existing(path: str | os.PathLike[str]) -> Path:
    """Returns what `folder_of_run` does, of a path that is there."""
    path = Path(path)
    if not path.exists():
        raise FileNotFoundError(f"there is no run at {path}: nothing has that name")
    if not (path.is_file() or path.is_dir()):
        raise ValueError(f"there is no run at {path}: it is neither a file nor a folder")
    return folder_of_run(path)


def list_run(folder: Path) -> Listing:
    """Lists the files of a run."""
    if not is_run(folder):
        state = "holds no GuardBit run" if any(folder.iterdir()) else "is empty"
        runs = [str(run.relative_to(folder)) for run in runs_below(folder)]
        if runs:
            shown = ", ".join(runs[:_NAMED_RUNS])
            more = f" and {len(runs) - _NAMED_RUNS} more" if len(runs) > _NAMED_RUNS else ""
            state = f"is none itself, but holds {shown}{more}"
        raise ValueError(f"there is no run at {folder}: the folder {state}")
    return list_folder(folder)
