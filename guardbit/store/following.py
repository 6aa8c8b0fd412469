"""Follows a run while it is written; each look reads only what is new."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from guardbit.records import RunEnd
from guardbit.store.bounds import check_file, good_rows
from guardbit.store.files import (
    COLUMNS,
    SCHEMA,
    UNREADABLE,
    Listing,
    Segment,
    SessionKey,
    list_folder,
)
from guardbit.store.finding import folder_of_run
from guardbit.store.reading import clock_of, end_of, last_steps, warn_of_rows

#: Rows handed over at a time.
_BATCH = 1 << 16
#: Names are dictionary-encoded, so that a batch holds each of them once.
_BATCHES = pa.schema(
    (
        field.name,
        pa.dictionary(pa.int32(), pa.string()) if field.type == pa.string() else field.type,
    )
    for field in SCHEMA
)


class RunFollower:
    """Reads the samples of a run's folder as they come, in bounded memory.

    A segment that was merged from segments already read is skipped, as far as its row groups allow;
    rows at the seam may be handed over twice.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = Path(folder)
        #: Time of the newest file of the run, in seconds since 1970; None while there is none.
        self.last_written: float | None = None
        #: How the run ended, as `guardbit.store.read_end` returns it.
        self.end: RunEnd | None = None
        #: When its steps were, as `guardbit.store.read_clock` returns it.
        self.clock: list[tuple[int, float]] = []
        #: Bytes of the segments that the last look found, and how many of these bytes are read.
        self.bytes_found, self.bytes_read = 0, 0
        self._listing = Listing({}, {"samples": {}, "events": {}})
        self._last_steps: list[tuple[SessionKey, float]] = []
        self._next_flush: dict[SessionKey, int] = {}
        #: Rows of a session before each of its flushes, where a segment began or ended.
        self._rows_before: dict[SessionKey, dict[int, int]] = {}
        self._broken: set[Path] = set()

    def look(self) -> bool:
        """Looks at what the folder holds now."""
        self.folder = folder_of_run(self.folder)
        self._listing = self._list()
        paths = [segment.path for segment in self._segments("samples")]
        paths += [segment.path for segment in self._segments("events")]
        times = [_modified(path) for path in [*paths, *self._listing.sessions.values()]]
        self.last_written = max(times, default=None)
        self.end = end_of(self._listing)
        self.clock = clock_of(self._listing)
        counted = list(last_steps(self._listing))
        before, self._last_steps = self._last_steps, counted
        # A new session hides nothing if the earlier ones still count up to the same steps.
        starts_over = bool(before) and counted[: len(before)] != before
        if starts_over:
            self._next_flush.clear()
            self._rows_before.clear()
        return starts_over

    @property
    def num_sessions(self) -> int:
        """How many writers have begun: what describes the run changes with each."""
        return len(self._listing.sessions)

    def last_step(self) -> int:
        """The last step of the newest segment of samples, -1 where it cannot be told."""
        for segment in sorted(self._segments("samples"), key=_age)[-1:]:
            try:
                check_file(segment.path)
                found = pq.read_metadata(segment.path)
                place = found.schema.names.index("step")
                groups = [found.row_group(number) for number in range(found.num_row_groups)]
                known = [group.column(place).statistics for group in groups]
                return max((int(one.max) for one in known if one and one.has_min_max), default=-1)
            except UNREADABLE:
                return -1
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
        sizes = {segment.path: _size(segment.path) for _, _, segment in plan}
        self.bytes_found, self.bytes_read = sum(sizes.values()), 0
        for key, last_step, segment in plan:
            try:
                yield from self._read(key, segment, last_step)
            except FileNotFoundError:
                return  # a live writer has merged it meanwhile; the next look finds the merged one
            except UNREADABLE as error:
                self._broken.add(segment.path)
                warnings.warn(
                    f"left out the segment {segment.path}, which cannot be read: {error}",
                    stacklevel=2,
                )
            self.bytes_read += sizes[segment.path]

    def _list(self) -> Listing:
        try:
            return list_folder(self.folder)
        except (FileNotFoundError, NotADirectoryError):
            return Listing({}, {"samples": {}, "events": {}})

    def _segments(self, kind: str) -> list[Segment]:
        return [segment for found in self._listing.segments[kind].values() for segment in found]

    def _unread(self, key: SessionKey) -> Iterator[Segment]:
        """Yields the segments with the next flushes of a session, the widest first."""
        segments = self._listing.segments["samples"].get(key, [])
        segments = [segment for segment in segments if segment.path not in self._broken]
        flush = self._next_flush.get(key, 0)
        while ahead := [segment for segment in segments if segment.last >= flush]:
            first = max(min(segment.first for segment in ahead), flush)
            bringing = [segment for segment in ahead if segment.first <= first]
            segment = max(bringing, key=lambda segment: segment.last)
            yield segment
            flush = segment.last + 1

    def _read(
        self, key: SessionKey, segment: Segment, last_step: float
    ) -> Iterator[pa.RecordBatch]:
        rows_before = self._rows_before.setdefault(key, {0: 0})
        flush = self._next_flush.get(key, 0)
        start = rows_before.get(segment.first)
        known = rows_before.get(flush)
        skipped = known - start if start is not None and known is not None else 0
        check_file(segment.path)
        with pq.ParquetFile(segment.path, read_dictionary=["site", "indicator"]) as file:
            groups, passed, read, left_out = [], 0, 0, 0
            for group in range(file.metadata.num_row_groups):
                passed += file.metadata.row_group(group).num_rows
                if passed > skipped:
                    groups.append(group)
            if groups:
                for rows in file.iter_batches(_BATCH, row_groups=groups, columns=COLUMNS):
                    batch = rows.cast(_BATCHES)
                    good = good_rows(batch)
                    read, left_out = read + len(good), left_out + int((~good).sum())
                    if last_step != float("inf"):
                        good &= batch["step"].fill_null(0).to_numpy() <= last_step
                    yield batch if good.all() else batch.filter(pa.array(good))
            if left_out:
                warn_of_rows(left_out, read, segment.path)
            if start is not None:
                rows_before[segment.last + 1] = start + file.metadata.num_rows
        self._next_flush[key] = segment.last + 1


def _age(segment: Segment) -> tuple[str, int]:
    """Sorts the segments of all sessions as they were written: names count up."""
    return segment.path.name.split("-")[1], segment.last


def _modified(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0
