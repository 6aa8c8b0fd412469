"""Forward and backward: O, L and the gradients, with each head's own stabilizer."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from guardbit.kernels.mask import additive_mask, visible_range
from guardbit.kernels.reference.common import (
    Dropout,
    count_tied,
    finite_reference,
    float32_products,
    fold_groups,
    products_of,
)
from guardbit.kernels.spec import AttentionSpec, Causal
from guardbit.numerics import decode_residual, encode_residual, round_nearest

#: Ends of row_max's shift, which is SHIFT_MIN + ((beta - 1) |rm| modulo SHIFT_MAX - SHIFT_MIN).
#: P-bar is dithered, and its rounding unbiased, only while the shift differs from row to row.
#: Clamping (beta - 1) |rm| between the ends, the obvious guard against exp(-shift) = 0, gives all
#: rows one shift as soon as |rm| passes SHIFT_MAX, and logits of healthy runs are in the hundreds:
#: coherent error of O, two equal maxima rm of 60 to 72 or of 600 to 720, clamped / none / wrapped:
#: 6.9 / 6.9 / 0.8 (2,048 rows). The ends are multiples of ln 2, so that wrapping changes
#: exp(-shift) by a power of two: P-bar is rounded as the published shift, were there no underflow,
#: would round it. Rows that share one shift, as all with rm = 0 do, are shifted by a power of two,
#: which rounds nothing; another value would add a bias of its own (paper, appendix C).
SHIFT_MIN = math.log(2)
SHIFT_MAX = 12 * math.log(2)
#: FP16 has no room below: P-bar would lose what lies under exp(shift) 2^-25, for 12 ln 2 every key
#: with less than 1e-4 of the largest probability.
SHIFT_MAX_FP16 = 2 * math.log(2)


class Forward(NamedTuple):
    """What the forward returns to the user and keeps for the backward."""

    out: Tensor  # (B, H, N, D) in the input's dtype
    lse: Tensor  # FP32 (B, H, N), L = m + log l; -inf where a row sees no key
    # INT8 (B, H, N, D), what rounding took from O, as `guardbit.numerics` encodes it: delta is
    # taken of out + residual. 0 in heads that are not compensated; None if no head is.
    residual: Tensor | None


@float32_products()
def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: Causal,
    scale: float,
    stabilizers: Sequence[str],
    beta: float = 2.0,
    eps: float = 1e-3,
    head_ids: Sequence[int] | None = None,
    dropout: Dropout | None = None,
    key_tile: int = 128,
) -> Forward:
    """Attention as FlashAttention-2 rounds it (paper, Algorithm 1), with one stabilizer per head.

    Scores, l and the accumulator of O are FP32; P-bar is rounded to the input's dtype before the
    product with V while l sums the unrounded P-bar; O is divided by l and rounded once. FP32 inputs
    round nowhere.

    - none: nothing more.
    - compensated: l sums the rounded P-bar, and the residual P-bar V / l - O is kept for the
      backward. With l of the unrounded P-bar it would lack the mismatch of P-bar and l, which is
      one factor for all features of a row and does not average out in delta. Coherent error of dQ,
      none / that residual / this one: attention sink 2.5 / 0.029 / 0.002, random scores and values
      of one sign 1.65 / 1.15 / 0.06. That L changes by the same factor scales the rows of dS by
      1 + 2^-9 at most, and leaves their sums 0.
    - row_max: where a second score lies within eps of the row maximum rm seen so far,
      m = rm + SHIFT_MIN + ((beta - 1) |rm| mod (SHIFT_MAX - SHIFT_MIN)) instead of m = rm (paper,
      section 4, made safe). Helps where rm differs from row to row.
    - row_max_published: the paper's Algorithm 3, to show where it fails; nothing else offers it.
      Maxima are counted within a tile and m = beta rm, or 0 for rm < 0. Its line 11 is read as
      m = max(m of the tiles before, m' of this one): as printed, m' would take effect one tile late
      and never in the last. 0 / 0 where exp(-(beta - 1) rm) underflows.

    E is D here. `beta`, above 1, is the factor of the row maximum for row_max. Dropout takes P-bar
    once it is rounded; l and L take no notice. A head's bits do not depend on which others are
    computed, except for N = 1: there, products with one row are summed in another order than with
    several query heads to a key head. NaN and infinities come out as in PyTorch's math backend.
    """
    if head_ids is not None:
        chosen = torch.tensor(head_ids, dtype=torch.int64, device=q.device)
        key_heads = chosen // (q.shape[1] // k.shape[1])  # each with a copy of its key head
        q, k, v = q[:, chosen], k[:, key_heads], v[:, key_heads]
    batch, num_heads, rows = q.shape[:3]
    keys, kv_heads = k.shape[2], k.shape[1]
    shifted = _head_mask(stabilizers, "row_max", q.device)
    published = _head_mask(stabilizers, "row_max_published", q.device)

    shift_max = SHIFT_MAX_FP16 if q.dtype == torch.float16 else SHIFT_MAX

    q_rows = fold_groups(q.float(), kv_heads)
    query_positions, key_positions = (torch.arange(n, device=q.device) for n in (rows, keys))
    visible = visible_range(AttentionSpec(scale, causal), (batch, num_heads, rows, keys), q.device)
    row_max = q.new_full((batch, num_heads, rows), -torch.inf, dtype=torch.float32)
    tied = torch.zeros_like(row_max, dtype=torch.bool)
    normalizer, row_sum = row_max, torch.zeros_like(row_max)
    compensated = _head_mask(stabilizers, "compensated", q.device)
    accumulator = q.new_zeros(q.shape, dtype=torch.float32)

    for start in range(0, keys, key_tile):
        tile = slice(start, start + key_tile)
        mask = additive_mask(visible, query_positions, key_positions[tile])
        scores = products_of(q_rows, k[:, :, tile].float(), num_heads, scale).add_(mask)
        tile_max = scores.amax(-1)
        before, row_max = row_max, row_max.maximum(tile_max)
        before_normalizer, normalizer = normalizer, row_max
        if shifted is not None:
            # Exact across tiles without the scores of earlier ones: when the maximum rises by no
            # more than eps, the old one is the second score within eps of the new.
            tied = torch.where(tile_max > before, count_tied(scores, tile_max, eps) > 1, tied)
            tied |= (tile_max - before).abs() <= eps
            shift = SHIFT_MIN + ((beta - 1) * row_max.abs()) % (shift_max - SHIFT_MIN)
            normalizer = torch.where(shifted & tied, row_max + shift, normalizer)
        if published is not None:
            are_tied = count_tied(scores, tile_max, eps) > 1
            rule = torch.where(are_tied, beta * tile_max.relu(), tile_max)
            normalizer = torch.where(published, before_normalizer.maximum(rule), normalizer)

        reference = finite_reference(normalizer)
        probabilities = (scores - reference[..., None]).exp_()
        rescale = (before_normalizer - reference).exp()
        rounded = round_nearest(probabilities, q.dtype).float()
        tile_sum = probabilities.sum(-1)
        if compensated is not None:
            tile_sum = torch.where(compensated, rounded.sum(-1), tile_sum)
        row_sum = row_sum * rescale + tile_sum
        if dropout is not None:
            present = slice(start, start + rounded.shape[-1])
            rounded = rounded.where(dropout.kept(batch, query_positions, present), 0)
        products = (fold_groups(rounded, kv_heads) @ v[:, :, tile].float()).reshape(q.shape)
        accumulator = accumulator.mul_(rescale[..., None]).add_(products)

    # Divided by 1, a row with no allowed key keeps its 0, and L = -inf + log 1.
    row_sum = row_sum.masked_fill(row_max == -torch.inf, 1.0)
    exact = accumulator / row_sum[..., None]
    if dropout is not None:
        exact *= dropout.factor
    out = round_nearest(exact, q.dtype)
    residual = None
    if compensated is not None:
        residual = encode_residual(exact, out).where(compensated[..., None], 0)
    return Forward(out, normalizer + row_sum.log(), residual)


def _head_mask(stabilizers: Sequence[str], name: str, device: torch.device) -> Tensor | None:
    """Which heads have this stabilizer, boolean (H, 1), or None if no head has."""
    if name not in stabilizers:
        return None
    mask = [[stabilizer == name] for stabilizer in stabilizers]
    return torch.tensor(mask, dtype=torch.bool, device=device)


# --- backward ------------------------------------------------------------------------------------


class Gradients(NamedTuple):
    """Gradients of the loss; `d_mask` and `d_sinks` only where they were asked for."""

    dq: Tensor
    dk: Tensor
    dv: Tensor
    d_mask: Tensor | None = None
    d_sinks: Tensor | None = None


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
    compensated heads, with dropout too. Rows with no allowed key have gradient 0.
    """
    heads, rows = q.shape[1:3]
    keys, kv_heads = k.shape[2], k.shape[1]
    d_out_wide = d_out.float()
    delta = (d_out_wide * out.float()).sum(-1)
    compensated = _head_mask(stabilizers, "compensated", q.device)
    if compensated is not None:
        assert residual is not None
        correction = (d_out_wide * decode_residual(out, residual)).sum(-1)
        delta = delta + torch.where(compensated, correction, 0.0)

    # exp(S - inf) = 0: a row with no allowed key has no probabilities, instead of exp(-inf + inf).
    log_sum = lse.masked_fill(lse == -torch.inf, torch.inf)[..., None]
    q_rows = fold_groups(q.float(), kv_heads)
    d_out_rows = fold_groups(d_out_wide, kv_heads)
    query_positions, key_positions = (torch.arange(n, device=q.device) for n in (rows, keys))
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
