"""The files of a run's folder: their names and columns, how they are found, written and checked.

The files may be broken, or somebody else's, so a reader leaves out what exceeds bounds, and says
so. Without them, one flipped bit in the number of a head would ask for gigabytes.
"""

import contextlib
import dataclasses
import json
import os
import re
import warnings
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, TypeVar

import pyarrow as pa
import pyarrow.compute

from guardbit.records import RUN_ENDS, Event, ModuleRow, RunEnd

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
_NAMES = [(name, pa.string()) for name in ModuleRow._fields[1:-2]]
MODULES = pa.schema([SCHEMA.field("step"), *_NAMES, SCHEMA.field("value"), ("limit", pa.float64())])
#: Kind of segments -> the columns of its tables.
TABLES = {"samples": SCHEMA, "modules": MODULES}
COLUMNS: list[str] = SCHEMA.names
KEY = ["step", "layer", "site", "indicator", "head"]
EVENT_COLUMNS = [field.name for field in dataclasses.fields(Event)]

#: Name of a run's folder in the log directory of the run.
RUN_FOLDER = "guardbit"

#: Errors that reading a broken file raises.
UNREADABLE = (OSError, ValueError, OverflowError, RecursionError, MemoryError, pa.ArrowException)

#: The last step there can be: whole numbers up to here are exact in JSON and in a browser.
MAX_STEP = 2**53
#: Most layers of a model and heads of a layer, eight times the largest published model (126 layers
#: of 128 heads). Layers and heads count from 0.
MAX_LAYERS = MAX_HEADS = 1024
#: Most bytes of an event, of an unpacked CSV, and of what `guardbit diagnose` keeps.
MAX_EVENT = 1 << 20
MAX_CSV = 8 << 30
MAX_DIAGNOSIS = 64 << 20
#: From this number of rows on a segment needs a byte for every ROWS_PER_BYTE. Values, which are
#: measured, take eight bytes each before they are packed, and several after.
MANY_ROWS = 1_000_000
ROWS_PER_BYTE = 4

OUT_OF_BOUNDS = (
    f"steps count from 0 to {MAX_STEP}, layers from 0 to {MAX_LAYERS - 1} and heads from 0 to "
    f"{MAX_HEADS - 1}"
)

_DEEPEST_RUN = 4  # folders below a folder that runs are searched in
_MOST_RUNS = 1000
_NAMED_RUNS = 5  # in an error

#: Names that Lightning's loggers give to a folder of any run.
_NUMBERED = re.compile(r"(version_\d+|lightning_logs)(/|$)")
_SEGMENT_NAME = re.compile(
    r"(?P<kind>samples|modules|events)-(?P<number>\d{4,9})-(?P<token>[0-9a-f]{8})"
    r"-(?P<first>\d{8,12})-(?P<last>\d{8,12})\.(parquet|jsonl)"
)
_SESSION_NAME = re.compile(r"session-(?P<number>\d{4,9})-(?P<token>[0-9a-f]{8})\.json")

#: `pyarrow.compute`, whose functions are made at import, where type checkers do not see them.
compute: Any = pyarrow.compute
Rows = TypeVar("Rows", pa.Table, pa.RecordBatch)


class SessionKey(NamedTuple):
    """Orders the writers of a folder; the token distinguishes two that opened it at once."""

    number: int
    token: str

    def __str__(self) -> str:
        return f"{self.number:04d}-{self.token}"


class Segment(NamedTuple):
    """A file with what the flushes `first` to `last` of one session wrote."""

    path: Path
    kind: str  # samples, modules or events
    session: SessionKey
    first: int
    last: int


class Listing(NamedTuple):
    """What a folder holds of a run at one moment."""

    sessions: dict[SessionKey, Path]
    segments: list[Segment]


def list_folder(folder: Path) -> Listing:
    """Lists the files of a run in a folder, if there is one; skips others, such as pipes."""
    listing = Listing({}, [])
    entries = os.scandir(folder) if folder.is_dir() else ()
    for name in sorted(entry.name for entry in entries if entry.is_file()):
        match = _SEGMENT_NAME.fullmatch(name) or _SESSION_NAME.fullmatch(name)
        if match is None:
            continue
        path, session = folder / name, SessionKey(int(match["number"]), match["token"])
        if match.re is _SESSION_NAME:
            listing.sessions[session] = path
        else:
            flushes = int(match["first"]), int(match["last"])
            listing.segments.append(Segment(path, match["kind"], session, *flushes))
    return listing


def is_run(path: str | os.PathLike[str]) -> bool:
    """Whether a path is the folder of a run."""
    return any(list_folder(Path(path)))


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
        is_found = False
        with contextlib.suppress(PermissionError):  # another person's
            is_found = depth > 0 and is_run(folder_of_run(path))
        if is_found:
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
    if path.is_file() and not path.name.endswith((".csv", ".csv.gz")):
        raise ValueError(f"{path} is a file; it must be the folder of a run, a .csv or a .csv.gz")
    folder = folder_of_run(path)
    if path.is_dir() and not is_run(folder):
        state = "holds no GuardBit run" if any(path.iterdir()) else "is empty"
        runs = [str(run.relative_to(path)) for run in runs_below(path)]
        if runs:
            shown = ", ".join(runs[:_NAMED_RUNS])
            more = f" and {len(runs) - _NAMED_RUNS} more" if len(runs) > _NAMED_RUNS else ""
            state = f"holds {shown}{more}: name one of them"
        raise ValueError(f"there is no run at {path}: the folder {state}")
    return folder


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
    names = list(names)
    missing = [name for name in required if name not in names]
    if missing:
        raise ValueError(
            f"{what} lacks the columns {', '.join(missing)}: it needs {', '.join(required)}, and "
            f"has {', '.join(map(str, names)) or 'none'}"
        )


def good_rows(rows: Rows) -> Rows:
    """The rows that are within the bounds; samples of the whole run have no head."""
    rows.validate(full=True)

    def from_0(name: str, most: int) -> Any:
        column = rows[name]
        return compute.and_(compute.greater_equal(column, 0), compute.less_equal(column, most))

    good = from_0("step", MAX_STEP)
    if "head" in rows.schema.names:
        of_head = compute.and_(from_0("layer", MAX_LAYERS - 1), from_0("head", MAX_HEADS - 1))
        good = compute.and_(good, compute.or_(of_head, compute.equal(rows["site"], "")))
    for name in rows.schema.names[:-1]:
        good = compute.and_(good, compute.is_valid(rows[name]))
    return rows.filter(good)


def checked_diagnosis(text: bytes) -> list[dict[str, Any]]:
    """Returns the answers that `guardbit diagnose` has kept of single heads."""
    if len(text) > MAX_DIAGNOSIS:
        raise ValueError(f"it is larger than {MAX_DIAGNOSIS >> 20} MiB")
    heads = json.loads(text)["heads"]
    for one in heads:
        lists = (one["answer"], str), (one["steps"], int)
        is_right = isinstance(one["site"], str) and isinstance(one["head"], int) and one["steps"]
        for values, kind in lists:
            is_right = is_right and isinstance(values, list)
            is_right = is_right and all(isinstance(value, kind) for value in values)
        if not is_right:
            raise ValueError(f"it holds {one!r}"[:200])
    return heads


def warn_of_rows(left_out: int, rows: int, path: Path) -> None:
    if left_out:
        warnings.warn(
            f"left out {left_out:,} of {rows:,} rows of {path}: {OUT_OF_BOUNDS}", stacklevel=3
        )


def checked_event(event: Any) -> dict[str, Any]:
    """Returns one event with its step as an int and its heads as a tuple of ints."""
    if not isinstance(event, dict):
        raise ValueError(f"an event is {str(event)[:40]!r}; it must be a JSON object")
    missing = [name for name in EVENT_COLUMNS if name not in event]
    if missing:
        raise ValueError(f"an event lacks {', '.join(missing)}")
    try:
        step, heads = int(event["step"]), tuple(map(int, event["heads"]))
    except (TypeError, ValueError, OverflowError) as error:
        raise ValueError(f"an event's step and heads must be whole numbers: {error}") from error
    if not 0 <= step <= MAX_STEP or any(not 0 <= head < MAX_HEADS for head in heads):
        raise ValueError(f"an event's step or heads are out of bounds: {OUT_OF_BOUNDS}")
    texts = {name: event[name] for name in EVENT_COLUMNS if name not in ("step", "heads")}
    for name, text in texts.items():
        if not isinstance(text, str):
            raise ValueError(f"an event's {name} is {str(text)[:40]!r}; it must be text")
        # A lone surrogate cannot be written to any file.
        texts[name] = text.encode(errors="replace").decode()
    return {"step": step, "heads": heads, **texts}


class Session(NamedTuple):
    """What a session's file holds; a session that goes on, or was killed, has no end."""

    start_step: int | None
    metadata: dict[str, Any]
    end: RunEnd | None


def checked_session(session: Any) -> Session:
    if not isinstance(session, dict) or not isinstance(session.get("metadata"), dict):
        raise ValueError("a session must have metadata")
    start = session.get("start_step")
    if not isinstance(start, int) or not -1 <= start <= MAX_STEP:
        raise ValueError(f"start_step is {start!r}; it must be a whole number, at least -1")
    end = session.get("end")
    return Session(start, session["metadata"], end if end in RUN_ENDS else None)
