"""Attention calls on tensors that are not (batch, heads, tokens, head size), read as if they were.

They are watched, which needs no kernel of ours. Jagged sequences are read as packed ones, axes
before the heads as one batch, and tensors without an axis of heads as one head.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from guardbit.kernels.spec import AttentionSpec, Documents

_NESTED = "its inputs are nested, in another way than jagged (batch, heads, tokens, head size)"


def why_kept(q: Tensor) -> str:
    """Why a call with such tensors keeps its kernel, as a clause."""
    if q.is_nested:
        return "its inputs are jagged tensors, and a switch needs ordinary ones"
    if q.dim() == 4:
        return "its keys or values are shared by sequences, and a switch needs each with its own"
    one = "; eager they are watched as one head" if q.dim() < 4 else ""
    return f"its inputs have {q.dim()} axes, and a switch needs four: with batch and heads{one}"


def batch_of(q: Tensor, k: Tensor, v: Tensor) -> tuple[int, ...] | str | None:
    """The axes before the heads; None for (batch, heads, tokens, head size); else why not."""
    tensors: tuple[Any, ...] = q, k, v
    if any(x.is_nested for x in tensors):
        are_jagged = all(x.layout is torch.jagged and x.dim() == 4 for x in tensors)
        is_known = are_jagged and all(x._ragged_idx == 2 and x._lengths is None for x in tensors)
        return () if is_known and tensors[1].offsets() is tensors[2].offsets() else _NESTED
    if q.dim() == k.dim() == v.dim() == 4 and q.size(0) == k.size(0) == v.size(0):
        return None
    if not q.dim() == k.dim() == v.dim() >= 2:
        return "its inputs differ in their number of axes"
    before = [x.shape[: -3 if x.dim() > 3 else -2] for x in tensors]
    for of_queries, *others in zip(*before, strict=True):
        if not {of_queries, 1}.issuperset(others):
            return "its queries and keys differ in batch"
    return tuple(before[0])


def in_four_axes(x: Any, batch: Sequence[int] = ()) -> Tensor:
    """Returns a tensor of a call as `(B, H, N, D)`, repeated over a batch."""
    if x.is_nested:
        return x.values()[None]
    x = x if x.dim() > 3 else x.unsqueeze(-3)
    return x.expand(*(batch or x.shape[:-3]), *x.shape[-3:]).reshape(-1, *x.shape[-3:])


def spec_in_four_axes(spec: AttentionSpec, q: Any, k: Any, batch: Sequence[int]) -> AttentionSpec:
    """Returns what a call asks for of the tensors that `in_four_axes` makes."""
    if q.is_nested:
        starts = (x.offsets().to(torch.int32) for x in (q, k))
        lengths = (int(x._get_max_seqlen()) for x in (q, k))
        # Of as many keys as queries, so that first and last ones are aligned alike.
        return replace(spec, causal=bool(spec.causal), documents=Documents(*starts, *lengths))
    mask = spec.mask
    if mask is None or (mask.dim() < 4 and q.dim() > 3) or mask.dim() < 3:
        return spec
    # One that all sequences share stays one.
    is_shared = mask.shape[: -3 if q.dim() > 3 else -2].numel() == 1
    return replace(spec, mask=in_four_axes(mask, () if is_shared else batch))
