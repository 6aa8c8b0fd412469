"""Reads a run's telemetry, as tables and as samples."""

from __future__ import annotations

import gzip
import io
import math
import os
import warnings
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa

from guardbit.records import RunEnd, Sample
from guardbit.store.files import (
    COLUMNS,
    EVENT_COLUMNS,
    KEY,
    MAX_CSV,
    SCHEMA,
    SessionKey,
    check_columns,
    existing,
    good_rows,
    warn_of_rows,
)
from guardbit.store.following import BATCHES, Part, RunFollower, load_events, sample_batches

#: How often a reader tries when the merge of a live writer removes a file.
_READ_ATTEMPTS = 10
#: More heads than any attention has; a larger number is a mistake.
_MOST_HEADS = 65_536


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
    path = existing(path)
    if path.is_file():
        table = pa.Table.from_pandas(_read_csv(path), SCHEMA, preserve_index=False)
        good = good_rows(table)
        warn_of_rows(len(table) - len(good), len(table), path)
        return _tidy(good)
    batches = _read_all(path, "samples", sample_batches)
    return _tidy(pa.Table.from_batches(batches, BATCHES).cast(SCHEMA))


def read_events(path: str | os.PathLike[str]) -> pd.DataFrame:
    """Reads the events of a run, also while it is being written.

    Args:
        path: Folder of a run; or a CSV file, which holds no events.

    Returns:
        One row an event, with the columns step (int64), kind, site, heads (tuple of int), why,
        rule, stabilizer, verdict and judges (str; see `guardbit.records.Event`), sorted by step
        and, within one, in the order they were written.

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
        rows = _read_all(path, "events", load_events)
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
    return _looked_at(path).metadata


def resumptions(metadata: Mapping[str, Any]) -> list[int]:
    """The first steps of a run's processes that went on from a checkpoint, oldest first."""
    steps = metadata.get("resumed")
    return [one for one in steps if isinstance(one, int)] if isinstance(steps, list) else []


def read_end(path: str | os.PathLike[str]) -> RunEnd | None:
    """Reads how a run ended; None if it goes on, was killed, or is a CSV file."""
    return _looked_at(path).end


def _looked_at(path: str | os.PathLike[str]) -> RunFollower:
    follower = RunFollower(existing(path))
    follower.look()
    return follower


def _read_all(folder: Path, kind: str, load: Callable[[Path, float], Iterable[Part]]) -> list[Part]:
    """Reads all segments of a kind; tries again if a live writer merged some meanwhile."""
    follower = RunFollower(folder)
    for attempts_left in reversed(range(_READ_ATTEMPTS)):
        follower.look()
        next_flush: dict[SessionKey, int] = {}
        try:
            parts = list(follower.read(kind, load, next_flush))
        except FileNotFoundError:
            if not attempts_left:
                raise
            continue
        if follower.broken and not next_flush:
            named = f"the {len(follower.broken)} segments of {kind} in {folder}"
            raise ValueError(f"none of {named} can be read")
        return parts
    raise AssertionError("the last attempt returns or raises")


def _tidy(table: pa.Table) -> pd.DataFrame:
    """Drops heads that were not measured, keeps the last of equal keys, and sorts."""
    frame = table.to_pandas()
    measured = frame["value"].notna() | (frame["site"] == "")
    frame = frame.loc[measured].drop_duplicates(subset=KEY, keep="last")
    return frame.sort_values(KEY, ignore_index=True)


def _read_csv(path: Path) -> pd.DataFrame:
    """Reads a CSV file of samples, also one that is being written."""
    if not path.name.endswith((".csv", ".csv.gz")):
        raise ValueError(
            f"cannot read a run from the file {path}: a folder, a .csv or a .csv.gz is needed"
        )
    try:
        with gzip.open(path) if path.name.endswith(".gz") else open(path, "rb") as file:
            text = file.read(MAX_CSV + 1)
        if len(text) > MAX_CSV:
            raise ValueError(f"it is larger than {MAX_CSV >> 30} GiB")
    except (OSError, EOFError, ValueError, zlib.error) as error:
        raise ValueError(f"cannot read a run from {path}: {error}") from error
    whole, newline, last = text.rpartition(b"\n")
    if newline and last:
        # The last line has no end: its writer was killed, or is still writing it.
        try:
            if last.count(b",") >= text.partition(b"\n")[0].count(b","):
                return _parse_csv(text, path)
        except ValueError:
            pass
        text = whole + newline
        warnings.warn(
            f"left out line {text.count(newline) + 1} of {path}, the last one, which is cut short",
            stacklevel=3,
        )
    return _parse_csv(text, path)


def _parse_csv(text: bytes, path: Path) -> pd.DataFrame:
    try:
        # A site may be called "NA" or "null", so only values can be missing.
        table = pd.read_csv(
            io.BytesIO(text),
            keep_default_na=False,
            na_values={"value": ["", "nan", "NaN"]},
            dtype={"site": "str", "indicator": "str", "value": "float64"},
        )
    except ValueError as error:
        raise ValueError(f"cannot read a run from {path}: {str(error).strip()}") from error
    check_columns(table.columns, COLUMNS, path)
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
    return table


def samples_of(frame: pd.DataFrame) -> Iterator[Sample]:
    """Yields the rows of a tidy frame as samples, one for each step, site and indicator."""
    check_columns(frame.columns, COLUMNS, "the telemetry")
    if frame.empty:
        return
    for name in ("step", "layer"):
        if pd.isna(frame[name].to_numpy()).any():
            raise ValueError(f"the telemetry has rows without a {name}")
    of = frame["site"]
    if not isinstance(of.dtype, pd.StringDtype):  # empty columns are read as numbers
        of = of.astype(object)
    frame = frame.assign(site=of.where(of.notna(), ""))
    site, sites = pd.factorize(frame["site"], sort=True)
    # A row without an indicator belongs to none; by default pandas numbers it -1, the last one.
    indicator, indicators = pd.factorize(frame["indicator"], sort=True, use_na_sentinel=False)
    columns = [frame[name].to_numpy() for name in ("step", "layer", "head", "value")]
    order = np.lexsort((indicator, columns[1], site, columns[0]))
    site, indicator = site[order], indicator[order]
    step, layer, head, value = (column[order] for column in columns)
    is_module = np.array([name != "" for name in sites])[site]
    wrong = np.flatnonzero(is_module & ~((head >= 0) & (head < _MOST_HEADS)))
    if len(wrong):
        first = wrong[0]
        raise ValueError(
            f"head {head[first]} of site {sites[site[first]]!r} at step {step[first]} in the "
            f"telemetry; the heads of a site count from 0 to {_MOST_HEADS - 1} at most"
        )
    keys = np.stack([step, layer, site, indicator]).astype(np.int64)
    starts = np.flatnonzero(np.diff(keys, axis=1, prepend=keys[:, :1] - 1).any(0))
    places = zip(*keys[:, starts].tolist(), strict=True)
    ends = [*starts[1:].tolist(), len(value)]
    sites, indicators = list(sites), list(indicators)
    heads = np.where(is_module, head, 0).astype(np.int64).tolist()
    values = value.astype(float).tolist()
    for (at, its_layer, its_site, what), start, end in zip(
        places, starts.tolist(), ends, strict=True
    ):
        known = values[start:end]
        if heads[start:end] != list(range(end - start)):
            by_head = dict(zip(heads[start:end], known, strict=True))
            known = [by_head.get(one, math.nan) for one in range(max(by_head) + 1)]
        yield Sample(at, sites[its_site], its_layer, indicators[what], tuple(known))
