"""Turns rows of a table into samples."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
import pandas as pd

from guardbit.records import Sample
from guardbit.store.files import COLUMNS, check_columns

#: More heads than any attention has; a larger number is a mistake.
_MOST_HEADS = 65_536


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
