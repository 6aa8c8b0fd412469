"""Backward: dQ, dK, dV with the delta each head's stabilizer calls for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from guardbit.kernels.mask import additive_mask, visible_range
from guardbit.kernels.reference.common import (
    Dropout,
    float32_products,
    fold_groups,
    products_of,
)
from guardbit.kernels.spec import AttentionSpec, Causal
from guardbit.numerics import decode_residual, round_nearest


class Gradients(NamedTuple):
    """Gradients of the loss, each like the tensor that it belongs to."""

    dq: Tensor
    dk: Tensor
    dv: Tensor


@float32_products()
def backward(
    d_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    residual: Tensor | None,
    *,
    causal: Causal,
    scale: float,
    stabilizers: Sequence[str],
    dropout: Dropout | None = None,
    key_tile: int = 128,
) -> Gradients:
    """Backward with the roundings of FlashAttention-2 (paper, Algorithm 2).

    P = exp(S - L) and dS = P (dP - delta) are computed in FP32 and rounded to the input's dtype
    before their products; these accumulate in FP32, over the query heads of a group too, and each
    gradient is scaled and rounded once. delta = rowsum(dO O), or rowsum(dO (O + residual)) in
    compensated heads: with dropout too, as sum_m P_nm M_nm (dO V^T)_nm, with the mask M of what is
    kept, is rowsum(dO O). Rows with no allowed key have gradient 0. E is D here.

    Raises:
        ValueError: If a head is compensated and no residual came, or `causal` is unknown.
    """
    heads, rows = q.shape[1:3]
    keys, kv_heads = k.shape[2], k.shape[1]
    d_out_wide = d_out.float()
    delta = (d_out_wide * out.float()).sum(-1)
    if "compensated" in stabilizers:
        if residual is None:
            raise ValueError("Compensated heads need the forward's residual, but it is None.")
        chosen = torch.tensor(
            [name == "compensated" for name in stabilizers], dtype=torch.bool, device=q.device
        )
        correction = (d_out_wide * decode_residual(out, residual)).sum(-1)
        delta = delta + torch.where(chosen[:, None], correction, 0.0)

    # exp(S - inf) = 0: a row with no allowed key has no probabilities, instead of exp(-inf + inf).
    log_sum = lse.masked_fill(lse == -torch.inf, torch.inf)[..., None]
    q_rows = fold_groups(q.float(), kv_heads)
    d_out_rows = fold_groups(d_out_wide, kv_heads)
    query_positions = torch.arange(rows, device=q.device)
    key_positions = torch.arange(keys, device=q.device)
    visible = visible_range(AttentionSpec(scale, causal), (len(q), heads, rows, keys), q.device)
    dq = torch.zeros_like(q_rows)
    dk, dv = torch.empty_like(k), torch.empty_like(v)

    for start in range(0, keys, key_tile):
        tile = slice(start, start + key_tile)
        k_tile, v_tile = k[:, :, tile].float(), v[:, :, tile].float()
        mask = additive_mask(visible, query_positions, key_positions[tile])
        scores = products_of(q_rows, k_tile, heads, scale).add_(mask)
        probabilities = (scores - log_sum).exp_()
        d_probabilities = (d_out_rows @ v_tile.mT).reshape(scores.shape)
        rounded = round_nearest(probabilities, q.dtype).float()
        if dropout is not None:
            present = slice(start, start + rounded.shape[-1])
            kept = dropout.kept(q.shape[0], query_positions, present)
            rounded = rounded.where(kept, 0)
            d_probabilities = (d_probabilities * dropout.factor).where(kept, 0)
        d_scores = probabilities * (d_probabilities - delta[..., None])
        rounded = fold_groups(rounded, kv_heads)
        d_rounded = fold_groups(round_nearest(d_scores, q.dtype).float(), kv_heads)
        dv_tile = rounded.mT @ d_out_rows
        if dropout is not None:
            dv_tile *= dropout.factor
        dv[:, :, tile] = round_nearest(dv_tile, v.dtype)
        dk[:, :, tile] = round_nearest((d_rounded.mT @ q_rows) * scale, k.dtype)
        dq += d_rounded @ k_tile
    return Gradients(round_nearest(dq * scale, q.dtype).reshape(q.shape), dk, dv)
