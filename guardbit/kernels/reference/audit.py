"""The FP32 results that a kernel is compared with: O, row statistics and gradients."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from guardbit.kernels.mask import IRRELEVANT, NO_KEY, in_documents, mask_tile, visible_range
from guardbit.kernels.reference.common import (
    Dropout,
    cap_slope,
    capped,
    count_tied,
    finite_reference,
    float32_products,
    fold_groups,
    modified,
    modified_backward,
    products_of,
)
from guardbit.kernels.reference.delta import recomputed
from guardbit.kernels.spec import AttentionSpec
from guardbit.numerics import decode_residual, round_nearest


class Shadow(NamedTuple):
    """A recomputed forward and statistics of its rows; R is the number of rows.

    With dropout, `out` lacks the dropped entries; all else is before dropout. Scores are the inputs
    of the softmax, with soft cap and biases; biases are what a mask adds, and what a score function
    makes of 0. A sink is no score, but it takes its part of the probabilities. A row whose biases
    are below `guardbit.kernels.mask.NO_KEY` in all heads sees no key: it has row_max and largest
    -inf, entropy 0 and counts 0, and out is what the softmax makes of its scores, 0 for none.
    """

    out: Tensor  # FP32 (B, H, R, E)
    row_max: Tensor  # FP32 (B, H, R), the largest score
    # INT64 (B, H, R), how many FP32 scores lie within eps of row_max, itself included.
    maxima: Tensor
    # INT64 (B, H, R), the same with scores and maximum rounded to BF16 first: the ties that the
    # paper's code, which keeps scores in BF16, sees (section 3.3).
    maxima_bf16: Tensor
    # FP32 (B, H, R), entropy in nats of the row's probabilities, its sink's included.
    entropy: Tensor
    # FP32 (B, H, R), the largest |scale q k|, after the soft cap and before a score function and
    # biases, of the keys whose score or bias lies within `guardbit.kernels.mask.IRRELEVANT` of the
    # row's largest. Unlike row_max it shows scores far below 0. NaN where row_max is NaN.
    largest: Tensor


# Scores that are looked at together; a CPU's cache holds fewer.
_TOGETHER = {"cuda": 2**24, "cpu": 2**20}


def _scored(
    q: Tensor, k: Tensor, spec: AttentionSpec, query_ids: Tensor | None
) -> Iterator[tuple[Tensor, ...]]:
    """Numbers of some rows, FP32 scores (B, H, R, M), `row_max`, `largest`, which see no key."""
    shape = (len(q), q.shape[1], q.shape[2], k.shape[2])
    heads, numbers, keys = (torch.arange(count, device=q.device) for count in shape[1:])
    visible = visible_range(spec, shape, q.device)
    q, k = map(in_documents, (q, k), spec.starts)
    k = k.float()
    together = _TOGETHER["cuda" if q.is_cuda else "cpu"]
    step = max(1, together // max(1, shape[0] * shape[1] * shape[3]))
    for ids in (numbers if query_ids is None else query_ids).split(step):
        tile = heads, ids, keys
        q_rows = fold_groups(q[:, :, ids].float(), k.shape[1])
        plain = capped(products_of(q_rows, k, shape[1], spec.scale), spec.softcap)
        made = modified(plain, spec, tile)
        bias = mask_tile(spec, shape, *tile, visible).float().expand(plain.shape)
        scores = made + bias
        if made is not plain:
            # What is multiplied or capped makes nothing of 0, but NaN of a quotient, which adds 0.
            bias = bias + modified(torch.zeros_like(plain), spec, tile).nan_to_num_(
                0.0, torch.inf, -torch.inf
            )
            bias.masked_fill_((made == -torch.inf) & plain.isfinite(), -torch.inf)
        row_max, top_bias = _largest(scores), _largest(bias)
        near = scores >= (row_max - IRRELEVANT)[..., None]
        near |= bias >= (top_bias - IRRELEVANT)[..., None]
        largest = _largest(plain.abs_().where(near & (bias > -torch.inf), -torch.inf))
        largest = largest.where(~row_max.isnan(), row_max)
        yield ids, scores, row_max, largest, top_bias.amax(1, keepdim=True) < NO_KEY


def _largest(x: Tensor) -> Tensor:
    return x.amax(-1) if x.shape[-1] else x.new_full(x.shape[:-1], -torch.inf)


@float32_products()
def shadow(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    spec: AttentionSpec,
    eps: float = 1e-3,
    query_ids: Tensor | None = None,
    dropout: Dropout | None = None,
) -> Shadow:
    """Recomputes O in FP32 and counts maxima, some rows at a time."""
    v = in_documents(v, spec.starts[1]).float()
    parts = []
    for ids, scores, row_max, largest, sees_nothing in _scored(q, k, spec, query_ids):
        reference = finite_reference(row_max)[..., None]
        maxima = count_tied(scores, row_max, eps)
        row_max_bf16 = round_nearest(row_max, torch.bfloat16).float()
        maxima_bf16 = count_tied(round_nearest(scores, torch.bfloat16), row_max_bf16, eps)
        probabilities = scores.sub_(reference).exp_()
        row_sum = probabilities.sum(-1)
        weighted_logs = torch.special.entr(probabilities).sum(-1)
        if dropout is not None:
            kept = dropout.kept(len(q), ids, slice(0, k.shape[2]))
            probabilities = (probabilities * dropout.factor).where(kept, 0)
        out = (fold_groups(probabilities, k.shape[1]) @ v).reshape(*row_max.shape, v.shape[-1])
        if spec.sinks is not None:
            # All relative to the larger of the row's maximum and its sink.
            sink = spec.sinks.float()[:, None] - reference[..., 0]
            top = sink.relu()
            share, decay = (sink - top).exp_(), (-top).exp_()
            weighted_logs = weighted_logs * decay + top * (row_sum * decay)
            weighted_logs += torch.special.entr(share)
            row_sum = row_sum * decay + share
            out *= decay[..., None]
        row_sum = row_sum.masked_fill(row_sum == 0, 1.0)
        entropy = row_sum.log() + weighted_logs / row_sum
        parts.append(
            Shadow(
                out=out / row_sum[..., None],
                row_max=row_max.masked_fill(sees_nothing, -torch.inf),
                maxima=maxima.masked_fill(sees_nothing, 0),
                maxima_bf16=maxima_bf16.masked_fill(sees_nothing, 0),
                entropy=entropy.masked_fill(sees_nothing, 0.0),
                largest=largest.masked_fill(sees_nothing, -torch.inf),
            )
        )
    return Shadow(*(torch.cat(of_rows, 2) for of_rows in zip(*parts, strict=True)))


def delta_bias(
    d_out: Tensor,
    out: Tensor,
    exact: Tensor,
    *,
    row_max: Tensor | None = None,
    residual: Tensor | None = None,
    query_ids: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The error of delta = rowsum(dO * O) that adds up (paper, equation 3 and figure 5a).

    `exact` and `row_max` come from a `Shadow` of the same rows. A row that sees no key counts 0,
    because engines differ in the O that they leave there. Returns FP64 (H,), the sum over batch and
    rows of delta_lp - delta_hp, and of its absolute value.
    """
    if query_ids is not None:
        d_out, out = d_out[:, :, query_ids], out[:, :, query_ids]
        residual = None if residual is None else residual[:, :, query_ids]
    used = out if residual is None else decode_residual(out, residual).add_(out)
    # One FP32 tensor of the size of O at a time, as `exact` is.
    bias = (used - exact).mul_(d_out).sum(-1).double()
    if row_max is not None:
        bias.masked_fill_(row_max == -torch.inf, 0.0)
    return bias.sum(dim=(0, 2)), bias.abs().sum(dim=(0, 2))


@float32_products()
def exact_query_gradient(
    d_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    spec: AttentionSpec,
    head_ids: Sequence[int],
    dropout: Dropout | None = None,
    chunk: int = 128,
) -> Tensor:
    """Computes dQ of a few heads in FP32 throughout, (B, C, N, D), from the inputs a kernel got.

    delta is rowsum(P dP), which equals rowsum(dO O) of the unrounded O and makes the rows of dS sum
    to 0 as nearly as FP32 can; with dropout dP is 0 where P was dropped.
    """
    dq = q.new_zeros((len(q), len(head_ids), *q.shape[2:]), dtype=torch.float32)
    k = in_documents(k, spec.starts[1])
    for terms in recomputed(d_out, q, k, v, spec, head_ids, chunk):
        row_sum, d_probabilities = terms.row_sum, terms.d_probabilities
        probabilities = terms.probabilities.div_(row_sum.masked_fill(row_sum == 0, 1.0))
        if dropout is not None:
            own = dropout._replace(head_ids=tuple(dropout.head_ids[i] for i in terms.places))
            d_probabilities *= own.kept(len(q), terms.tile[1], terms.keys) * dropout.factor
        delta = (probabilities * d_probabilities).sum(-1, keepdim=True)
        d_scores = probabilities * (d_probabilities - delta)
        d_scores = modified_backward(d_scores, terms.capped, spec, terms.tile)
        if spec.softcap > 0:
            d_scores *= cap_slope(terms.products, spec.softcap)
        k_seen = k[:, terms.key_head, None, terms.keys].to(d_scores.dtype)
        dq[:, terms.places, terms.rows] = (d_scores @ k_seen * spec.scale).float()
    return dq


def gradient_error(
    dq: Tensor, exact: Tensor, directions: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Of each row `(..., N, D)`: squared norms of dQ's error and of the exact dQ.

    Then both along the direction of their head, `(C, D)`, or of all, `(D,)`.
    """
    error, columns = dq - exact, directions[..., None]
    along, exact_along = ((x.to(directions.dtype) @ columns)[..., 0] for x in (error, exact))
    squares, exact_squares = (torch.linalg.vector_norm(x, dim=-1).square() for x in (error, exact))
    return squares, exact_squares, along, exact_along
