"""Bounds on what a run's files may hold: a reader leaves out what exceeds them, and says so.

The files of a run may be broken, or somebody else's. Without bounds, one flipped bit in the number
of a head would ask for gigabytes, and a reader would wait for ever for a pipe in place of a file.
"""

from __future__ import annotations

import os
import stat
import warnings
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import pyarrow as pa
import pyarrow.compute

from guardbit.records import RUN_ENDS, RunEnd
from guardbit.store.files import EVENT_COLUMNS

#: The last step there can be: whole numbers up to here are exact in JSON and in a browser.
MAX_STEP = 2**53
#: Most layers of a model and heads of a layer, eight times those of the largest models published
#: (126 layers of 128 heads). Layers and heads count from 0.
MAX_LAYERS = MAX_HEADS = 1024
#: Most bytes of a file of JSON, of one event in it, and of an unpacked CSV.
MAX_JSON, MAX_EVENT, MAX_CSV = 256 << 20, 1 << 20, 8 << 30
#: Most levels of a run's metadata; GuardBit's own has four.
MAX_DEPTH = 32

#: Why rows are left out.
OUT_OF_BOUNDS = (
    f"steps count from 0 to {MAX_STEP}, layers from 0 to {MAX_LAYERS - 1} and heads from 0 to "
    f"{MAX_HEADS - 1}"
)

#: `pyarrow.compute`, whose functions are made at import, where type checkers do not see them.
compute: Any = pyarrow.compute
Rows = TypeVar("Rows", pa.Table, pa.RecordBatch)


def check_file(path: Path, most: int | None = None) -> None:
    """Raises if a file cannot be read to its end."""
    status = os.stat(path)
    if not stat.S_ISREG(status.st_mode):
        raise ValueError("it is no regular file")
    if most is not None and status.st_size > most:
        raise ValueError(f"it is larger than {most >> 20} MiB")


def good_rows(rows: Rows) -> Rows:
    """The rows of samples that are within the bounds; those of the whole run have no head."""
    rows.validate(full=True)

    def from_0(name: str, most: int) -> Any:
        column = rows[name]
        return compute.and_(compute.greater_equal(column, 0), compute.less_equal(column, most))

    of_head = compute.and_(from_0("layer", MAX_LAYERS - 1), from_0("head", MAX_HEADS - 1))
    of_run = compute.equal(rows["site"], "")
    good = compute.and_(from_0("step", MAX_STEP), compute.or_(of_head, of_run))
    return rows.filter(compute.and_(good, compute.is_valid(rows["indicator"])))


def warn_of_rows(left_out: int, rows: int, path: Path) -> None:
    """Warns that rows are left out, if any are."""
    if left_out:
        warnings.warn(
            f"left out {left_out:,} of {rows:,} rows of {path}: {OUT_OF_BOUNDS}", stacklevel=3
        )


def checked_event(event: Any) -> dict[str, Any]:
    """Returns one event with its step as an int and its heads as a tuple of ints."""
    if not isinstance(event, dict):
        raise ValueError(f"an event must be a JSON object, got {str(event)[:40]!r}")
    missing = [name for name in EVENT_COLUMNS if name not in event]
    if missing:
        raise ValueError(f"an event lacks {', '.join(missing)}")
    try:
        step, heads = int(event["step"]), tuple(map(int, event["heads"]))
    except (TypeError, ValueError, OverflowError) as error:
        raise ValueError(f"an event's step and heads must be whole numbers: {error}") from error
    if not 0 <= step <= MAX_STEP or any(not 0 <= head < MAX_HEADS for head in heads):
        raise ValueError(f"an event's step or heads are out of bounds: {OUT_OF_BOUNDS}")
    checked: dict[str, Any] = {"step": step, "heads": heads}
    for name in EVENT_COLUMNS:
        if name in checked:
            continue
        if not isinstance(event[name], str):
            raise ValueError(f"an event's {name} must be text, got {str(event[name])[:40]!r}")
        # A lone surrogate cannot be written to any file.
        checked[name] = event[name].encode(errors="replace").decode()
    return checked


class Session(NamedTuple):
    """What a session's file holds; a session that goes on, or was killed, has no end."""

    start_step: int | None
    metadata: dict[str, Any]
    end: RunEnd | None


def checked_session(session: Any) -> Session:
    """Returns the content of a session's file, checked."""
    if not isinstance(session, dict) or not isinstance(session.get("metadata"), dict):
        raise ValueError("a session must have metadata")
    start = session.get("start_step")
    if not isinstance(start, int) or not -1 <= start <= MAX_STEP:
        raise ValueError(f"a session's start_step must be a whole number from -1, got {start!r}")
    if _depth(session["metadata"]) > MAX_DEPTH:
        raise ValueError(f"a session's metadata has more than {MAX_DEPTH} levels")
    end = session.get("end")
    return Session(start, session["metadata"], end if end in RUN_ENDS else None)


def _depth(value: Any) -> int:
    """Levels of what JSON holds; a plain value has none."""
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return 1 + max(map(_depth, parts)) if parts else 0
