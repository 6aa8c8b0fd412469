"""The indicators' state over the micro-batches and ranks of one sampled step."""

from __future__ import annotations

import torch
from torch import Tensor
from torchmetrics import Metric

from guardbit.kernels import dispatch
from guardbit.kernels.switchboard import AttentionCall
from guardbit.monitor import indicators

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


class AttentionMetrics(Metric):
    """Indicators of every head of every site, from the attention calls of a sampled step.

    All sites share two state tensors, so that ranks exchange one sum and one maximum.

    Args:
        num_sites: Number of sites S.
        num_heads: Largest number of heads H of a site; smaller sites are padded.
        num_rows: Query rows to recompute in each call, evenly spread; None for all.
        eps: Distance from the row maximum, in logits, within which scores count as maxima.
    """

    is_differentiable = False
    full_state_update = False
    sums: Tensor
    maxima: Tensor

    def __init__(
        self, num_sites: int, num_heads: int, num_rows: int | None = None, eps: float = 1e-3
    ) -> None:
        super().__init__()
        self.num_rows = num_rows
        self.eps = eps
        zeros = torch.zeros(len(_SUMS), num_sites, num_heads, dtype=torch.float64)
        self.add_state("sums", zeros, dist_reduce_fx="sum")
        self.add_state(
            "maxima", torch.full((num_sites, num_heads), -torch.inf), dist_reduce_fx="max"
        )

    def update(self, site: int, call: AttentionCall) -> None:
        """Adds one call's rows: FP32 shadow recomputation, row statistics, delta bias.

        Where PyTorch's kernel drops entries of P, nobody else knows which: there the delta bias is
        NaN. The row statistics are of P before that.

        Args:
            site: Index of the site, from 0.
            call: The call.
        """
        rows = self._rows(call.q)
        heads = call.q.size(1)
        shadow = dispatch.shadow(
            call.q,
            call.k,
            call.v,
            causal=call.causal,
            scale=call.scale,
            eps=self.eps,
            rows=rows,
            dropout=call.dropout_of(range(heads)) if call.known_heads else None,
        )
        shared, counted = indicators.shared_maxima(shadow.maxima, shadow.row_max)
        shared_bf16, _ = indicators.shared_maxima(shadow.maxima_bf16, shadow.row_max)
        bias, bias_abs = dispatch.delta_bias(
            call.d_out, call.out, shadow.out, residual=call.residual, rows=rows
        )
        unknown = [head for head in range(heads) if head not in call.known_heads]
        if unknown:
            bias[unknown] = bias_abs[unknown] = torch.nan
        entropy = shadow.entropy.double().sum(dim=(0, 2))
        self._add(site, _SUMS[:6], (counted, shared, shared_bf16, entropy, bias, bias_abs))
        largest = shadow.row_max.amax(dim=(0, 2)).to(self.maxima.device)
        self.maxima[site, :heads] = torch.maximum(self.maxima[site, :heads], largest)

    def audit(self, site: int, call: AttentionCall, heads: list[int], directions: Tensor) -> None:
        """Adds one call's gradient audit: the kernel's dQ against an FP32-accurate backward.

        Args:
            site: Index of the site, from 0.
            call: The call.
            heads: Heads to audit, of the call's known ones; the others stay unmeasured.
            directions: FP32 `(len(heads), D)`, along which the coherent error is taken.
        """
        exact, _, _ = dispatch.exact_backward(
            call.d_out,
            call.q,
            call.k,
            call.v,
            causal=call.causal,
            scale=call.scale,
            heads=heads,
            dropout=call.dropout_of(heads),
        )
        errors = indicators.gradient_error(call.dq[:, heads], exact, directions)
        self._add(site, _SUMS[6:], errors, heads)

    def compute(self) -> Tensor:
        """Returns the indicators, FP64 `(I, S, H)` in the order of `MEASURED`; NaN: no data."""
        total = dict(zip(_SUMS, self.sums, strict=True))
        rows = total["rows"]
        squares, along = total["dq_squares"], total["dq_along"]
        columns = (
            total["multiple_maxima"] / rows,
            total["multiple_maxima_bf16"] / rows,
            self.maxima.double(),
            total["entropy"] / rows,
            total["delta_bias"],
            total["delta_bias_abs"],
            (total["dq_error_squares"] / squares).sqrt().where(squares > 0, torch.nan),
            (total["dq_error_along"] / along).where(along > 0, torch.nan),
        )
        return torch.stack(columns).where(rows > 0, torch.nan)

    def _rows(self, q: Tensor) -> Tensor | None:
        if self.num_rows is None or self.num_rows >= q.size(2):
            return None
        return torch.linspace(0, q.size(2) - 1, self.num_rows, device=q.device).round().long()

    def _add(
        self,
        site: int,
        names: tuple[str, ...],
        values: tuple[Tensor, ...],
        heads: list[int] | None = None,
    ) -> None:
        chosen = slice(values[0].numel()) if heads is None else heads
        start = _SUMS.index(names[0])
        added = torch.stack(values).to(self.sums.device)  # a model may lie on several devices
        self.sums[start : start + len(names), site, chosen] += added


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
