"""The rounding bias of delta = rowsum(dO * O): the error that adds up over rows.

"Paper" is arXiv 2510.04212, equation 3 and figure 5a.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import torch
from torch import Tensor

from guardbit.kernels import dispatch
from guardbit.kernels.attention_call import AttentionCall
from guardbit.monitor.measure.probes import CallProbe, CallView, Found, counted_rows


class DeltaProbe(CallProbe):
    """Delta of the kernel in use less that of an FP32 recomputation, summed with and without sign.

    The bias is NaN where PyTorch's kernel drops entries of P, because nobody else knows which. It
    is also NaN where the backward takes delta from P itself, and not from a rounded O.
    """

    name = "delta"
    sums = ("delta_rows", "delta_bias", "delta_bias_abs")
    needs_shadow = True

    def __init__(self, wanted: Collection[str]) -> None:
        super().__init__(wanted)
        self.totals = self.indicators

    def update(self, view: CallView) -> Found:
        exact = view.shadow
        bias = _delta_bias(view.call, exact.out, view.rows)
        return Found(range(view.call.q.size(1)), (exact.row_max, *bias))

    def reduce(self, values: Sequence[Tensor]) -> list[Tensor]:
        row_max, bias, bias_abs = values
        return [counted_rows(row_max), bias, bias_abs]

    def compute(self, state: Mapping[str, Tensor], loss_scale: float) -> dict[str, Tensor]:
        """See `CallProbe.compute`; NaN where no row has an allowed key."""
        rows = state["delta_rows"]
        return {
            name: state[name].where(rows > 0, torch.nan) / loss_scale for name in self.indicators
        }


def _delta_bias(call: AttentionCall, exact: Tensor, rows: Tensor | None) -> tuple[Tensor, Tensor]:
    """Returns the sums of `dispatch.delta_bias`; NaN in heads for which they are unknown."""
    heads = call.q.size(1)
    if call.d_out is None or call.out is None:
        nothing = torch.full((heads,), torch.nan, dtype=torch.float64, device=call.q.device)
        return nothing, nothing
    sums = dispatch.delta_bias(call.d_out, call.out, exact, residual=call.residual, query_ids=rows)
    unknown = [head for head in range(heads) if head not in call.known_heads]
    if unknown:
        for values in sums:
            values[unknown] = torch.nan
    return sums
