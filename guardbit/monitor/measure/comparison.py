"""The error of dQ of another engine, on the inputs of the audited heads."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import torch
from torch import Tensor

from guardbit.catalog import of_probe
from guardbit.kernels.constants import device_constant
from guardbit.monitor.measure.probes import CallView, Found, per_head


class ComparisonProbe:
    """What `dq_relative_error` and `w_q_push` would be with the engine to compare.

    Args:
        wanted: Names of the indicators to measure.
    """

    sums: tuple[str, ...] = (
        "compared_error_squares", "compared_squares", "compared_push", "compared_push_of_rows",
    )  # fmt: skip
    maxima: tuple[str, ...] = ()
    needs_shadow = False
    totals: tuple[str, ...] = ()

    def __init__(self, wanted: Collection[str]) -> None:
        self.indicators = tuple(name for name in of_probe("comparison") if name in wanted)

    def update(self, view: CallView) -> Found | None:
        """Runs the other engine in the audited heads; None where it cannot serve the call."""
        call, heads = view.call, tuple(view.audited)
        if view.rival is None or not heads:
            return None
        assert view.directions is not None
        dq = view.rival.query_gradient(call, heads)
        if dq is None:
            return None
        index = device_constant(heads, torch.int64, dq.device)
        columns = view.directions.index_select(0, index)[:, :, None]
        exact, q = view.exact_dq, call.q.index_select(1, index)
        error = dq - exact
        error_along, exact_along, q_along = (
            (x.float() @ columns)[..., 0] for x in (error, exact, q)
        )
        push = -error_along * q_along
        of_rows = (error_along.abs() + exact_along.abs()) * q_along.abs()
        return Found(heads, (error.square().sum(-1), exact.square().sum(-1), push, of_rows))

    def reduce(self, values: Sequence[Tensor]) -> list[Tensor]:
        """See `CallProbe.reduce`."""
        return [per_head(rows) for rows in values]

    def compute(self, state: Mapping[str, Tensor], loss_scale: float) -> dict[str, Tensor]:
        """See `CallProbe.compute`; NaN where nothing was compared."""
        squares, of_rows = state["compared_squares"], state["compared_push_of_rows"]
        relative = (state["compared_error_squares"] / squares).sqrt().where(squares > 0, torch.nan)
        push = (state["compared_push"] / of_rows).where(of_rows > 0, torch.nan)
        found = {"compared_dq_relative_error": relative, "compared_w_q_push": push}
        return {name: found[name] for name in self.indicators}
