"""Writes a run's telemetry."""

import contextlib
import dataclasses
import json
import os
import shutil
import uuid
import warnings
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, Self

import pyarrow as pa
import pyarrow.parquet as pq

from guardbit.records import Event, ModuleRow, RunEnd, Sample
from guardbit.store import files
from guardbit.store.files import Segment, SessionKey

_PARQUET: dict[str, Any] = {
    "compression": "zstd",
    "use_dictionary": [*files.KEY, *files.MODULES.names[1:-2]],
}

#: This many neighbouring segments of one width become one segment, so n flushes leave at most
#: (_FAN_OUT - 1) * log(n, _FAN_OUT) + 1 of them.
_FAN_OUT = 8
#: Rows that a merge holds in memory at once.
_ROW_GROUP = 1 << 16


def _merge_rows(schema: pa.Schema, sources: Sequence[Path], stream: BinaryIO) -> None:
    with pq.ParquetWriter(stream, schema, **_PARQUET) as writer:
        held: list[pa.RecordBatch] = []
        for source in sources:
            with open(source, "rb") as opened, pq.ParquetFile(opened) as file:
                for batch in file.iter_batches(batch_size=_ROW_GROUP, columns=schema.names):
                    held.append(batch)
                    if sum(map(len, held)) >= _ROW_GROUP:
                        writer.write_table(pa.Table.from_batches(held))
                        held.clear()
        if held:
            writer.write_table(pa.Table.from_batches(held))


def _merge_events(sources: Sequence[Path], stream: BinaryIO) -> None:
    for source in sources:
        with open(source, "rb") as lines:
            shutil.copyfileobj(lines, stream)


#: Kind of segments -> how their files end, and what merges them.
_KINDS = {kind: (".parquet", partial(_merge_rows, of)) for kind, of in files.TABLES.items()}
_KINDS |= {"events": (".jsonl", _merge_events)}


class _SegmentSeries:
    """The segments of one kind that one session writes, oldest first."""

    def __init__(self, folder: Path, kind: str, session: SessionKey) -> None:
        self._folder, self._kind, self._session = folder, kind, session
        self._suffix, self._merge = _KINDS[kind]
        self._segments: list[Segment] = []
        self._flushes = 0

    def _segment(self, first: int, last: int) -> Segment:
        name = f"{self._kind}-{self._session}-{first:08d}-{last:08d}{self._suffix}"
        return Segment(self._folder / name, self._kind, self._session, first, last)

    def append(self, content: files.Content) -> None:
        segment = self._segment(self._flushes, self._flushes)
        files.publish(segment.path, content)
        self._segments.append(segment)
        self._flushes += 1

    def compact(self) -> None:
        """Merges the newest segments for as long as `_FAN_OUT` of them have the same width."""
        while len(self._segments) >= _FAN_OUT:
            newest = self._segments[-_FAN_OUT:]
            if len({segment.last - segment.first for segment in newest}) > 1:
                break
            self.merge(_FAN_OUT)

    def merge(self, count: int | None = None) -> None:
        """Merges the `count` newest segments into one, by default all."""
        covered = self._segments[-count:] if count else list(self._segments)
        if len(covered) < 2:
            return
        merged = self._segment(covered[0].first, covered[-1].last)
        sources = [segment.path for segment in covered]
        try:
            files.publish(merged.path, lambda stream: self._merge(sources, stream))
        except files.UNREADABLE as error:
            # Merging is housekeeping: the segments are safe without it.
            warnings.warn(
                f"telemetry segments stay unmerged in {merged.path}: {error}", stacklevel=2
            )
            self._segments.clear()
            return
        self._segments[-len(covered) :] = [merged]
        for source in sources:
            with contextlib.suppress(OSError):
                os.unlink(source)


class RunWriter:
    """Writes one session of a run (`guardbit.store`); rank 0 in general, and one process at most.

    A kill loses the rows that were not flushed yet, and nothing else. Keys of earlier sessions'
    JSON-able `metadata` stay unless they are given again.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        metadata: Mapping[str, Any] | None = None,
        start_step: int | None = None,  # of the checkpoint that the run continues from
    ) -> None:
        if start_step is not None and start_step < 0:
            raise ValueError(f"start_step is {start_step}; it must be at least 0")
        folder = Path(path)
        if folder.exists() and not folder.is_dir():
            raise ValueError(f"{folder} is a file; it must be a folder to write a run to")
        folder.mkdir(parents=True, exist_ok=True)
        number = 1 + max((key.number for key in files.list_folder(folder).sessions), default=0)
        self._folder, self._session = folder, SessionKey(number, uuid.uuid4().hex[:8])
        session = self._session
        self._session_path = folder / f"session-{session}.json"
        # -1: it continues no earlier session, so their steps do not count.
        self._start_step = -1 if start_step is None else start_step
        self._metadata: dict[str, Any] = {}
        self._rows: dict[str, list[Sequence[Any]]] = {kind: [] for kind in files.TABLES}
        self._closed = False
        self._series = {kind: _SegmentSeries(folder, kind, session) for kind in _KINDS}
        self.update_metadata(metadata or {})

    def __enter__(self) -> Self:
        return self

    def __exit__(self, error: type[BaseException] | None, *_: object) -> None:
        self.close("finished" if error is None else "crashed")

    def is_hidden(self) -> bool:
        """Whether another writer has opened the folder since, and hides what this one writes."""
        return any(session > self._session for session in files.list_folder(self._folder).sessions)

    def update_metadata(self, metadata: Mapping[str, Any]) -> None:
        """Adds to the run's metadata, or replaces values under the same keys; on disk at once."""
        self._check_open()
        updated = {**self._metadata, **_encodable(dict(metadata))}
        self._write_session(updated)
        self._metadata = updated

    def _write_session(self, metadata: Mapping[str, Any], end: RunEnd | None = None) -> None:
        session: dict[str, Any] = {"start_step": self._start_step, "metadata": metadata}
        if end is not None:
            session["end"] = end
        try:
            content = json.dumps(session, indent=2)
        except (TypeError, ValueError) as error:
            raise TypeError(f"metadata of a run must be JSON-able: {error}") from error
        files.publish(self._session_path, content.encode())

    def add(self, samples: Iterable[Sample]) -> None:
        self._check_open()
        for sample in samples:
            named = dataclasses.replace(sample, site=_encodable(sample.site))
            self._rows["samples"] += named.rows()

    def add_modules(self, rows: Iterable[ModuleRow]) -> None:
        self._check_open()
        self._rows["modules"] += map(_encodable, rows)

    def event(self, event: Event) -> None:
        """Writes an event; it is on disk when this returns."""
        self._check_open()
        line = json.dumps(_encodable(dataclasses.asdict(event)), ensure_ascii=False) + "\n"
        self._series["events"].append(line.encode())
        self._series["events"].compact()

    def flush(self) -> None:
        """Writes the rows held in memory, which stay there if that fails."""
        self._check_open()
        for kind, rows in self._rows.items():
            if rows:
                columns = zip(*rows, strict=True)
                schema = files.TABLES[kind]
                arrays = [pa.array(c, t) for c, t in zip(columns, schema.types, strict=True)]
                table = pa.Table.from_arrays(arrays, schema=schema)
                self._series[kind].append(partial(pq.write_table, table, **_PARQUET))
                rows.clear()
            self._series[kind].compact()

    def close(self, end: RunEnd = "finished") -> None:
        """Flushes, merges this session's segments into one file a kind, and notes how it ended."""
        if self._closed:
            return
        self.flush()
        for series in self._series.values():
            series.merge()
        self._write_session(self._metadata, end)
        self._closed = True

    def _check_open(self) -> None:
        if self._closed:
            raise ValueError(f"the run's writer is closed: {self._session_path}")


def _encodable(value: Any) -> Any:
    """Returns a value with the lone surrogates in its texts escaped."""
    if isinstance(value, str):
        return value.encode(errors="backslashreplace").decode()
    if isinstance(value, Mapping):
        return {_encodable(key): _encodable(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_encodable(item) for item in value]
    return value
