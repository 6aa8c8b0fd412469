"""What a run has recorded so far, in memory that does not grow with its length.

Steps are gathered in buckets. When they no longer fit, neighbouring buckets become one, so that
all of the run stays in view; a bucket keeps the smallest and the largest value, so that no peak is
lost. Taking the same value in twice changes nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from guardbit.dashboards.excess import EXCESS_INDICATORS, times_normal
from guardbit.records import HEAD_INDICATORS, RUN_INDICATORS

Integers = npt.NDArray[np.integer]
Floats = npt.NDArray[np.floating]

#: Samples that a head's normal is taken from, at most: quantiles need no more.
_SAMPLES_OF_NORMAL = 100
_FLOAT32_MAX = float(np.finfo(np.float32).max)


class History:
    """The known indicators of every head, and those of the whole run.

    Args:
        buckets: Number of buckets, even. With 80 layers of 64 heads and all indicators recorded,
            400 buckets take 200 MB.

    Attributes:
        steps: (buckets,), the last recorded step of each bucket, -1 while it has none.
        low: Indicator of heads -> its smallest values, float32 (buckets, layers, heads), NaN where
            nothing was measured.
        high: The same for the largest values.
        run_low: Indicator of the run -> its smallest values, float64 (buckets,).
        run_high: The same for the largest.
    """

    def __init__(self, buckets: int = 400) -> None:
        self._buckets = buckets
        self._width = 1
        self._origin: int | None = None
        self.num_layers, self.num_heads = 0, 0
        self.steps = np.full(buckets, -1, dtype=np.int64)
        self.low: dict[str, Floats] = {}
        self.high: dict[str, Floats] = {}
        self.run_low: dict[str, Floats] = {}
        self.run_high: dict[str, Floats] = {}

    @property
    def used(self) -> int:
        """Number of buckets up to the last that has a step."""
        return int(np.flatnonzero(self.steps >= 0)[-1]) + 1 if (self.steps >= 0).any() else 0

    @property
    def last_step(self) -> int:
        """The last recorded step, -1 without any."""
        return int(self.steps.max())

    def bucket_of(self, step: int) -> int:
        """The last bucket that holds no later step than the one given; -1 where there is none."""
        known = np.flatnonzero((self.steps >= 0) & (self.steps <= step))
        return int(known[-1]) if known.size else -1

    def add(
        self, indicator: str, steps: Integers, layers: Integers, heads: Integers, values: Floats
    ) -> None:
        """Takes in values of one indicator, arrays of one length; an unknown one is passed over.

        Layers and heads count from 0 and are not looked at for indicators of the whole run.
        """
        if not len(steps) or indicator not in (*HEAD_INDICATORS, *RUN_INDICATORS):
            return
        buckets = self._place(steps)
        if indicator in RUN_INDICATORS:
            low = self.run_low.setdefault(indicator, np.full(self._buckets, np.nan))
            high = self.run_high.setdefault(indicator, np.full(self._buckets, np.nan))
            np.fmin.at(low, buckets, values)
            np.fmax.at(high, buckets, values)
            return
        self._make_room(int(layers.max()) + 1, int(heads.max()) + 1)
        shape = (self._buckets, self.num_layers, self.num_heads)
        if indicator not in self.low:
            self.low[indicator] = np.full(shape, np.nan, dtype=np.float32)
            self.high[indicator] = np.full(shape, np.nan, dtype=np.float32)
        cells = (buckets * self.num_layers + layers) * self.num_heads + heads
        numbers = np.clip(values, -_FLOAT32_MAX, _FLOAT32_MAX).astype(np.float32)
        np.fmin.at(self.low[indicator].reshape(-1), cells, numbers)
        np.fmax.at(self.high[indicator].reshape(-1), cells, numbers)

    def excess(self, bucket: int | None = None) -> tuple[Floats, Integers, Sequence[str]]:
        """How far each head's worst indicator is above its own normal (`dashboards.excess`).

        Args:
            bucket: The last one taken into account; None for all.

        Returns:
            The excess, (layers, heads), NaN where nothing is known; which indicator it is of, and
            the names these numbers stand for.
        """
        names = [name for name in EXCESS_INDICATORS if name in self.high]
        worst = np.full((self.num_layers, self.num_heads), np.nan)
        which = np.zeros(worst.shape, dtype=np.int64)
        end = self.used if bucket is None else bucket + 1
        for index, name in enumerate(names):
            values = self.high[name][:end].reshape(end, -1)
            values = values[~np.isnan(values).all(axis=1)]
            stride = -(-len(values) // _SAMPLES_OF_NORMAL) or 1
            # Counted from the end, as the last sample is the one that is judged.
            values = values[::-1][::stride][::-1]
            excess = times_normal(values, EXCESS_INDICATORS[name]).reshape(worst.shape)
            worse = (excess > worst) | (np.isnan(worst) & ~np.isnan(excess))
            worst[worse] = excess[worse]
            which[worse] = index
        return worst, which, names

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

    def _make_room(self, layers: int, heads: int) -> None:
        layers, heads = max(layers, self.num_layers), max(heads, self.num_heads)
        if (layers, heads) == (self.num_layers, self.num_heads):
            return
        grown = ((0, 0), (0, layers - self.num_layers), (0, heads - self.num_heads))
        for tables in (self.low, self.high):
            for name, table in tables.items():
                tables[name] = np.pad(table, grown, constant_values=np.nan)
        self.num_layers, self.num_heads = layers, heads
