"""Multiples of the error of delta, to be handed to a kernel's backward in place of the exact delta.

A kernel's own delta is rowsum(dO * O) with O rounded. Its error is what it lies above the exact
one. `exact_delta` takes the error away. So that nothing else differs, the runs of this module go
the same way, through the same O', and hand on

    delta_exact + factor * error,

with factor 1 (what the kernel would have done by itself: a switch that switches nothing), 0, -1
(the error with its sign turned), 2, or a sign drawn anew for each row at each step (the error's
size without its bias).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from guardbit.kernels import dispatch
from guardbit.kernels.reference.delta import ENOUGH, FIRST_COLUMNS, HALF_STEP, _carrying_terms
from guardbit.kernels.spec import AttentionSpec

#: The error with a sign that is drawn for each row.
RANDOM = "random"

#: What `--delta-error` takes.
FACTORS = ("-1", "0", "1", "2", RANDOM)


class HandOn:
    """Stands in for the entry "exact_delta" of `guardbit.kernels.heads.DELTAS`.

    Args:
        factor: One of `FACTORS`.
        seed: Of the signs that are drawn.

    Attributes:
        rows: How many rows it was asked for.
        kept: How many of them kept their O, and with it the kernel's own delta, because the first
            columns of their dO cannot carry another one. A tensor, once there was a call.
    """

    def __init__(self, factor: str, seed: int) -> None:
        self.factor, self.seed = factor, seed
        self.rows, self.kept = 0, torch.zeros(())
        self._generator: torch.Generator | None = None

    def __call__(
        self,
        d_out: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        *,
        spec: AttentionSpec,
        head_ids: Sequence[int],
        into: Tensor | None,
    ) -> Tensor:
        """See `guardbit.kernels.heads.DELTAS`."""
        exact = dispatch.exact_delta(d_out, q, k, v, lse, spec=spec, head_ids=head_ids)
        heads = list(head_ids)
        gradients = d_out[:, heads].float()
        error = (gradients * out[:, heads].float()).sum(-1) - exact
        wanted = exact + self._factors(error) * error
        carrier, rest, third = _carrying_terms(gradients[..., :FIRST_COLUMNS], wanted, out.dtype)
        carries = rest.abs() <= (wanted.abs() * ENOUGH).maximum(third * HALF_STEP)
        carried = torch.empty_like(out).copy_(out) if into is None else into
        wide = torch.nn.functional.pad(carrier, (0, out.shape[-1] - carrier.shape[-1]))
        carried[:, heads] = torch.where(carries[..., None], wide, out[:, heads])
        self.rows += carries.numel()
        self.kept = self.kept.to(carries.device) + (~carries).sum()
        return carried

    def _factors(self, error: Tensor) -> Tensor | float:
        if self.factor != RANDOM:
            return float(self.factor)
        if self._generator is None:
            # One of its own: the run's other random numbers stay what they are.
            self._generator = torch.Generator(error.device).manual_seed(self.seed)
        signs = torch.randint(0, 2, error.shape, device=error.device, generator=self._generator)
        return 2.0 * signs - 1.0
