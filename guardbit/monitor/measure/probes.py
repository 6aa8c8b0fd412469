"""The base of a probe of attention calls, and the view of a call that probes get."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from guardbit.catalog import SUMS, Probe, of_probe
from guardbit.kernels import dispatch
from guardbit.kernels.attention_call import AttentionCall
from guardbit.kernels.reference import Dropout, RowMaxima, Shadow

#: Distance from the row maximum, in logits, within which scores count as maxima.
EPS = 1e-3


@dataclass
class CallView:
    """One attention call of a sampled step, as probes see it.

    What several probes read is computed once, and only if a probe reads it.

    Attributes:
        call: The call.
        num_rows: Query rows to recompute, evenly spread; None for all.
        audited: Heads whose gradients are audited, among the call's known heads; if there are any,
            the call has `d_out` and `dq`.
        directions: FP32 `(H, D)`, the directions of their coherent errors.
        needs_shadow: Whether any probe reads the shadow; the maxima are then taken from it.
        repeats: Whether backwards are run a second time.
    """

    call: AttentionCall
    num_rows: int | None = None
    audited: Sequence[int] = ()
    directions: Tensor | None = None
    needs_shadow: bool = True
    repeats: bool = False

    @cached_property
    def rows(self) -> Tensor | None:
        """INT64 `(R,)`, the rows to recompute; None for all."""
        q = self.call.q
        if self.num_rows is None or self.num_rows >= q.size(2):
            return None
        return (
            torch.linspace(0, q.size(2) - 1, self.num_rows, dtype=torch.float32, device=q.device)
            .round()
            .long()
        )

    @cached_property
    def shadow(self) -> Shadow:
        """The output and statistics of these rows, recomputed in FP32."""
        call = self.call
        return dispatch.shadow(
            call.q,
            call.k,
            call.v,
            spec=call.spec,
            eps=EPS,
            query_ids=self.rows,
            dropout=self._dropout,
        )

    @cached_property
    def maxima(self) -> Shadow | RowMaxima:
        """The maxima of these rows, without a full shadow if no probe reads one."""
        if self.needs_shadow:
            return self.shadow
        call = self.call
        return dispatch.row_maxima(
            call.q, call.k, call.v, spec=call.spec, query_ids=self.rows, dropout=self._dropout
        )

    @cached_property
    def exact_dq(self) -> Tensor:
        """FP32-accurate dQ of the audited heads, `(B, C, N, D)`."""
        call = self.call
        assert call.d_out is not None
        return dispatch.exact_query_gradient(
            call.d_out,
            call.q,
            call.k,
            call.v,
            spec=call.spec,
            head_ids=self.audited,
            dropout=call.dropout_of(self.audited),
        )

    @property
    def _dropout(self) -> Dropout | None:
        call = self.call
        return call.dropout_of(range(call.q.size(1))) if call.known_heads else None


class Found(NamedTuple):
    """A probe's result for one call, to be stacked with its results for others.

    Attributes:
        heads: The measured heads, C of them.
        values: Tensors of C heads each: `(B, C, R)`, or already added up to `(C,)`.
    """

    heads: Sequence[int]
    values: tuple[Tensor, ...]


class CallProbe:
    """Measures some indicators in attention calls. It keeps no state, so one serves all sites.

    S is the number of sites, H the largest number of heads of one.

    Attributes:
        name: Its name in the catalogue.
        indicators: Those of its indicators that are wanted, or summed up by one that is, in the
            catalogue's order.
        sums: Names of the values that are added up over rows, micro-batches and ranks.
        maxima: Names of the values whose largest is taken.
        needs_shadow: Whether it reads `CallView.shadow`.
        totals: Those of `indicators` that are sums over rows, not means, maxima or ratios. Ranks
            that make the very same calls would count them several times.
    """

    name: ClassVar[Probe]
    sums: tuple[str, ...] = ()
    maxima: tuple[str, ...] = ()
    needs_shadow: bool = False
    totals: tuple[str, ...] = ()

    def __init__(self, wanted: Collection[str]) -> None:
        needed = {SUMS.get(name, name) for name in wanted}
        self.indicators = tuple(name for name in of_probe(self.name) if name in needed)

    def update(self, view: CallView) -> Found | None:
        """Looks at one call; returns None where there is nothing to measure."""
        raise NotImplementedError

    def reduce(self, values: Sequence[Tensor]) -> list[Tensor]:
        """Reduces the results of S calls, `(S, B, C, R)` or `(S, C)`, to one value a head."""
        return list(values)

    def compute(self, state: Mapping[str, Tensor], loss_scale: float) -> dict[str, Tensor]:
        """Returns the indicators, FP64 `(S, H)`; NaN: no data."""
        raise NotImplementedError


def per_head(rows: Tensor) -> Tensor:
    """Sums `(..., B, H, R)` over batch and rows in FP64."""
    return rows.sum(dim=(-3, -1), dtype=torch.float64)


def counted_rows(row_max: Tensor) -> Tensor:
    """Counts the rows of `(..., B, H, R)` that see a key, FP64 `(..., H)`."""
    return per_head(row_max > -torch.inf)
