"""Reads a run's telemetry."""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

from guardbit.records import RunEnd
from guardbit.store.bounds import (
    MAX_EVENT,
    MAX_JSON,
    check_file,
    checked_event,
    checked_session,
    compute,
    good_rows,
    warn_of_rows,
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
    existing,
    list_run,
    unread,
)

Part = TypeVar("Part")

#: Columns of batches: names are dictionary-encoded, so that a batch holds each of them once.
BATCHES = pa.schema(
    (name, pa.dictionary(pa.int32(), pa.string()) if kind == pa.string() else kind)
    for name, kind in zip(SCHEMA.names, SCHEMA.types, strict=True)
)
#: How often a reader tries again when the merge of a live writer has removed a file.
_READ_ATTEMPTS = 10
#: Rows read at a time.
_BATCH = 1 << 16


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
        table = pa.Table.from_pandas(read_csv(path), SCHEMA, preserve_index=False)
        good = good_rows(table)
        warn_of_rows(len(table) - len(good), len(table), path)
        return _tidy(good)
    batches = _read_segments(path, "samples", sample_batches)
    return _tidy(pa.Table.from_batches(batches, BATCHES).cast(SCHEMA))


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
        rows = _read_segments(path, "events", _load_events)
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
    return end_of(list_run(path)) if path.is_dir() else None


def end_of(listing: Listing) -> RunEnd | None:
    """How the newest session of a folder says that it ended."""
    return _load_session(max(listing.sessions.items(), default=(None, None))[1])["end"]


def clock_of(listing: Listing) -> list[tuple[int, float]]:
    """When the steps were that a folder's sessions have recorded and that still count."""
    ticks: dict[int, float] = {}
    for key, last_step in last_steps(listing):
        for step, seconds in _load_session(listing.sessions.get(key))["clock"]:
            if step <= last_step:
                ticks[step] = seconds
    return sorted(ticks.items())


def _load_session(path: Path | None) -> dict[str, Any]:
    """Reads a session's file; where it is broken or missing, it hides no steps."""
    try:
        if path is not None:
            check_file(path, MAX_JSON)
            return checked_session(json.loads(path.read_bytes()))
    except UNREADABLE as error:
        warnings.warn(
            f"left out the session file {path}, which cannot be read: {error!r}", stacklevel=3
        )
    return {"start_step": None, "metadata": {}, "end": None, "clock": []}


def last_steps(listing: Listing) -> list[tuple[SessionKey, float]]:
    """The sessions that recorded something, oldest first, each with its last valid step."""
    recorded = sorted({key for sessions in listing.segments.values() for key in sessions})
    found: list[tuple[SessionKey, float]] = []
    last_step = float("inf")
    for key in reversed(recorded):
        found.append((key, last_step))
        start_step = _load_session(listing.sessions.get(key))["start_step"]
        if start_step is not None:
            last_step = min(last_step, start_step)
    return found[::-1]


def _read_segments(
    folder: Path, kind: str, load: Callable[[Path, float], Iterable[Part]]
) -> list[Part]:
    """Reads all segments of a kind in the order of writing, each up to its last valid step."""
    loaded: dict[tuple[Path, float], list[Part]] = {}
    broken: set[Path] = set()

    def load_all(segments: Iterable[Segment], last_step: float) -> list[Part]:
        whole = [segment for segment in segments if segment.path not in broken]
        paths = [segment.path for segment in unread(whole)]
        for path in paths:
            try:
                if (path, last_step) not in loaded:
                    loaded[path, last_step] = list(load(path, last_step))
            except FileNotFoundError:
                raise
            except UNREADABLE as error:
                broken.add(path)
                warn_of_segment(path, error)
                return load_all(whole, last_step)  # those that it covers may be there still
        return [part for path in paths for part in loaded[path, last_step]]

    for attempt in range(_READ_ATTEMPTS):
        listing = list_run(folder)
        try:
            parts = [
                part
                for key, last_step in last_steps(listing)
                for part in load_all(listing.segments[kind].get(key, []), last_step)
            ]
        except FileNotFoundError:
            if attempt == _READ_ATTEMPTS - 1:
                raise
            continue
        if broken and not loaded:
            named = f"the {len(broken)} segments of {kind} in {folder}"
            raise ValueError(f"none of {named} can be read")
        return parts
    raise AssertionError("the last attempt returns or raises")


def warn_of_segment(path: Path, error: Exception) -> None:
    """Warns that a segment is left out."""
    warnings.warn(f"left out the segment {path}, which cannot be read: {error}", stacklevel=5)


def sample_batches(path: Path, last_step: float) -> Iterator[pa.RecordBatch]:
    """Yields the samples of a segment that are within the bounds, up to a step."""
    check_file(path)
    read, left_out = 0, 0
    with pq.ParquetFile(path, read_dictionary=["site", "indicator"]) as file:
        check_columns(file.schema_arrow.names, path)
        for batch in file.iter_batches(_BATCH, columns=COLUMNS):
            good = good_rows(batch.select(COLUMNS).cast(BATCHES))
            read, left_out = read + len(batch), left_out + len(batch) - len(good)
            yield good.filter(compute.less_equal(good["step"], last_step))
    warn_of_rows(left_out, read, path)


def _load_events(path: Path, last_step: float) -> list[dict[str, Any]]:
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
    return [event for event in events if event["step"] <= last_step]


def _tidy(table: pa.Table) -> pd.DataFrame:
    """Drops heads that were not measured, keeps the last of equal keys, and sorts."""
    frame = table.to_pandas()
    measured = frame["value"].notna() | (frame["site"] == "")
    frame = frame.loc[measured].drop_duplicates(subset=KEY, keep="last")
    return frame.sort_values(KEY, ignore_index=True)
