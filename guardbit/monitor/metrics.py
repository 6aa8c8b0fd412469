"""The indicators' state over the micro-batches and ranks of one sampled step."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torchmetrics import Metric

from guardbit.kernels import dispatch
from guardbit.kernels.constants import device_constant
from guardbit.kernels.switchboard import AttentionCall
from guardbit.monitor import indicators

#: The indicators `AttentionMetrics.compute` returns, in its order.
MEASURED: tuple[str, ...] = (
    "multiple_maxima",
    "multiple_maxima_bf16",
    "max_logit",
    "attention_entropy",
    "delta_bias",
    "delta_bias_abs",
    "dq_relative_error",
    "dq_coherent_error",
)

#: Those that are sums over rows, of the difference of delta; all others are means or maxima.
SUMMED = frozenset({"delta_bias", "delta_bias_abs"})

# Those that are taken from the difference of dQ; those that are left from the rows' scores.
_OF_GRADIENTS = frozenset({"dq_relative_error", "dq_coherent_error"})

#: What `AttentionMetrics` adds up, in the order of its state.
_SUMS = (
    "rows",
    "multiple_maxima",
    "multiple_maxima_bf16",
    "entropy",
    "delta_bias",
    "delta_bias_abs",
    "dq_error_squares",
    "dq_squares",
    "dq_error_along",
    "dq_along",
)

#: Bytes to hold back before they are added up.
_MOST_HELD = 2**25


class _Held(NamedTuple):
    """What one call's rows look like, to be added up with others.

    Attributes:
        site: Index of the site.
        heads: Numbers of the heads that are meant, C of them.
        rows: `(B, C, R)` each; of an audit `indicators.gradient_error`.
        sums: `(C,)` each, over the rows of an update: the delta bias and its size, if wanted.
        is_audit: Whether this is of an audit.
    """

    site: int
    heads: tuple[int, ...]
    rows: tuple[Tensor, ...]
    sums: tuple[Tensor, ...] = ()
    is_audit: bool = False


class AttentionMetrics(Metric):
    """Indicators of every head of every site, from the attention calls of a sampled step.

    All sites share two state tensors, so that ranks exchange one sum and one maximum. Calls are
    held back and added up many at a time: single small kernels would keep the host busier than the
    device. So there are four ways in and out, `update`, `audit`, `finish` and `compute`; most else
    that torchmetrics offers does not know what is held back.

    `max_logit` is the largest |score| over allowed keys: rounding is as coarse below 0 as above,
    and softmax does not see a constant, so scores may grow where no row's maximum shows it. The
    recorded runs of `tests/data/runs` are older and hold the largest score with its sign.

    Args:
        num_sites: Number of sites S.
        num_heads: Largest number of heads H of a site; smaller sites are padded.
        num_rows: Query rows to recompute in each call, evenly spread; None for all.
        eps: Distance from the row maximum, in logits, within which scores count as maxima.
        wanted: Which of `MEASURED` to measure; what only the others need is not computed, and they
            mean nothing.
    """

    is_differentiable = False
    full_state_update = False
    sums: Tensor
    maxima: Tensor

    def __init__(
        self,
        num_sites: int,
        num_heads: int,
        num_rows: int | None = None,
        eps: float = 1e-3,
        wanted: Collection[str] = MEASURED,
    ) -> None:
        super().__init__()
        self.wanted = frozenset(wanted)
        self.num_rows = num_rows
        self.eps = eps
        self._held: list[_Held] = []
        self._held_bytes = 0
        zeros = torch.zeros(len(_SUMS), num_sites, num_heads, dtype=torch.float64)
        self.add_state("sums", zeros, dist_reduce_fx="sum")
        self.add_state(
            "maxima", torch.full((num_sites, num_heads), -torch.inf), dist_reduce_fx="max"
        )

    def update(self, site: int, call: AttentionCall, first: int = 0) -> None:
        """Adds one call's rows, if wanted: FP32 recomputation, row statistics, delta bias.

        Where PyTorch's kernel drops entries of P, nobody else knows which: there the delta bias is
        NaN. So it is where the backward takes delta from P itself, and not from a rounded O. The
        row statistics are of P before anything is dropped.

        Args:
            site: Index of the site, from 0.
            call: The call.
            first: Number of its first head, where other ranks have those before.
        """
        if self.wanted <= _OF_GRADIENTS:
            return
        rows = self._rows(call.q)
        heads = call.q.size(1)
        shadow = dispatch.shadow(
            call.q,
            call.k,
            call.v,
            spec=call.spec,
            eps=self.eps,
            query_ids=rows,
            dropout=call.dropout_of(range(heads)) if call.known_heads else None,
        )
        sums: tuple[Tensor, ...] = ()
        if self.wanted & SUMMED:
            sums = _delta_bias(call, shadow.out, rows)
        rows_seen = (
            shadow.maxima, shadow.maxima_bf16, shadow.row_max, shadow.entropy, shadow.largest
        )  # fmt: skip
        numbers = tuple(range(first, first + heads))
        self._hold_back(_Held(site, numbers, rows_seen, sums))

    def audit(
        self,
        site: int,
        call: AttentionCall,
        heads: list[int],
        directions: Tensor,
        first: int = 0,
    ) -> None:
        """Adds one call's gradient audit: the kernel's dQ against an FP32-accurate backward.

        Args:
            site: Index of the site, from 0.
            call: The call; it has `d_out` and `dq`.
            heads: Heads to audit, of the call's known ones; the others stay unmeasured.
            directions: FP32 `(H, D)`, along which the coherent error is taken.
            first: As for `update`.
        """
        assert call.d_out is not None and call.dq is not None
        exact = dispatch.exact_query_gradient(
            call.d_out,
            call.q,
            call.k,
            call.v,
            spec=call.spec,
            head_ids=heads,
            dropout=call.dropout_of(heads),
        )
        index = device_constant(tuple(heads), torch.int64, call.dq.device)
        rows = indicators.gradient_error(
            call.dq.index_select(1, index), exact, directions.index_select(0, index)
        )
        numbers = tuple(first + head for head in heads)
        self._hold_back(_Held(site, numbers, rows, is_audit=True))

    def finish(self) -> None:
        """Adds up what is held back, which `compute` needs done.

        By itself, because an error is to be met before ranks begin to exchange their states.
        """
        held, self._held, self._held_bytes = self._held, [], 0
        alike: dict[Any, list[_Held]] = {}
        for entry in held:
            first = entry.rows[0]
            alike.setdefault((entry.is_audit, first.shape, first.device), []).append(entry)
        for entries in alike.values():
            rows = _stacked([entry.rows for entry in entries])
            sums = _stacked([entry.sums for entry in entries])
            if entries[0].is_audit:
                self._add(_SUMS[6:], entries, [indicators.per_head(x) for x in rows])
                continue
            maxima, maxima_bf16, row_max, entropy, sizes = rows
            shared, counted = indicators.shared_maxima(maxima, row_max)
            shared_bf16, _ = indicators.shared_maxima(maxima_bf16, row_max)
            entropies = indicators.per_head(entropy)
            added = [counted, shared, shared_bf16, entropies, *sums]
            self._add(_SUMS[: len(added)], entries, added)
            places = self._places(entries)
            largest = sizes.amax((1, 3)).flatten().to(self.maxima.device)
            flat = self.maxima.view(-1)
            flat.index_copy_(0, places, torch.maximum(flat.index_select(0, places), largest))

    def compute(self) -> Tensor:
        """Returns the indicators, FP64 `(I, S, H)` in the order of `MEASURED`; NaN: no data."""
        self.finish()
        total = dict(zip(_SUMS, self.sums, strict=True))
        rows = total["rows"]
        squares, along = total["dq_squares"], total["dq_along"]
        of_rows = (
            total["multiple_maxima"] / rows,
            total["multiple_maxima_bf16"] / rows,
            self.maxima.double(),
            total["entropy"] / rows,
            total["delta_bias"],
            total["delta_bias_abs"],
        )
        of_gradients = (
            (total["dq_error_squares"] / squares).sqrt().where(squares > 0, torch.nan),
            # Squares of what is below 1e-23 are lost: of so small a dQ neither error says anything.
            (total["dq_error_along"] / along).where((squares > 0) & (along > 0), torch.nan),
        )
        return torch.cat(
            [torch.stack(of_rows).where(rows > 0, torch.nan), torch.stack(of_gradients)]
        )

    def on_table(
        self, places: Sequence[int | None], num_sites: int, num_heads: int
    ) -> AttentionMetrics:
        """What was measured so far, with the sites in other places, as ranks have agreed on them.

        Args:
            places: The new place of each site; None: nowhere.
            num_sites: Number of sites of the new table.
            num_heads: Largest number of heads of a site of it.
        """
        self.finish()
        table = AttentionMetrics(num_sites, num_heads, self.num_rows, self.eps, self.wanted)
        table = table.to(self.sums.device)
        for old, new in enumerate(places):
            if new is not None:
                heads = min(num_heads, self.maxima.size(1))
                table.sums[:, new, :heads] = self.sums[:, old, :heads]
                table.maxima[new, :heads] = self.maxima[old, :heads]
        table._update_count = 1
        return table

    def _rows(self, q: Tensor) -> Tensor | None:
        if self.num_rows is None or self.num_rows >= q.size(2):
            return None
        return torch.linspace(0, q.size(2) - 1, self.num_rows, device=q.device).round().long()

    def sync(self, *args: Any, **kwargs: Any) -> None:
        """As torchmetrics has it, of all that was given."""
        self.finish()
        super().sync(*args, **kwargs)

    def reset(self) -> None:
        """Forgets everything, what is held back too."""
        self._held, self._held_bytes = [], 0
        super().reset()

    def _hold_back(self, new: _Held) -> None:
        # A site's second call may not join its first: their sums go to one place.
        again = any(x.site == new.site and x.is_audit == new.is_audit for x in self._held)
        size = sum(tensor.nbytes for tensor in (*new.rows, *new.sums))
        if again or (self._held and self._held_bytes + size > _MOST_HELD):
            self.finish()
        self._held.append(new)
        self._held_bytes += size
        if size > _MOST_HELD:
            self.finish()

    def _add(self, names: Sequence[str], entries: list[_Held], values: Iterable[Tensor]) -> None:
        """Adds `(S, C)` of each of some sums, S sites with C heads each."""
        start = _SUMS.index(names[0])
        added = torch.stack([x.flatten() for x in values]).to(self.sums.device)
        rows = self.sums[start : start + len(names)].view(len(names), -1)
        rows.index_add_(1, self._places(entries), added)

    def _places(self, entries: list[_Held]) -> Tensor:
        """Where the heads of some sites lie in the state, sites and heads in one dimension."""
        num_heads = self.maxima.size(1)
        places = tuple(e.site * num_heads + head for e in entries for head in e.heads)
        return device_constant(places, torch.int64, self.sums.device)


def _stacked(parts: list[tuple[Tensor, ...]]) -> list[Tensor]:
    """The n-th tensors of all parts in one, `(S, ...)`; of a single part without a copy."""
    if len(parts) == 1:
        return [tensor[None] for tensor in parts[0]]
    return [torch.stack(tensors) for tensors in zip(*parts, strict=True)]


def _delta_bias(call: AttentionCall, exact: Tensor, rows: Tensor | None) -> tuple[Tensor, Tensor]:
    """The sums of `dispatch.delta_bias`, NaN in heads of which they cannot be known."""
    heads = call.q.size(1)
    if call.d_out is None or call.out is None:
        nothing = torch.full((heads,), torch.nan, device=call.q.device)
        return nothing, nothing
    sums = dispatch.delta_bias(call.d_out, call.out, exact, residual=call.residual, query_ids=rows)
    unknown = [head for head in range(heads) if head not in call.known_heads]
    if unknown:
        for values in sums:
            values[unknown] = torch.nan
    return sums
