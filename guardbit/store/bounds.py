"""Bounds on what a run's files may hold: a reader leaves out what exceeds them, and says so.

The files of a run may be broken, or somebody else's. Without bounds, one flipped bit in the number
of a head would ask for gigabytes, and a reader would wait for ever for a pipe in place of a file.
"""

from __future__ import annotations

import math
import os
import stat
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from guardbit.records import RUN_ENDS, Event

#: The last step there can be: whole numbers up to here are exact in JSON and in a browser.
MAX_STEP = 2**53
#: Layers of a model and heads of a layer, eight times those of the largest models published (126
#: layers of 128 heads). Layers and heads count from 0.
MAX_LAYERS = MAX_HEADS = 1024
#: Bytes of a file of JSON, of one event in it, and of a CSV, unpacked.
MAX_JSON, MAX_EVENT, MAX_CSV = 256 << 20, 1 << 20, 8 << 30
#: Times of steps that a session may hold; a writer keeps some thousand.
MAX_TICKS = 100_000
#: Levels of a run's metadata; GuardBit's own has four.
MAX_DEPTH = 32

#: Why rows are left out.
OUT_OF_BOUNDS = (
    f"steps count from 0 to {MAX_STEP}, layers from 0 to {MAX_LAYERS - 1} and heads from 0 to "
    f"{MAX_HEADS - 1}"
)


def check_file(path: Path, most: int | None = None) -> None:
    """Raises if a file cannot be read to its end."""
    status = os.stat(path)
    if not stat.S_ISREG(status.st_mode):
        raise ValueError("it is no regular file")
    if most is not None and status.st_size > most:
        raise ValueError(f"it is larger than {most >> 20} MiB")


def good_rows(rows: pa.Table | pa.RecordBatch) -> npt.NDArray[np.bool_]:
    """Marks the rows of samples that are within the bounds."""
    rows.validate(full=True)
    good = np.ones(rows.num_rows, dtype=bool)
    for name in ("step", "site", "layer", "head", "indicator"):
        if rows[name].null_count:
            good &= rows[name].is_valid().to_numpy(zero_copy_only=False)
    step, layer, head = (_numbers(rows[name]) for name in ("step", "layer", "head"))
    return good & within_bounds(step, _has_site(rows["site"]), layer, head)


def within_bounds(
    step: npt.NDArray[np.integer],
    has_site: npt.NDArray[np.bool_],
    layer: npt.NDArray[np.integer],
    head: npt.NDArray[np.integer],
) -> npt.NDArray[np.bool_]:
    """Marks the rows within the bounds; layer and head of rows of the whole run do not count."""
    known = (layer >= 0) & (layer < MAX_LAYERS) & (head >= 0) & (head < MAX_HEADS)
    return (step >= 0) & (step <= MAX_STEP) & (known | ~has_site)


def _numbers(column: pa.Array | pa.ChunkedArray) -> npt.NDArray[np.integer]:
    return (column.fill_null(-1) if column.null_count else column).to_numpy()


def _has_site(column: pa.Array | pa.ChunkedArray) -> npt.NDArray[np.bool_]:
    if isinstance(column, pa.DictionaryArray) and not column.null_count:
        # A name stands once in the dictionary, and millions of times in the column.
        named = np.array([site.as_py() != "" for site in column.dictionary], dtype=bool)
        return named[column.indices.to_numpy()]
    return np.array([site != "" for site in column.to_pylist()], dtype=bool)


def checked_event(event: Any) -> dict[str, Any]:
    """Returns one event with its step as an int and its heads as a tuple of ints."""
    if not isinstance(event, dict):
        raise ValueError(f"an event must be a JSON object, got {str(event)[:40]!r}")
    names = list(Event.__dataclass_fields__)
    missing = [name for name in names if name not in event]
    if missing:
        raise ValueError(f"an event lacks {', '.join(missing)}")
    try:
        step, heads = int(event["step"]), tuple(map(int, event["heads"]))
    except (TypeError, ValueError, OverflowError) as error:
        raise ValueError(f"an event's step and heads must be whole numbers: {error}") from error
    if not 0 <= step <= MAX_STEP or any(not 0 <= head < MAX_HEADS for head in heads):
        raise ValueError(f"an event's step or heads are out of bounds: {OUT_OF_BOUNDS}")
    texts = {name: event[name] for name in names if name not in ("step", "heads")}
    for name, text in texts.items():
        if not isinstance(text, str):
            raise ValueError(f"an event's {name} must be text, got {str(text)[:40]!r}")
    # A lone surrogate cannot be written to any file.
    texts = {name: text.encode(errors="replace").decode() for name, text in texts.items()}
    return {**texts, "step": step, "heads": heads}


def checked_session(session: Any) -> dict[str, Any]:
    """Returns the content of a session's file, checked."""
    if not isinstance(session, dict) or not isinstance(session.get("metadata"), dict):
        raise ValueError("a session must have metadata")
    start = session.get("start_step")
    if not isinstance(start, int) or not -1 <= start <= MAX_STEP:
        raise ValueError(f"a session's start_step must be a whole number from -1, got {start!r}")
    end = session.get("end")  # a session that goes on, or was killed, has none
    level: list[Any] = [session["metadata"]]
    for _ in range(MAX_DEPTH):
        level = [part for value in level for part in _parts(value)]
        if not level:
            return {
                "start_step": start,
                "metadata": session["metadata"],
                "end": end if end in RUN_ENDS else None,
                "clock": _checked_clock(session.get("clock")),
            }
    raise ValueError(f"a session's metadata has more than {MAX_DEPTH} levels")


def _checked_clock(clock: Any) -> list[tuple[int, float]]:
    """The times of steps, ascending; none where they are not what a writer writes."""
    if not isinstance(clock, list) or len(clock) > MAX_TICKS:
        return []
    try:
        ticks = [(int(step), float(seconds)) for step, seconds in clock]
    except (TypeError, ValueError, OverflowError):
        return []
    steps = [step for step, _ in ticks]
    is_sound = steps == sorted(set(steps)) and all(0 <= step <= MAX_STEP for step in steps)
    return ticks if is_sound and all(map(math.isfinite, (s for _, s in ticks))) else []


def _parts(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return list(value.values())
    return value if isinstance(value, list) else []
