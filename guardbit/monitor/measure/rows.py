"""Statistics of the scores in a head's rows, from a recomputation in FP32.

"Paper" is arXiv 2510.04212.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor

from guardbit.monitor.measure.probes import (
    CallProbe,
    CallView,
    Found,
    counted_rows,
    per_head,
)


class _Statistic(NamedTuple):
    """How an indicator comes from rows.

    Attributes:
        read: Takes `(B, H, R)` from a recomputation.
        reduce: Makes `(S, H)` of that and of the rows' maxima, both `(S, B, H, R)`.
        is_mean: Whether `reduce` returns a sum, of which the indicator is the mean over the rows;
            otherwise it returns a maximum.
        needs_shadow: Whether `read` takes a `Shadow`; otherwise a `RowMaxima` will do.
    """

    read: Callable[[Any], Tensor]
    reduce: Callable[[Tensor, Tensor], Tensor]
    is_mean: bool = True
    needs_shadow: bool = True


def shared_maxima(maxima: Tensor, row_max: Tensor) -> Tensor:
    """Counts the rows whose maximum is attained more than once (paper, figure 13)."""
    return per_head((maxima > 1) & (row_max > -torch.inf))


def _largest(sizes: Tensor, _: Tensor) -> Tensor:
    return sizes.amax((-3, -1))


def _sum(values: Tensor, _: Tensor) -> Tensor:
    return per_head(values)


#: Rows without an allowed key have entropy 0 and largest score -inf.
STATISTICS: dict[str, _Statistic] = {
    "multiple_maxima": _Statistic(attrgetter("maxima"), shared_maxima),
    "multiple_maxima_bf16": _Statistic(attrgetter("maxima_bf16"), shared_maxima),
    # In size: rounding is as coarse below 0 as above, and softmax does not see a constant, so
    # scores may grow where no row's maximum shows it. The recorded
    # runs of `tests/data/runs` are older and hold the largest score with its sign.
    "max_logit": _Statistic(attrgetter("largest"), _largest, is_mean=False, needs_shadow=False),
    "attention_entropy": _Statistic(attrgetter("entropy"), _sum),
}


class RowProbe(CallProbe):
    """Measures the statistics of rows; with dropout, those of P before anything is dropped."""

    name = "rows"

    def __init__(self, wanted: Collection[str]) -> None:
        super().__init__(wanted)
        self.maxima = tuple(name for name in self.indicators if not STATISTICS[name].is_mean)
        self._means = tuple(name for name in self.indicators if STATISTICS[name].is_mean)
        self.sums = ("rows", *self._means)
        self.needs_shadow = any(STATISTICS[name].needs_shadow for name in self.indicators)

    def update(self, view: CallView) -> Found:
        """Takes what the indicators need from a call's recomputed rows."""
        recomputed = view.shadow if self.needs_shadow else view.maxima
        read = (STATISTICS[name].read(recomputed) for name in (*self._means, *self.maxima))
        return Found(range(view.call.q.size(1)), (recomputed.row_max, *read))

    def reduce(self, values: Sequence[Tensor]) -> list[Tensor]:
        row_max, *read = values
        reduced = (
            STATISTICS[name].reduce(rows, row_max)
            for name, rows in zip((*self._means, *self.maxima), read, strict=True)
        )
        return [counted_rows(row_max), *reduced]

    def compute(self, state: Mapping[str, Tensor], loss_scale: float) -> dict[str, Tensor]:
        """See `CallProbe.compute`; NaN where no row has an allowed key."""
        rows = state["rows"]
        means = {name: state[name] / rows for name in self._means}
        found = means | {name: state[name].double() for name in self.maxima}
        return {name: found[name].where(rows > 0, torch.nan) for name in self.indicators}
