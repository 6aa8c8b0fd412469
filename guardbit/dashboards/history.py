"""What a run has recorded so far, in memory that does not grow with its length.

Steps are gathered in buckets. When they no longer fit, neighbouring buckets become one, so that
all of the run stays in view; a bucket keeps the smallest and the largest value, so that no peak is
lost. Taking the same value in twice changes nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from guardbit.catalog import HEAD_INDICATORS, RUN_INDICATORS
from guardbit.dashboards.excess import EXCESS_INDICATORS, times_baseline

Integers = npt.NDArray[np.integer]
Floats = npt.NDArray[np.floating]

#: Samples that a head's baseline is taken from, at most: quantiles need no more.
_SAMPLES_OF_BASELINE = 100
_FLOAT32_MAX = float(np.finfo(np.float32).max)


class History:
    """The known indicators of every head, and those of the whole run.

    Attributes:
        steps: (buckets,), the last recorded step of each bucket, -1 while it has none.
        num_layers: One more than the largest layer recorded.
        num_heads: The same for heads.
        heads: The (layer, head) recorded, in the order of the columns below.
        low: Indicator of heads -> its smallest values, float32 (buckets, len(heads)), NaN where
            nothing was measured. Only heads that were recorded take memory: one row with a broken
            number costs one column.
        high: The same for the largest values.
        run_low: Indicator of the run -> its smallest values, float64 (buckets,).
        run_high: The same for the largest.
    """

    def __init__(self, buckets: int = 400) -> None:
        self._buckets = buckets
        self._width = 1
        self._origin: int | None = None
        self.heads: list[tuple[int, int]] = []
        self._columns = np.zeros((0, 0), dtype=np.int64)  # (layers, heads); -1 where not recorded
        self.steps = np.full(buckets, -1, dtype=np.int64)
        self.low: dict[str, Floats] = {}
        self.high: dict[str, Floats] = {}
        self.run_low: dict[str, Floats] = {}
        self.run_high: dict[str, Floats] = {}

    @property
    def num_layers(self) -> int:
        """One more than the largest layer recorded."""
        return self._columns.shape[0]

    @property
    def num_heads(self) -> int:
        """One more than the largest head recorded."""
        return self._columns.shape[1]

    def column_of(self, layer: int, head: int) -> int:
        """The column of a head; -1 where it was not recorded."""
        is_known = 0 <= layer < self.num_layers and 0 <= head < self.num_heads
        return int(self._columns[layer, head]) if is_known else -1

    @property
    def known(self) -> Integers:
        """The buckets that have a step, ascending."""
        return np.flatnonzero(self.steps >= 0)

    @property
    def used(self) -> int:
        """Number of buckets up to the last that has a step."""
        return int(self.known[-1]) + 1 if self.known.size else 0

    @property
    def last_step(self) -> int:
        """The last recorded step, -1 without any."""
        return int(self.steps.max())

    def bucket_of(self, step: int) -> int:
        """The last bucket that holds no later step than the one given; -1 where there is none."""
        known = np.flatnonzero((self.steps >= 0) & (self.steps <= step))
        if known.size:
            return int(known[-1])
        # The first one counts from the run's first step on, even if it holds later ones too.
        return 0 if self._origin is not None and step >= self._origin else -1

    def add(
        self, indicator: str, steps: Integers, layers: Integers, heads: Integers, values: Floats
    ) -> None:
        """Takes in values of one indicator, arrays of one length; an unknown one is passed over."""
        if not len(steps) or indicator not in (*HEAD_INDICATORS, *RUN_INDICATORS):
            return
        buckets = self._place(steps)
        if indicator in RUN_INDICATORS:
            low = self.run_low.setdefault(indicator, np.full(self._buckets, np.nan))
            high = self.run_high.setdefault(indicator, np.full(self._buckets, np.nan))
            np.fmin.at(low, buckets, values)
            np.fmax.at(high, buckets, values)
            return
        columns = self._column(layers, heads)
        for tables in (self.low, self.high):
            missing = len(self.heads) - tables[indicator].shape[1] if indicator in tables else None
            if missing is None:
                shape = (self._buckets, len(self.heads))
                tables[indicator] = np.full(shape, np.nan, dtype=np.float32)
            elif missing:
                grown = ((0, 0), (0, missing))
                tables[indicator] = np.pad(tables[indicator], grown, constant_values=np.nan)
        numbers = np.clip(values, -_FLOAT32_MAX, _FLOAT32_MAX).astype(np.float32)
        cells = buckets * len(self.heads) + columns
        np.fmin.at(self.low[indicator].reshape(-1), cells, numbers)
        np.fmax.at(self.high[indicator].reshape(-1), cells, numbers)

    def of_head(self, indicator: str, layer: int, head: int) -> tuple[Floats, Floats]:
        """The smallest and the largest values of a head in the buckets that have a step."""
        column, known = self.column_of(layer, head), self.known
        if not 0 <= column < self.high[indicator].shape[1]:
            nothing = np.full(len(known), np.nan)
            return nothing, nothing
        return self.low[indicator][known, column], self.high[indicator][known, column]

    def excess(self, bucket: int | None = None) -> tuple[Floats, Integers, Sequence[str]]:
        """Each head's excess up to a bucket, (layers, heads); of which indicator; their names."""
        names = [name for name in EXCESS_INDICATORS if name in self.high]
        worst = np.full(len(self.heads), np.nan)
        which = np.zeros(worst.shape, dtype=np.int64)
        end = self.used if bucket is None else bucket + 1
        for index, name in enumerate(names):
            values = self.high[name][:end]
            values = values[~np.isnan(values).all(axis=1)]
            stride = -(-len(values) // _SAMPLES_OF_BASELINE) or 1
            # Counted from the end, as the last sample is the one that is judged.
            values = values[::-1][::stride][::-1]
            excess = times_baseline(values, EXCESS_INDICATORS[name])
            # Heads that were first seen after an indicator's last values have no column in it.
            so_far = worst[: len(excess)]
            worse = np.flatnonzero((excess > so_far) | (np.isnan(so_far) & ~np.isnan(excess)))
            worst[worse] = excess[worse]
            which[worse] = index
        return self._map(worst, np.nan), self._map(which, 0), names

    def _map(self, values: npt.NDArray[Any], missing: float) -> npt.NDArray[Any]:
        """Values of the columns by layer and head."""
        spread = np.full(self._columns.shape, missing, dtype=values.dtype)
        known = self._columns >= 0
        spread[known] = values[self._columns[known]]
        return spread

    def _place(self, steps: Integers) -> Integers:
        """The buckets of the steps, after making room for the last of them."""
        if self._origin is None:
            self._origin = int(steps.min())
        while (int(steps.max()) - self._origin) // self._width >= self._buckets:
            self._halve()
        # Steps before the first one seen have no bucket of their own; only a resumed run that is
        # read out of order has any.
        buckets = np.maximum(steps - self._origin, 0) // self._width
        np.maximum.at(self.steps, buckets, steps)
        return buckets

    def _halve(self) -> None:
        self._width *= 2
        half = self._buckets // 2
        self.steps[:half] = np.maximum(self.steps[0::2], self.steps[1::2])
        self.steps[half:] = -1
        for tables, merge in (
            (self.low, np.fmin),
            (self.high, np.fmax),
            (self.run_low, np.fmin),
            (self.run_high, np.fmax),
        ):
            for table in tables.values():
                table[:half] = merge(table[0::2], table[1::2])
                table[half:] = np.nan

    def _column(self, layers: Integers, heads: Integers) -> Integers:
        """The columns of heads, after making room for those not seen before."""
        missing_layers = max(int(layers.max()) + 1 - self.num_layers, 0)
        missing_heads = max(int(heads.max()) + 1 - self.num_heads, 0)
        if missing_layers or missing_heads:
            grown = ((0, missing_layers), (0, missing_heads))
            self._columns = np.pad(self._columns, grown, constant_values=-1)
        columns = self._columns[layers, heads]
        if (columns < 0).any():
            new = np.unique(np.stack([layers, heads])[:, columns < 0], axis=1)
            start = len(self.heads)
            self._columns[new[0], new[1]] = np.arange(start, start + new.shape[1])
            self.heads += list(zip(*new.tolist(), strict=True))
            columns = self._columns[layers, heads]
        return columns
