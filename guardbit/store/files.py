"""The files of a run's folder: their names and columns, how they are found and written."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import BinaryIO, NamedTuple

import pyarrow as pa

from guardbit.records import Event

SCHEMA = pa.schema(
    [
        ("step", pa.int64()),
        ("site", pa.string()),
        ("layer", pa.int64()),
        ("head", pa.int64()),
        ("indicator", pa.string()),
        ("value", pa.float64()),
    ]
)
COLUMNS: list[str] = SCHEMA.names
KEY = ["step", "layer", "site", "indicator", "head"]
EVENT_COLUMNS = [field.name for field in dataclasses.fields(Event)]

#: Name of a run's folder in the log directory of the run.
RUN_FOLDER = "guardbit"
#: The start step of a session that continues no earlier one, so that none of their steps count.
NO_PAST = -1

#: Errors that reading a broken file raises.
UNREADABLE = (OSError, ValueError, OverflowError, RecursionError, MemoryError, pa.ArrowException)

#: Seconds without a write after which a half-written file counts as abandoned.
_ABANDONED = 600.0

#: How deep runs are searched below a folder, how many are listed, and how many an error names.
_DEEPEST_RUN, _MOST_RUNS, _NAMED_RUNS = 4, 1000, 5

#: Names that Lightning's loggers give to a folder of any run.
_NUMBERED = re.compile(r"(version_\d+|lightning_logs)(/|$)")
_SEGMENT_NAME = re.compile(
    r"(?P<kind>samples|events)-(?P<number>\d{4,9})-(?P<token>[0-9a-f]{8})"
    r"-(?P<first>\d{8,12})-(?P<last>\d{8,12})\.(parquet|jsonl)"
)
_SESSION_NAME = re.compile(r"session-(?P<number>\d{4,9})-(?P<token>[0-9a-f]{8})\.json")


class SessionKey(NamedTuple):
    """Orders the writers of a folder; the token distinguishes two that opened it at once."""

    number: int
    token: str

    def __str__(self) -> str:
        return f"{self.number:04d}-{self.token}"


class Segment(NamedTuple):
    """A file with what the flushes `first` to `last` of one session wrote."""

    path: Path
    first: int
    last: int

    @property
    def width(self) -> int:
        """Number of flushes it covers."""
        return self.last - self.first + 1


@dataclasses.dataclass
class Listing:
    """What a folder holds of a run at one moment."""

    sessions: dict[SessionKey, Path]
    segments: dict[str, dict[SessionKey, list[Segment]]]


def list_folder(folder: Path) -> Listing:
    """Lists the files of a run in a folder; skips others."""
    listing = Listing({}, {"samples": {}, "events": {}})
    for name in sorted(os.listdir(folder)):
        if match := _SEGMENT_NAME.fullmatch(name):
            key = SessionKey(int(match["number"]), match["token"])
            segment = Segment(folder / name, int(match["first"]), int(match["last"]))
            listing.segments[match["kind"]].setdefault(key, []).append(segment)
        elif match := _SESSION_NAME.fullmatch(name):
            listing.sessions[SessionKey(int(match["number"]), match["token"])] = folder / name
    return listing


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


def place_of_run(path: Path) -> Path:
    """Returns the folder that a run is named after: the log directory that holds its `guardbit`."""
    path = Path(os.path.realpath(path))  # unlike `Path.resolve`, it takes a loop of links
    return path.parent if path.name == RUN_FOLDER and path.parent.name else path


def stem_of_run(path: Path) -> str:
    """The name of a run's folder or CSV."""
    return path.name.removesuffix(".gz").removesuffix(".csv")


def names_of_runs(paths: Sequence[Path]) -> list[str]:
    """A name for each run, with as many parent folders as tell them apart from all others."""
    places = [place_of_run(path) for path in paths]
    for path, place in zip(paths, places, strict=True):
        if places.count(place) > 1:
            raise ValueError(f"{path} is given twice, and runs are compared with others only")
    names = [stem_of_run(place) for place in places]
    folders = [place.parent for place in places]
    while any(folder.name for folder in folders) and (
        len(set(names)) < len(names) or any(map(_NUMBERED.match, names))
    ):
        names = [f"{folder.name}/{name}" for folder, name in zip(folders, names, strict=True)]
        folders = [folder.parent for folder in folders]
    return names


def runs_below(folder: str | os.PathLike[str]) -> list[Path]:
    """Returns the runs below a folder, by name, each as the folder that it is named after."""
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
    """Returns the file, or the folder of the run, at a path; raises where there is neither."""
    path = Path(path)
    if not path.exists():
        raise FileNotFoundError(f"there is no run at {path}: nothing has that name")
    if not (path.is_file() or path.is_dir()):
        raise ValueError(f"there is no run at {path}: it is neither a file nor a folder")
    folder = folder_of_run(path)
    if path.is_dir() and not is_run(folder):
        state = "holds no GuardBit run" if any(path.iterdir()) else "is empty"
        runs = [str(run.relative_to(path)) for run in runs_below(path)]
        if runs:
            shown = ", ".join(runs[:_NAMED_RUNS])
            more = f" and {len(runs) - _NAMED_RUNS} more" if len(runs) > _NAMED_RUNS else ""
            state = f"is none itself, but holds {shown}{more}"
        raise ValueError(f"there is no run at {path}: the folder {state}")
    return folder


def sweep(folder: Path) -> None:
    """Removes half-written files of writers that were killed."""
    for path in folder.glob(".*.partial"):
        name = path.name.removeprefix(".").removesuffix(".partial")
        if _SEGMENT_NAME.fullmatch(name) or _SESSION_NAME.fullmatch(name):
            with contextlib.suppress(OSError):
                if time.time() - path.lstat().st_mtime > _ABANDONED:
                    path.unlink()


#: What is written to a file, or what writes it.
Content = bytes | Callable[[BinaryIO], None]


def publish(path: Path, content: Content) -> None:
    """Makes a complete file appear under its name, or nothing at all."""
    temporary = path.with_name(f".{path.name}.partial")
    try:
        with open(temporary, "wb") as stream:
            if isinstance(content, bytes):
                stream.write(content)
            else:
                content(stream)
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise
    # The name itself survives a power cut only once the folder is synced. Some file systems, and
    # Windows, refuse to sync a folder; the promise about a killed process holds without it.
    with contextlib.suppress(OSError):
        descriptor = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def check_columns(names: Iterable[str], required: Sequence[str], what: object) -> None:
    """Raises ValueError if a table lacks a column."""
    names = list(names)
    missing = [name for name in required if name not in names]
    if missing:
        raise ValueError(
            f"{what} lacks the columns {', '.join(missing)}: it needs {', '.join(required)}, and "
            f"has {', '.join(map(str, names)) or 'none'}"
        )
