"""Which tensors of an attention call hold NaN or infinity, head by head."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from guardbit.catalog import NONFINITE
from guardbit.kernels.attention_call import AttentionCall
from guardbit.monitor.measure.probes import CallProbe, CallView, Found

_FIELDS = {"O": "out", "dO": "d_out", "dQ": "dq", "dK": "dk", "dV": "dv"}


class FiniteProbe(CallProbe):
    """Adds up `NONFINITE` over the tensors that are not finite; a head has its group's keys."""

    name = "finite"
    sums = tuple(f"nonfinite_{name}" for name in NONFINITE)

    def update(self, view: CallView) -> Found:
        """Looks at all tensors of a call; those that are not known count as finite."""
        heads = view.call.q.size(1)
        return Found(range(heads), tuple(_nonfinite(view.call, name, heads) for name in NONFINITE))

    def compute(self, state: Mapping[str, Tensor], loss_scale: float) -> dict[str, Tensor]:
        """See `CallProbe.compute`; NaN, no data, where all is finite."""
        code = sum(
            (state[name] > 0) * float(number)
            for name, number in zip(self.sums, NONFINITE.values(), strict=True)
        )
        assert isinstance(code, Tensor)
        code = code.double()
        return {name: code.where(code > 0, torch.nan) for name in self.indicators}


def _nonfinite(call: AttentionCall, name: str, heads: int) -> Tensor:
    """1 for each head in which a tensor is not finite, else 0, FP64 `(H,)`."""
    x: Tensor | None = getattr(call, _FIELDS.get(name, name))
    if x is None:
        return torch.zeros(heads, dtype=torch.float64, device=call.q.device)
    # The largest size of all, without a copy; NaN and infinity pass through it.
    largest = torch.linalg.vector_norm(x, torch.inf, dim=(0, 2, 3))
    return (~largest.isfinite()).double().repeat_interleave(heads // x.size(1))
