"""Reads the samples of a run from a CSV file."""

from __future__ import annotations

import gzip
import io
import warnings
import zlib
from pathlib import Path

import pandas as pd

from guardbit.store.bounds import MAX_CSV
from guardbit.store.files import COLUMNS, check_columns


def read_csv(path: Path) -> pd.DataFrame:
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
    check_columns(table.columns, path)
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
