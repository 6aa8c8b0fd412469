"""Runs the backward of an attention call a second time, and compares the gradients."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from guardbit.monitor.measure.probes import CallProbe, CallView, Found

_TENSORS = ("dq", "dk", "dv")

# Half a unit in the last place of 1 in FP16.
_FINEST = 2.0**-11


class RepeatProbe(CallProbe):
    """By how much two backwards on the same tensors differ; a head has its group's keys."""

    name = "repeats"
    sums = tuple(f"{part}_{name}" for name in _TENSORS for part in ("repeat_change", "repeat_size"))

    def update(self, view: CallView) -> Found | None:
        """Runs the backward again, if it is asked for and possible."""
        call = view.call
        if not view.repeats or call.again is None or call.dq is None:
            return None
        # Sums are in FP32 at best: of FP32 tensors their order changes many of the last bits.
        heads, unit = call.q.size(1), max(torch.finfo(call.q.dtype).eps / 2, _FINEST)
        values: list[Tensor] = []
        for first, second in zip((call.dq, call.dk, call.dv), call.again(), strict=True):
            if first is None:
                return None
            # Squares of tiny gradients would vanish in FP32.
            for x in ((second - first) / unit, first):
                size = torch.linalg.vector_norm(x, dim=(0, 2, 3), dtype=torch.float64)
                values.append(size.square().repeat_interleave(heads // x.size(1)))
        return Found(range(heads), tuple(values))

    def compute(self, state: Mapping[str, Tensor], loss_scale: float) -> dict[str, Tensor]:
        """See `CallProbe.compute`; NaN where no backward was run again."""
        shares = []
        for name in _TENSORS:
            size = state[f"repeat_size_{name}"]
            share = (state[f"repeat_change_{name}"] / size).sqrt()
            shares.append(share.where(size > 0, torch.nan))
        largest = torch.stack(shares).nan_to_num(-1.0).amax(0)
        return {name: largest.where(largest >= 0, torch.nan) for name in self.indicators}
