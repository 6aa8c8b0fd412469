"""Reads a run's telemetry."""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pandas as pd
import pyarrow.parquet as pq

from guardbit.records import RunEnd
from guardbit.store.bounds import (
    MAX_EVENT,
    MAX_JSON,
    OUT_OF_BOUNDS,
    check_file,
    checked_event,
    checked_session,
    good_rows,
    within_bounds,
)
from guardbit.store.csv_file import read_csv
from guardbit.store.files import (
    COLUMNS,
    EVENT_COLUMNS,
    KEY,
    SCHEMA,
    UNREADABLE,
    Listing,
    Segment,
    SessionKey,
    check_columns,
)
from guardbit.store.finding import existing, list_run

Part = TypeVar("Part")

#: How often a reader tries again when the merge of a live writer has removed a file.
_READ_ATTEMPTS = 10


def read_run(path: str | os.PathLike[str]) -> pd.DataFrame:
    """Reads the samples of a run, also while it is being written.

    >>> import tempfile
    >>> from guardbit.records import Sample
    >>> from guardbit.store import RunWriter
    >>> folder = tempfile.TemporaryDirectory()
    >>> with RunWriter(folder.name) as writer:
    ...     writer.add([Sample(10, "h.0.attn", 0, "max_logit", (3.5, 4.0))])
    >>> read_run(folder.name)[["step", "site", "head", "value"]]
       step      site  head  value
    0    10  h.0.attn     0    3.5
    1    10  h.0.attn     1    4.0
    >>> folder.cleanup()

    Args:
        path: Folder of a run, or the log directory that holds it as `guardbit`; or a CSV file
            (`.csv`, `.csv.gz`) with the columns below, other columns are ignored.

    Returns:
        One row a measured value, with the columns step (int64), site (str; "" for the whole run),
        layer (int64; -1 for the whole run), head (int64; -1 for the whole run), indicator (str)
        and value (float64; infinities stand for themselves), sorted by step, layer, site, indicator
        and head. A run with no sample yet gives no row. Indicators this version does not know are
        kept.

    Raises:
        FileNotFoundError: There is nothing at `path`.
        ValueError: What is there is no run and no CSV of these columns, or no segment of the run
            can be read.

    Warns:
        UserWarning: A segment cannot be read (cut short, say), rows are beyond the bounds of
            `guardbit.store.bounds`, or the last line of a CSV is cut short; they are left out.
    """
    path = existing(path)
    if path.is_file():
        return _tidy(_bounded(read_csv(path), path))
    parts = [
        part.loc[part["step"] <= last_step]
        for part, last_step in _read_segments(path, "samples", _load_samples)
    ]
    return _tidy(pd.concat(parts) if parts else SCHEMA.empty_table().to_pandas())


def read_events(path: str | os.PathLike[str]) -> pd.DataFrame:
    """Reads the events of a run, also while it is being written.

    Args:
        path: Folder of a run; or a CSV file, which holds no events.

    Returns:
        One row an event, with the columns step (int64), kind (str), site (str), heads (tuple of
        int), why (str), rule (str) and stabilizer (str), sorted by step and, within one, in the
        order they were written.

    Raises:
        FileNotFoundError: There is nothing at `path`.
        ValueError: What is there is no run, or no segment of the run's events can be read.

    Warns:
        UserWarning: A segment cannot be read (cut short, say), or some of its events, and they
            are left out. Kinds of events this version does not know are kept.
    """
    path = existing(path)
    rows: list[dict[str, Any]] = []
    if path.is_dir():
        for events, last_step in _read_segments(path, "events", _load_events):
            rows += [event for event in events if event["step"] <= last_step]
    frame = pd.DataFrame(rows, columns=EVENT_COLUMNS).astype(
        {name: "object" if name == "heads" else "str" for name in EVENT_COLUMNS} | {"step": "int64"}
    )
    return frame.sort_values("step", kind="stable", ignore_index=True)


def read_metadata(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Reads what describes a run as a whole.

    Args:
        path: Folder of a run; or a CSV file, which has no metadata.

    Returns:
        The metadata of all its sessions; where two give the same key, the later one's.

    Raises:
        FileNotFoundError: There is nothing at `path`.
        ValueError: What is there is no run.

    Warns:
        UserWarning: A session's file cannot be read and is left out.
    """
    path = existing(path)
    metadata: dict[str, Any] = {}
    if path.is_dir():
        sessions = list_run(path).sessions
        for key in sorted(sessions):
            metadata |= _load_session(sessions[key])["metadata"]
    return metadata


def read_end(path: str | os.PathLike[str]) -> RunEnd | None:
    """Reads how a run ended."""
    path = existing(path)
    if not path.is_dir():
        return None
    return end_of(list_run(path))


def end_of(listing: Listing) -> RunEnd | None:
    """How the newest session of a folder says that it ended."""
    newest = max(listing.sessions, default=None)
    return _load_session(listing.sessions[newest])["end"] if newest else None


def read_clock(path: str | os.PathLike[str]) -> list[tuple[int, float]]:
    """Reads when a run's steps were."""
    path = existing(path)
    if not path.is_dir():
        return []
    return clock_of(list_run(path))


def clock_of(listing: Listing) -> list[tuple[int, float]]:
    """When the steps were that a folder's sessions have recorded and that still count."""
    ticks: dict[int, float] = {}
    for key, last_step in last_steps(listing):
        path = listing.sessions.get(key)
        for step, seconds in _load_session(path)["clock"] if path else ():
            if step <= last_step:
                ticks[step] = seconds
    return sorted(ticks.items())


def _load_session(path: Path) -> dict[str, Any]:
    """Reads a session's file; a broken one hides no steps and has no metadata."""
    try:
        check_file(path, MAX_JSON)
        return checked_session(json.loads(path.read_bytes()))
    except UNREADABLE as error:
        warnings.warn(
            f"left out the session file {path}, which cannot be read: {error!r}", stacklevel=3
        )
        return {"start_step": None, "metadata": {}, "end": None, "clock": []}


def last_steps(listing: Listing) -> Iterator[tuple[SessionKey, float]]:
    """Yields the sessions that recorded something, oldest first, each with its last valid step."""
    recorded = sorted({key for sessions in listing.segments.values() for key in sessions})
    last_steps: list[tuple[SessionKey, float]] = []
    last_step = float("inf")
    for key in reversed(recorded):
        last_steps.append((key, last_step))
        path = listing.sessions.get(key)
        start_step = _load_session(path)["start_step"] if path else None
        if start_step is not None:
            last_step = min(last_step, start_step)
    yield from reversed(last_steps)


def _read_segments(
    folder: Path, kind: str, load: Callable[[Path], Part]
) -> list[tuple[Part, float]]:
    """Reads all segments of a kind in the order of writing, each with its last valid step."""
    for attempt in range(_READ_ATTEMPTS):
        listing = list_run(folder)
        parts: list[tuple[Part, float]] = []
        try:
            for key, last_step in last_steps(listing):
                segments = listing.segments[kind].get(key, [])
                parts += [(part, last_step) for part in _load_uncovered(segments, load)]
        except FileNotFoundError:
            if attempt == _READ_ATTEMPTS - 1:
                raise
            continue
        listed = sum(map(len, listing.segments[kind].values()))
        if listed and not parts:
            raise ValueError(f"none of the {listed} segments of {kind} in {folder} can be read")
        return parts
    raise AssertionError("the last attempt returns or raises")


def _load_uncovered(segments: Iterable[Segment], load: Callable[[Path], Part]) -> Iterator[Part]:
    """Loads the segments of one session in order, without those that another one covers."""
    loaded: list[tuple[Segment, Part]] = []
    for segment in sorted(segments, key=lambda segment: segment.width, reverse=True):
        if any(other.first <= segment.first and segment.last <= other.last for other, _ in loaded):
            continue
        try:
            loaded.append((segment, load(segment.path)))
        except FileNotFoundError:
            raise
        except UNREADABLE as error:
            warnings.warn(
                f"left out the segment {segment.path}, which cannot be read: {error}", stacklevel=5
            )
    for _, part in sorted(loaded, key=lambda pair: pair[0].first):
        yield part


def _load_samples(path: Path) -> pd.DataFrame:
    check_file(path)
    with pq.ParquetFile(path) as file:
        check_columns(file.schema_arrow.names, path)
        table = file.read(columns=COLUMNS).cast(SCHEMA)
    good = good_rows(table)
    if not good.all():
        table = table.filter(good)
        warn_of_rows(int((~good).sum()), len(good), path)
    return table.to_pandas()


def warn_of_rows(left_out: int, rows: int, path: Path) -> None:
    """Warns that rows are left out."""
    warnings.warn(
        f"left out {left_out:,} of {rows:,} rows of {path}: {OUT_OF_BOUNDS}", stacklevel=2
    )


def _bounded(frame: pd.DataFrame, path: Path) -> pd.DataFrame:
    """Returns the samples of a file that are within the bounds."""
    step, layer, head = (frame[name].to_numpy() for name in ("step", "layer", "head"))
    good = within_bounds(step, np.asarray(frame["site"] != "", dtype=bool), layer, head)
    if good.all():
        return frame
    warn_of_rows(int((~good).sum()), len(good), path)
    return frame.loc[good]


def _load_events(path: Path) -> list[dict[str, Any]]:
    check_file(path, MAX_JSON)
    # Lines of a binary file end at "\n" only. Lines of a text file also end at characters that JSON
    # does not escape in a string, such as U+0085.
    with open(path, "rb") as file:
        lines = file.readlines()
    events: list[dict[str, Any]] = []
    first: Exception | None = None
    for line in lines:
        try:
            if len(line) > MAX_EVENT:
                raise ValueError(f"an event is larger than {MAX_EVENT >> 20} MiB")
            events.append(checked_event(json.loads(line)))
        except (ValueError, RecursionError) as error:
            first = first or error
    if first is not None and not events:
        raise ValueError(str(first)) from first
    if first is not None:
        warnings.warn(
            f"left out {len(lines) - len(events):,} of {len(lines):,} events of {path}: {first}",
            stacklevel=2,
        )
    return events


def _tidy(frame: pd.DataFrame) -> pd.DataFrame:
    """Drops heads that were not measured, keeps the last of equal keys, and sorts."""
    measured = frame["value"].notna() | (frame["site"] == "")
    frame = frame.loc[measured, COLUMNS].drop_duplicates(subset=KEY, keep="last")
    return frame.sort_values(KEY, ignore_index=True)
