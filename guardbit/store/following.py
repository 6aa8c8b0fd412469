"""Follows a run while it is written; each look reads only what is new."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from guardbit.records import RunEnd
from guardbit.store.bounds import check_file
from guardbit.store.files import (
    UNREADABLE,
    Listing,
    Segment,
    SessionKey,
    folder_of_run,
    list_folder,
    unread,
)
from guardbit.store.reading import clock_of, end_of, last_steps, sample_batches, warn_of_segment


class RunFollower:
    """Reads the samples of a run's folder as they come, in bounded memory.

    A segment that was merged from segments already read is skipped; one that was merged from read
    and new ones is handed over whole.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = Path(folder)
        #: Time of the newest file of the run, in seconds since 1970; None while there is none.
        self.last_written: float | None = None
        #: How the run ended, as `guardbit.store.read_end` returns it.
        self.end: RunEnd | None = None
        #: The times that are known of steps, in seconds since 1970.
        self.clock: list[tuple[int, float]] = []
        #: Bytes of the segments that the last look found, and how many of these bytes are read.
        self.bytes_found, self.bytes_read = 0, 0
        self._listing = Listing({}, {"samples": {}, "events": {}})
        self._last_steps: list[tuple[SessionKey, float]] = []
        self._next_flush: dict[SessionKey, int] = {}
        self._broken: set[Path] = set()

    def look(self) -> bool:
        """Looks at what the folder holds now; returns whether its samples are to be read anew."""
        self.folder = folder_of_run(self.folder)
        try:
            self._listing = list_folder(self.folder)
        except (FileNotFoundError, NotADirectoryError):
            self._listing = Listing({}, {"samples": {}, "events": {}})
        paths = [segment.path for kind in ("samples", "events") for segment in self._segments(kind)]
        times = [_stat(path)[1] for path in [*paths, *self._listing.sessions.values()]]
        self.last_written = max(times, default=None)
        self.end = end_of(self._listing)
        self.clock = clock_of(self._listing)
        before, self._last_steps = self._last_steps, last_steps(self._listing)
        # A new session hides nothing if the earlier ones still count up to the same steps.
        starts_over = bool(before) and self._last_steps[: len(before)] != before
        if starts_over:
            self._next_flush.clear()
        return starts_over

    @property
    def num_sessions(self) -> int:
        """How many writers have begun: what describes the run changes with each."""
        return len(self._listing.sessions)

    def last_step(self) -> int:
        """The last step of the newest segment of samples, -1 where it is unknown."""
        newest = max(self._segments("samples"), key=_age, default=None)
        if newest is None:
            return -1
        try:
            check_file(newest.path)
            found = pq.read_metadata(newest.path)
            place = found.schema.names.index("step")
            groups = [found.row_group(number) for number in range(found.num_row_groups)]
            known = [group.column(place).statistics for group in groups]
            return max((int(one.max) for one in known if one and one.has_min_max), default=-1)
        except UNREADABLE:
            return -1

    def event_files(self) -> tuple[str, ...]:
        """Names of the events' segments, which change when events come."""
        return tuple(segment.path.name for segment in self._segments("events"))

    def batches(self) -> Iterator[pa.RecordBatch]:
        """Yields the new samples in the order they were written, columns as in the store."""
        plan = [
            (key, last_step, segment)
            for key, last_step in self._last_steps
            for segment in self._unread(key)
        ]
        sizes = {segment.path: _stat(segment.path)[0] for _, _, segment in plan}
        self.bytes_found, self.bytes_read = sum(sizes.values()), 0
        for key, last_step, segment in plan:
            try:
                yield from sample_batches(segment.path, last_step)
                self._next_flush[key] = segment.last + 1
            except FileNotFoundError:
                return  # a live writer has merged it meanwhile; the next look finds the merged one
            except UNREADABLE as error:
                self._broken.add(segment.path)
                warn_of_segment(segment.path, error)
            self.bytes_read += sizes[segment.path]

    def _segments(self, kind: str) -> list[Segment]:
        return [segment for found in self._listing.segments[kind].values() for segment in found]

    def _unread(self, key: SessionKey) -> Iterator[Segment]:
        segments = self._listing.segments["samples"].get(key, [])
        whole = [segment for segment in segments if segment.path not in self._broken]
        return unread(whole, self._next_flush.get(key, 0))


def _age(segment: Segment) -> tuple[str, int]:
    """Sorts the segments of all sessions as they were written: names count up."""
    return segment.path.name.split("-")[1], segment.last


def _stat(path: Path) -> tuple[int, float]:
    """Size and time of a file; those of one that is gone are 0."""
    try:
        status = path.stat()
    except OSError:
        return 0, 0.0
    return status.st_size, status.st_mtime
