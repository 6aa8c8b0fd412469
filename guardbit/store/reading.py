"""Reads a run's telemetry: as it grows, as tables, and as samples."""

import contextlib
import gzip
import io
import json
import math
import os
import warnings
import zlib
from collections import Counter
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

from guardbit.records import RunEnd, Sample
from guardbit.store import files
from guardbit.store.files import COLUMNS, EVENT_COLUMNS, KEY, SCHEMA, Segment, Session, SessionKey

#: Kind -> columns of batches: names are dictionary-encoded, so that a batch holds each once.
_NAMES = pa.dictionary(pa.int32(), pa.string())
BATCHES = {
    kind: pa.schema((one.name, _NAMES if one.type == pa.string() else one.type) for one in schema)
    for kind, schema in files.TABLES.items()
}
_BATCH = 1 << 16  # rows
#: Stands for a session's file that is broken or missing: it hides no steps.
_UNKNOWN = Session(None, {}, None)
#: How often a reader tries when the merge of a live writer removes a file.
_READ_ATTEMPTS = 10
#: What rows of one sample have in common.
_OF_SAMPLE = ["step", "site", "layer", "indicator"]


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
        self.broken: set[Path] = set()
        self._listing = files.Listing({}, [])
        self._last_steps: list[tuple[SessionKey, float]] = []
        #: How many flushes of a kind were read of each session.
        self._flushes_read: Counter[tuple[str, SessionKey]] = Counter()

    def look(self) -> bool:
        """Lists what the folder holds now; returns whether all samples must be read again."""
        self.folder = files.folder_of_run(self.folder)
        listing = self._listing = files.list_folder(self.folder)
        paths = [*(segment.path for segment in listing.segments), *listing.sessions.values()]
        self.last_written = max(map(_time_written, paths), default=None)
        sessions = {key: _load_session(path) for key, path in sorted(listing.sessions.items())}
        self.metadata, self.end = {}, None
        for session in sessions.values():
            self.metadata |= session.metadata
            self.end = session.end
        # The sessions that recorded something, oldest first, each with its last valid step.
        before, self._last_steps, last_step = self._last_steps, [], math.inf
        for key in sorted({segment.session for segment in listing.segments}, reverse=True):
            self._last_steps.insert(0, (key, last_step))
            start_step = sessions.get(key, _UNKNOWN).start_step
            last_step = last_step if start_step is None else min(last_step, start_step)
        # A new session hides nothing if the earlier ones still count up to the same steps.
        starts_over = bool(before) and self._last_steps[: len(before)] != before
        if starts_over:
            self._flushes_read.clear()
        return starts_over

    def event_files(self) -> tuple[str, ...]:
        return tuple(segment.path.name for segment in self._of("events"))

    def batches(self, kind: str = "samples") -> Iterator[pa.RecordBatch]:
        """Yields new rows of a kind in the order they were written, columns as in the store."""
        # The next look finds what a live writer has merged meanwhile.
        with contextlib.suppress(FileNotFoundError):
            yield from self.read(kind)

    def read(self, kind: str) -> Iterator[Any]:
        """Yields what is new of a kind, of each session up to the last step that counts."""
        load = _load_events if kind == "events" else partial(_load_rows, kind)
        for key, last_step in self._last_steps:
            while segment := self._next(kind, key):
                try:
                    yield from load(segment.path, last_step)
                    self._flushes_read[kind, key] = segment.last + 1
                except FileNotFoundError:
                    raise
                except files.UNREADABLE as error:
                    # The segments that it covers may still be there.
                    self.broken.add(segment.path)
                    warnings.warn(
                        f"left out the segment {segment.path}, which cannot be read: {error}",
                        stacklevel=4,
                    )

    def _of(self, kind: str) -> list[Segment]:
        segments = self._listing.segments
        return [one for one in segments if one.kind == kind and one.path not in self.broken]

    def _next(self, kind: str, key: SessionKey) -> Segment | None:
        """The widest readable segment that holds what comes next of a session."""
        flush = self._flushes_read[kind, key]
        ahead = [one for one in self._of(kind) if one.session == key and one.last >= flush]
        first = max(min((segment.first for segment in ahead), default=0), flush)
        bringing = [segment for segment in ahead if segment.first <= first]
        return max(bringing, key=lambda segment: segment.last, default=None)


def _load_rows(kind: str, path: Path, last_step: float) -> Iterator[pa.RecordBatch]:
    """Yields the rows of a segment that are within the bounds, up to a step."""
    read, left_out, columns = 0, 0, files.TABLES[kind].names
    # Opened here, as pyarrow takes a path like `gpt:small/...` for an address.
    with open(path, "rb") as source:
        files.check_columns(pq.read_schema(source).names, columns, path)
        file = pq.ParquetFile(source, read_dictionary=columns)
        rows, size = file.metadata.num_rows, os.fstat(source.fileno()).st_size
        if rows > max(files.MANY_ROWS, files.ROWS_PER_BYTE * size):
            raise ValueError(
                f"it unpacks {size:,} bytes to {rows:,} rows, which no run has written"
            )
        for batch in file.iter_batches(_BATCH, columns=columns):
            good = files.good_rows(batch.select(columns).cast(BATCHES[kind]))
            read, left_out = read + len(batch), left_out + len(batch) - len(good)
            yield good.filter(files.compute.less_equal(good["step"], last_step))
    files.warn_of_rows(left_out, read, path)


def _load_events(path: Path, last_step: float) -> list[dict[str, Any]]:
    """Reads the events of a segment that are sound, up to a step."""
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
        return files.checked_session(json.loads(path.read_bytes()))
    except files.UNREADABLE as error:
        warnings.warn(
            f"left out the session file {path}, which cannot be read: {error!r}", stacklevel=4
        )
        return _UNKNOWN


def _time_written(path: Path) -> float:
    with contextlib.suppress(OSError):
        return path.stat().st_mtime
    return 0.0


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
            `guardbit.store.files`, or the last line of a CSV is cut short; they are left out.
    """
    path = files.existing(path)
    if path.is_file():
        table = pa.Table.from_pandas(_read_csv(path), SCHEMA, preserve_index=False)
        good = files.good_rows(table)
        files.warn_of_rows(len(table) - len(good), len(table), path)
        return _sorted_frame(good)
    return _sorted_frame(_read_table(path, "samples"))


def read_modules(path: str | os.PathLike[str]) -> pd.DataFrame:
    """Reads what audits of a run's modules found; see `read_run` for errors and warnings.

    Args:
        path: Folder of a run; or a CSV file, which holds no modules.

    Returns:
        One row a number, with the columns of `guardbit.records.ModuleRow`, sorted by step and,
        within one, in the order they were written; of rows that differ in value, the last.
    """
    path = files.existing(path)
    table = _read_table(path, "modules") if path.is_dir() else files.MODULES.empty_table()
    frame = table.to_pandas().drop_duplicates(files.MODULES.names[:-2], keep="last")
    return frame.sort_values("step", kind="stable", ignore_index=True)


def read_events(path: str | os.PathLike[str]) -> pd.DataFrame:
    """Reads the events of a run, also while it is being written; see `read_run` for errors.

    Args:
        path: Folder of a run; or a CSV file, which holds no events.

    Returns:
        One row an event, with the columns step (int64), kind, site, heads (tuple of int), why,
        rule, stabilizer, verdict and judges (str; see `guardbit.records.Event`), sorted by step
        and, within one, in the order they were written. Unknown kinds are kept.
    """
    path = files.existing(path)
    rows = _read_all(path, "events") if path.is_dir() else []
    frame = pd.DataFrame(rows, columns=EVENT_COLUMNS).astype(
        {name: "object" if name == "heads" else "str" for name in EVENT_COLUMNS} | {"step": "int64"}
    )
    return frame.sort_values("step", kind="stable", ignore_index=True)


def read_metadata(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Reads what describes a run as a whole; see `read_run` for errors and warnings.

    Args:
        path: Folder of a run; or a CSV file, which has no metadata.

    Returns:
        The metadata of all its sessions; where two give the same key, the later one's.
    """
    return _looked_at(path).metadata


def resumptions(metadata: Mapping[str, Any]) -> list[int]:
    """The first steps of a run's processes that went on from a checkpoint, oldest first."""
    steps = metadata.get("resumed")
    return [one for one in steps if isinstance(one, int)] if isinstance(steps, list) else []


def read_end(path: str | os.PathLike[str]) -> RunEnd | None:
    """Reads how a run ended; None if it goes on, was killed, or is a CSV file."""
    return _looked_at(path).end


def _looked_at(path: str | os.PathLike[str]) -> RunFollower:
    follower = RunFollower(files.existing(path))
    follower.look()
    return follower


def _read_all(folder: Path, kind: str, attempts: int = _READ_ATTEMPTS) -> list[Any]:
    """Reads all segments of a kind; tries again if a live writer merged some meanwhile."""
    follower = RunFollower(folder)
    follower.look()
    try:
        parts = list(follower.read(kind))
    except FileNotFoundError:
        if attempts == 1:
            raise
        return _read_all(folder, kind, attempts - 1)
    if follower.broken and not follower._flushes_read:
        named = f"the {len(follower.broken)} segments of {kind} in {folder}"
        raise ValueError(f"none of {named} can be read")
    return parts


def _read_table(folder: Path, kind: str) -> pa.Table:
    return pa.Table.from_batches(_read_all(folder, kind), BATCHES[kind]).cast(files.TABLES[kind])


def _sorted_frame(table: pa.Table) -> pd.DataFrame:
    """Drops heads that were not measured, keeps the last of equal keys, and sorts."""
    frame = table.to_pandas()
    measured = frame["value"].notna() | (frame["site"] == "")
    frame = frame.loc[measured].drop_duplicates(subset=KEY, keep="last")
    return frame.sort_values(KEY, ignore_index=True)


def _read_csv(path: Path) -> pd.DataFrame:
    """Reads a CSV file of samples, also one that is being written."""
    try:
        with gzip.open(path) if path.name.endswith(".gz") else open(path, "rb") as file:
            text = file.read(files.MAX_CSV + 1)
        if len(text) > files.MAX_CSV:
            raise ValueError(f"it is larger than {files.MAX_CSV >> 30} GiB")
        whole, newline, last = text.rpartition(b"\n")
        if newline and last and last.count(b",") < text.partition(b"\n")[0].count(b","):
            # Its writer was killed, or is still writing it.
            text, line = whole + newline, whole.count(newline) + 2
            warnings.warn(
                f"left out line {line} of {path}, the last one, which is cut short", stacklevel=3
            )
        # A site may be called "NA" or "null", so only values can be missing.
        table = pd.read_csv(
            io.BytesIO(text),
            keep_default_na=False,
            na_values={"value": ["", "nan", "NaN"]},
            dtype={"site": "str", "indicator": "str", "value": "float64"},
        )
    except (OSError, EOFError, ValueError, zlib.error) as error:
        raise ValueError(f"cannot read a run from {path}: {str(error).strip()}") from error
    files.check_columns(table.columns, COLUMNS, path)
    table = table.loc[:, COLUMNS]
    for name in ("step", "layer", "head"):
        numbers = pd.Series(pd.to_numeric(table[name], errors="coerce"))
        broken = numbers.mod(1).ne(0) | numbers.abs().ge(2**63)
        if broken.any():
            raise ValueError(
                f"cannot read a run from {path}: {name} must be a whole number in every row, "
                f"row {broken.argmax() + 1} below the header has {table[name][broken].iloc[0]!s}"
            )
        table[name] = numbers.astype("int64")
    sites = table.loc[table["site"] != "", ["layer", "site"]].drop_duplicates()
    shared = sites[sites["layer"].duplicated(keep=False)].sort_values("layer", kind="stable")
    if len(shared):
        (layer, one), (_, other) = shared[:2].itertuples(index=False, name=None)
        raise ValueError(
            f"cannot read a run from {path}: the sites '{one}' and '{other}' both have layer"
            f" {layer}; give each site a layer of its own"
        )
    return table


def samples_of(frame: pd.DataFrame) -> Iterator[Sample]:
    """Yields the rows of a tidy frame as samples, one for each step, site and indicator."""
    if frame.empty:
        return
    named = {name: frame[name].astype(object).fillna("") for name in ("site", "indicator")}
    frame = frame.assign(**named)
    is_module = frame["site"] != ""
    group = frame.groupby(_OF_SAMPLE).ngroup().to_numpy()
    order = np.argsort(group, kind="stable")
    starts = np.flatnonzero(np.diff(group[order], prepend=-1)).tolist()
    keys = frame[_OF_SAMPLE].iloc[order[starts]].itertuples(index=False, name=None)
    heads = frame["head"].where(is_module, 0).to_numpy(np.int64)[order].tolist()
    values = frame["value"].to_numpy(float)[order].tolist()
    for key, start, end in zip(keys, starts, [*starts[1:], len(order)], strict=True):
        step, site, layer, indicator = key
        of_heads = dict(zip(heads[start:end], values[start:end], strict=True))
        known = tuple(of_heads.get(head, math.nan) for head in range(max(of_heads) + 1))
        yield Sample(step, site, layer, indicator, known)
