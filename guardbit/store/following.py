"""Follows the folder of a run; each look reads only what is new."""

from __future__ import annotations

import contextlib
import json
import os
import warnings
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import pyarrow as pa
import pyarrow.parquet as pq

from guardbit.records import RunEnd
from guardbit.store import files
from guardbit.store.files import Segment, Session, SessionKey

Part = TypeVar("Part")

#: Columns of batches: names are dictionary-encoded, so that a batch holds each of them once.
BATCHES = pa.schema(
    (name, pa.dictionary(pa.int32(), pa.string()) if kind == pa.string() else kind)
    for name, kind in zip(files.SCHEMA.names, files.SCHEMA.types, strict=True)
)
#: Rows read at a time.
_BATCH = 1 << 16
#: Stands for a session's file that is broken or missing: it hides no steps.
_UNKNOWN = Session(None, {}, None)


class RunFollower:
    """Reads a run's folder as it grows; what was merged from read and new segments comes whole."""

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = Path(folder)
        #: Time of the newest file of the run, in seconds since 1970; None while there is none.
        self.last_written: float | None = None
        #: The metadata of all sessions; where two give the same key, the later one's.
        self.metadata: dict[str, Any] = {}
        #: How the run ended, as `guardbit.store.read_end` returns it.
        self.end: RunEnd | None = None
        #: Bytes of the segments of samples that were new, and how many of these are read.
        self.bytes_found, self.bytes_read = 0, 0
        self.broken: set[Path] = set()
        self._listing = files.Listing()
        self._last_steps: list[tuple[SessionKey, float]] = []
        self._next_flush: dict[SessionKey, int] = {}

    def look(self) -> bool:
        """Lists what the folder holds now; returns whether all samples must be read again."""
        self.folder = files.folder_of_run(self.folder)
        try:
            self._listing = files.list_folder(self.folder)
        except (FileNotFoundError, NotADirectoryError):
            self._listing = files.Listing()
        paths = [segment.path for kind in ("samples", "events") for segment in self._segments(kind)]
        times = [_stat(path)[1] for path in [*paths, *self._listing.sessions.values()]]
        self.last_written = max(times, default=None)
        sessions = {
            key: _load_session(path) for key, path in sorted(self._listing.sessions.items())
        }
        self.metadata, self.end = {}, None
        for session in sessions.values():
            self.metadata |= session.metadata
            self.end = session.end
        before, self._last_steps = self._last_steps, self._valid_until(sessions)
        # A new session hides nothing if the earlier ones still count up to the same steps.
        starts_over = bool(before) and self._last_steps[: len(before)] != before
        if starts_over:
            self._next_flush.clear()
        return starts_over

    def last_step(self) -> int:
        """The last step of the newest segment of samples, -1 where it is unknown."""
        newest = max(self._segments("samples"), key=_age, default=None)
        if newest is None:
            return -1
        try:
            files.check_file(newest.path)
            found = pq.read_metadata(newest.path)
            place = found.schema.names.index("step")
            groups = [found.row_group(number) for number in range(found.num_row_groups)]
            known = [group.column(place).statistics for group in groups]
            return max((int(one.max) for one in known if one and one.has_min_max), default=-1)
        except files.UNREADABLE:
            return -1

    def event_files(self) -> tuple[str, ...]:
        """Names of the events' segments, which change when events come."""
        return tuple(segment.path.name for segment in self._segments("events"))

    def batches(self) -> Iterator[pa.RecordBatch]:
        """Yields the new samples in the order they were written, columns as in the store."""

        def load(path: Path, last_step: float) -> Iterator[pa.RecordBatch]:
            yield from sample_batches(path, last_step)
            self.bytes_read += _stat(path)[0]

        new = (
            segment
            for key, segments in self._listing.segments["samples"].items()
            for segment in segments
            if segment.last >= self._next_flush.get(key, 0) and segment.path not in self.broken
        )
        self.bytes_found, self.bytes_read = sum(_stat(segment.path)[0] for segment in new), 0
        # The next look finds what a live writer has merged meanwhile.
        with contextlib.suppress(FileNotFoundError):
            yield from self.read("samples", load, self._next_flush)

    def read(
        self,
        kind: str,
        load: Callable[[Path, float], Iterable[Part]],
        next_flush: dict[SessionKey, int],
    ) -> Iterator[Part]:
        """Yields what is new of a kind, of each session up to the last step that counts."""
        for key, last_step in self._last_steps:
            while segment := self._next(kind, key, next_flush.get(key, 0)):
                try:
                    yield from load(segment.path, last_step)
                    next_flush[key] = segment.last + 1
                except FileNotFoundError:
                    raise
                except files.UNREADABLE as error:
                    # The segments that it covers may still be there.
                    self.broken.add(segment.path)
                    warnings.warn(
                        f"left out the segment {segment.path}, which cannot be read: {error}",
                        stacklevel=4,
                    )

    def _next(self, kind: str, key: SessionKey, flush: int) -> Segment | None:
        """The widest readable segment that holds a session's flushes from one on."""
        ahead = [
            segment
            for segment in self._listing.segments[kind].get(key, ())
            if segment.last >= flush and segment.path not in self.broken
        ]
        first = max(min((segment.first for segment in ahead), default=0), flush)
        bringing = [segment for segment in ahead if segment.first <= first]
        return max(bringing, key=lambda segment: segment.last, default=None)

    def _segments(self, kind: str) -> list[Segment]:
        return [segment for found in self._listing.segments[kind].values() for segment in found]

    def _valid_until(self, sessions: dict[SessionKey, Session]) -> list[tuple[SessionKey, float]]:
        """The sessions that recorded something, oldest first, each with its last valid step."""
        segments = self._listing.segments.values()
        found: list[tuple[SessionKey, float]] = []
        last_step = float("inf")
        for key in sorted({key for of_kind in segments for key in of_kind}, reverse=True):
            found.append((key, last_step))
            start_step = sessions.get(key, _UNKNOWN).start_step
            if start_step is not None:
                last_step = min(last_step, start_step)
        return found[::-1]


def sample_batches(path: Path, last_step: float) -> Iterator[pa.RecordBatch]:
    """Yields the samples of a segment that are within the bounds, up to a step."""
    files.check_file(path)
    read, left_out = 0, 0
    with pq.ParquetFile(path, read_dictionary=["site", "indicator"]) as file:
        files.check_columns(file.schema_arrow.names, files.COLUMNS, path)
        for batch in file.iter_batches(_BATCH, columns=files.COLUMNS):
            good = files.good_rows(batch.select(files.COLUMNS).cast(BATCHES))
            read, left_out = read + len(batch), left_out + len(batch) - len(good)
            yield good.filter(files.compute.less_equal(good["step"], last_step))
    files.warn_of_rows(left_out, read, path)


def load_events(path: Path, last_step: float) -> list[dict[str, Any]]:
    """Reads the events of a segment that are sound, up to a step."""
    files.check_file(path, files.MAX_JSON)
    # Lines of a binary file end at "\n" only. Lines of a text file also end at characters that JSON
    # does not escape in a string, such as U+0085.
    with open(path, "rb") as file:
        lines = file.readlines()
    events: list[dict[str, Any]] = []
    first: Exception | None = None
    for line in lines:
        try:
            if len(line) > files.MAX_EVENT:
                raise ValueError(f"an event is larger than {files.MAX_EVENT >> 20} MiB")
            events.append(files.checked_event(json.loads(line)))
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


def _load_session(path: Path) -> Session:
    try:
        files.check_file(path, files.MAX_JSON)
        return files.checked_session(json.loads(path.read_bytes()))
    except files.UNREADABLE as error:
        warnings.warn(
            f"left out the session file {path}, which cannot be read: {error!r}", stacklevel=4
        )
        return _UNKNOWN


def _age(segment: Segment) -> tuple[str, int]:
    """Sorts the segments of all sessions as they were written, because names count up."""
    return segment.path.name.split("-")[1], segment.last


def _stat(path: Path) -> tuple[int, float]:
    """Size and time of a file; those of one that is gone are 0."""
    try:
        status = path.stat()
    except OSError:
        return 0, 0.0
    return status.st_size, status.st_mtime
