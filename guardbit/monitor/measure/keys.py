"""What the keys of a head have in common.

A wrong delta gives row i of dQ the error -(delta_lp - delta_hp) sum_j P_ij k_j. A vector that all
keys share is the same in all these rows, so its part of the error adds up. With an exact delta it
cancels, since sum_j dS_ij is 0.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from guardbit.monitor.measure.probes import CallProbe, CallView, Found


class KeyProbe(CallProbe):
    """The size of a sequence's mean key, relative to the keys; a head has its group's keys."""

    name = "keys"
    sums = ("key_means", "key_squares")

    def update(self, view: CallView) -> Found:
        """Takes what the keys of each sequence of a call, or of each packed document, share."""
        heads, k = view.call.q.size(1), view.call.k
        documents = view.call.spec.documents
        starts = None if documents is None else documents.cu_keys
        # Mean squares, which FP32 holds whatever the number of keys; no copy of the keys in FP32.
        lengths = torch.linalg.vector_norm(k, dim=-1, keepdim=True, dtype=torch.float32)
        means, squares = _means(k, starts), _means(lengths.square(), starts)
        parts = means.square().sum(-1), squares[..., 0]
        group = heads // k.size(1)
        of_heads = (part.repeat_interleave(group, 1).sum(0, dtype=torch.float64) for part in parts)
        return Found(range(heads), tuple(of_heads))

    def compute(self, state: Mapping[str, Tensor], loss_scale: float) -> dict[str, Tensor]:
        """See `CallProbe.compute`; NaN where all keys are zero."""
        squares = state["key_squares"]
        share = (state["key_means"] / squares).sqrt().where(squares > 0, torch.nan)
        return {name: share for name in self.indicators}


def _means(x: Tensor, starts: Tensor | None) -> Tensor:
    """Means over the keys of each sequence, FP32 `(P, H, D)`; 0 for an empty document."""
    if starts is None:
        return x.mean(2, dtype=torch.float32)
    keys = torch.arange(x.size(2), device=x.device)
    document = torch.searchsorted(starts[1:].contiguous(), keys, right=True)
    # One more, for the keys behind the last document, which are padding.
    sums = x.new_zeros((len(starts), x.size(1), x.size(3)), dtype=torch.float32)
    sums.index_add_(0, document, x[0].transpose(0, 1).float())
    return sums[:-1] / starts.diff().clamp_min(1)[:, None, None]
