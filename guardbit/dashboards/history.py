"""What a run has recorded so far, in memory that does not grow with its length.

Steps are gathered in buckets. When they no longer fit, neighbouring buckets are merged, so that all
of the run stays in view. A bucket keeps the smallest and the largest value, so that no peak is
lost. Adding the same value twice changes nothing.

How far a head is above its baseline is told in numbers that compare across indicators. What all
heads share is no sign of divergence: healthy norms grow tenfold while a run warms up, and
every batch has its own scale. So a head's value is divided by that of the median head at the same
step, of those that neither alarmed nor were switched, because a switch changes many at once.
The head's baseline is the lower quartile of this ratio up to the first alarm or switch. The excess
is the factor by which the latest ratio is above the baseline and its noise: 1 is usual, 10 is ten
times the upper end of the usual range.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd

from guardbit.catalog import CATALOG, HEAD_INDICATORS, RUN_INDICATORS, VALIDATION_LOSS

Integers = npt.NDArray[np.integer]
Floats = npt.NDArray[np.floating]

#: Most values of an indicator that baselines are computed from: of many heads fewer samples each.
_VALUES_OF_BASELINES = 500_000
#: More heads than a layer has.
_MOST_HEADS = 1 << 32
_FLOAT32_MAX = float(np.finfo(np.float32).max)
#: Indicators whose size shows that a head diverges -> what is added before taking ratios. Signed
#: sums are left out: they have a figure of their own.
EXCESS_INDICATORS: Mapping[str, float] = {
    indicator.name: indicator.floor for indicator in CATALOG if indicator.floor is not None
}

_FEWEST_PEERS = 4  # heads at a step whose median is used
#: Before this many samples a head has no baseline.
FEWEST_SAMPLES = 5
_BASELINE_QUANTILE = 0.25
_NOISE_SPAN = 3.0  # standard deviations
#: Overflown values and ratios count as this, which is far beyond any healthy one.
_LARGEST = 1e30


class History:
    """The known indicators of every head, and those of the whole run."""

    def __init__(self, buckets: int = 400) -> None:
        self._buckets = buckets
        self._width = 1
        self._origin: int | None = None
        self._columns: dict[tuple[int, int], int] = {}
        # The last recorded step of each bucket, -1 while it has none.
        self.steps = np.full(buckets, -1, dtype=np.int64)
        # Indicator of heads -> (buckets, heads), float32, NaN where nothing was measured; of the
        # run, (buckets, 1), float64. Only heads that were recorded take memory.
        self.low: dict[str, Floats] = {}
        self.high: dict[str, Floats] = {}
        # Head that has alarmed or was switched -> the first step at which it did.
        self.moved: dict[tuple[int, int], int] = {}

    @property
    def heads(self) -> list[tuple[int, int]]:
        """The (layer, head) recorded, in the order of the columns."""
        return list(self._columns)

    @property
    def num_layers(self) -> int:
        return 1 + max((layer for layer, _ in self._columns), default=-1)

    @property
    def num_heads(self) -> int:
        return 1 + max((head for _, head in self._columns), default=-1)

    def column_of(self, layer: int, head: int) -> int:
        return self._columns.get((layer, head), -1)

    @property
    def known(self) -> Integers:
        return np.flatnonzero(self.steps >= 0)

    @property
    def used(self) -> int:
        """Number of buckets up to the last that has a step."""
        return int(self.known[-1]) + 1 if self.known.size else 0

    @property
    def last_step(self) -> int:
        return int(self.steps.max())

    def bucket_of(self, step: int) -> int:
        """The last bucket that holds no later step than the one given; -1 where there is none."""
        known = np.flatnonzero((self.steps >= 0) & (self.steps <= step))
        if known.size:
            return int(known[-1])
        # From the run's first step on it is the first bucket, even if that holds later steps too.
        return 0 if self._origin is not None and step >= self._origin else -1

    def add(
        self, indicator: str, steps: Integers, layers: Integers, heads: Integers, values: Floats
    ) -> None:
        """Adds values of one indicator, as arrays of one length; skips an unknown indicator."""
        is_of_run = indicator in (*RUN_INDICATORS, VALIDATION_LOSS)
        if not len(steps) or not (is_of_run or indicator in HEAD_INDICATORS):
            return
        buckets = self._place(steps)
        if is_of_run:
            columns, width, dtype = 0, 1, np.float64
        else:
            columns = self._column(layers, heads)
            width, dtype = len(self._columns), np.float32
            values = np.clip(values, -_FLOAT32_MAX, _FLOAT32_MAX)
        cells = buckets * width + columns
        for tables, merge in ((self.low, np.fmin), (self.high, np.fmax)):
            table = tables.get(indicator, np.empty((self._buckets, 0), dtype))
            missing = ((0, 0), (0, width - table.shape[1]))
            tables[indicator] = table = np.pad(table, missing, constant_values=np.nan)
            merge.at(table.reshape(-1), cells, values.astype(dtype))

    def of_head(self, indicator: str, layer: int, head: int) -> tuple[Floats, Floats]:
        """Returns the smallest and largest values of a head in the buckets that have a step."""
        column, known = self.column_of(layer, head), self.known
        if not 0 <= column < self.high[indicator].shape[1]:
            nothing = np.full(len(known), np.nan)
            return nothing, nothing
        return self.low[indicator][known, column], self.high[indicator][known, column]

    def table(self, indicator: str) -> pd.DataFrame:
        """The middle of each bucket's values, with a row a step and a column a head."""
        low, high = (
            of.get(indicator, np.empty((self._buckets, 0))) for of in (self.low, self.high)
        )
        heads = self.heads[: low.shape[1]] if indicator in HEAD_INDICATORS else None
        return pd.DataFrame((low / 2 + high / 2)[self.known], self.steps[self.known], heads)

    def excess(self, bucket: int | None = None) -> tuple[Floats, Integers, Sequence[str]]:
        """The excess up to a bucket by layer and head, the index of its indicator, their names."""
        names = [name for name in EXCESS_INDICATORS if name in self.high]
        found = np.full((max(len(names), 1), len(self._columns)), np.nan)
        end = self.used if bucket is None else bucket + 1
        last = int(self.steps[:end].max(initial=-1))
        moved = {head: step for head, step in self.moved.items() if step <= last}
        has_moved = np.array([head in moved for head in self._columns], dtype=bool)
        first = min(moved.values(), default=None)
        for index, name in enumerate(names):
            values = self.high[name][:end]
            is_measured = ~np.isnan(values).all(axis=1)
            values, steps = values[is_measured], self.steps[:end][is_measured]
            stride = -(-values.size // _VALUES_OF_BASELINES) or 1
            # Counted from the end, as the last sample is the one that is judged.
            values, steps = values[::-1][::stride][::-1], steps[::-1][::stride][::-1]
            until = None if first is None else int((steps <= first).sum())
            # Heads that were first seen after an indicator's last values have no column in it.
            width = values.shape[1]
            found[index, :width] = times_baseline(
                values, EXCESS_INDICATORS[name], has_moved[:width], until
            )
        which = np.nan_to_num(found, nan=-1.0).argmax(axis=0)
        return self._map(found[which, np.arange(len(which))], np.nan), self._map(which, 0), names

    def _map(self, values: npt.NDArray[Any], missing: float) -> npt.NDArray[Any]:
        spread = np.full((self.num_layers, self.num_heads), missing, dtype=values.dtype)
        layers, heads = np.array(self.heads, dtype=np.int64).reshape(-1, 2).T
        spread[layers, heads] = values
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
        for tables, merge in ((self.low, np.fmin), (self.high, np.fmax)):
            for table in tables.values():
                table[:half] = merge(table[0::2], table[1::2])
                table[half:] = np.nan

    def _column(self, layers: Integers, heads: Integers) -> Integers:
        """The columns of heads, after making room for those not seen before."""
        at, pairs = pd.factorize(layers * _MOST_HEADS + heads)
        known = self._columns
        columns = [
            known.setdefault(divmod(pair, _MOST_HEADS), len(known)) for pair in pairs.tolist()
        ]
        return np.array(columns)[at]


def farthest(excess: Floats) -> list[tuple[int, int]]:
    """All heads of a map, worst first; those that were not measured count as 0."""
    order = np.argsort(-np.nan_to_num(excess, nan=0.0), axis=None, kind="stable")
    layers, heads = np.unravel_index(order, excess.shape)
    return list(zip(layers.tolist(), heads.tolist(), strict=True))


def times_baseline(
    values: Floats,  # (samples, heads)
    floor: float = 0.0,  # added before taking ratios
    moved: npt.NDArray[np.bool_] | None = None,  # (heads,): has alarmed or was switched
    until: int | None = None,  # number of samples up to the first alarm or switch
) -> Floats:
    """Each head's excess at the last sample."""
    if not len(values):
        return np.full(values.shape[1], np.nan)
    raised = np.minimum(values + floor, _LARGEST)
    logs = np.log(np.where(raised > 0, raised, np.nan))
    if logs.shape[1] >= _FEWEST_PEERS:
        logs = logs - _shared(logs, moved, until)[:, None]
    early, _ = _usual_range(logs[:until])
    usual, count = _usual_range(logs)
    # A head without a past before the first alarm has that of the whole run.
    usual = np.where(np.isnan(early), usual, early)
    known = count >= FEWEST_SAMPLES
    if moved is not None and (~moved).sum() >= _FEWEST_PEERS:
        # That of one that has moved would be its illness: it is compared with the median head.
        alone = moved & np.isnan(early) & (count > 0)
        usual, known = np.where(alone, 0.0, usual), known | alone
    latest = np.take_along_axis(_without_gaps(logs), np.maximum(count - 1, 0)[None], axis=0)[0]
    excess = np.exp(np.clip(latest - usual, 0.0, np.log(_LARGEST)))
    return np.where(known, excess, np.where(count > 0, 1.0, np.nan))


def _shared(logs: Floats, moved: npt.NDArray[np.bool_] | None, until: int | None) -> Floats:
    """What all heads share at each sample: the median of those that have not moved."""
    peers = np.ones(logs.shape[1], bool) if moved is None else ~moved
    # Where all heads are switched at once, as with `always`, they are each other's peers.
    has_peers = peers.sum() >= _FEWEST_PEERS or not peers.any()
    peers = peers if peers.any() else ~peers
    median, count = lower_quantile((logs[:, peers] if has_peers else logs).T, 0.5)
    shared = np.where(count >= _FEWEST_PEERS, median, np.nan)
    known = shared[:until][np.isfinite(shared[:until])]
    if until is not None and not has_peers and len(known):
        shared[until:] = known[-1]  # no head is left to compare with
    return shared


def _usual_range(logs: Floats) -> tuple[Floats, npt.NDArray[np.intp]]:
    """The upper end of each head's usual range, NaN below `FEWEST_SAMPLES`, and their number."""
    logs = _without_gaps(logs)
    baseline, count = lower_quantile(logs, _BASELINE_QUANTILE)
    steps, _ = lower_quantile(np.abs(np.diff(logs, axis=0)), 0.5)
    # The median step of a sequence does not see a lasting jump; 1.4826 turns it into a standard
    # deviation of differences, the root of 2 into one of values.
    noise = np.nan_to_num(1.4826 / np.sqrt(2) * steps)
    return np.where(count >= FEWEST_SAMPLES, baseline + _NOISE_SPAN * noise, np.nan), count


def _without_gaps(values: Floats) -> Floats:
    """Moves each column's numbers to its top, in their order, and its NaNs below them."""
    missing = np.isnan(values)
    if not missing.any():
        return values
    return np.take_along_axis(values, np.argsort(missing, axis=0, kind="stable"), axis=0)


def lower_quantile(values: Floats, quantile: float) -> tuple[Floats, npt.NDArray[np.intp]]:
    """Lower quantile along the first axis and the count behind it, NaN left out."""
    if not len(values):
        return np.full(values.shape[1:], np.nan), np.zeros(values.shape[1:], dtype=np.intp)
    count = np.isfinite(values).sum(axis=0)
    index = (quantile * np.maximum(count - 1, 0)).astype(np.intp)
    return np.take_along_axis(np.sort(values, axis=0), index[None], axis=0)[0], count
