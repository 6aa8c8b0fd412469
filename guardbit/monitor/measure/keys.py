"""What the keys of a head have in common.

A wrong delta gives a row of dQ the error -(delta_lp - delta_hp) sum_j P_ij k_j. What is the same in
all keys is the same in all rows, and adds up over these; of an exact delta it cancels, since
sum_j dS_ij is 0.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import torch
from torch import Tensor

from guardbit.catalog import of_probe
from guardbit.monitor.measure.probes import CallView, Found


class KeyProbe:
    """The mean of the keys of a sequence, in size; a head has the keys of its group.

    Args:
        wanted: Names of the indicators to measure.
    """

    sums: tuple[str, ...] = ("key_means", "key_squares")
    maxima: tuple[str, ...] = ()
    needs_shadow = False
    totals: tuple[str, ...] = ()

    def __init__(self, wanted: Collection[str]) -> None:
        self.indicators = tuple(name for name in of_probe("keys") if name in wanted)

    def update(self, view: CallView) -> Found:
        """Takes what a call's keys have in common; of packed documents all together."""
        heads = view.call.q.size(1)
        k = view.call.k.float()
        # Mean squares, which FP32 holds whatever the number of keys.
        parts = k.mean(2).square().sum(-1), k.square().sum(-1).mean(2)
        group = heads // k.size(1)
        of_heads = (part.repeat_interleave(group, 1).sum(0, dtype=torch.float64) for part in parts)
        return Found(range(heads), tuple(of_heads))

    def reduce(self, values: Sequence[Tensor]) -> list[Tensor]:
        """See `CallProbe.reduce`."""
        return list(values)

    def compute(self, state: Mapping[str, Tensor], loss_scale: float) -> dict[str, Tensor]:
        """See `CallProbe.compute`; NaN where all keys are zero."""
        squares = state["key_squares"]
        share = (state["key_means"] / squares).sqrt().where(squares > 0, torch.nan)
        return {name: share for name in self.indicators}
