"""Attention by brute force in FP64, with every field of `AttentionSpec`: what tests compare with.

Whole matrices and autograd; nothing of `guardbit.kernels` but the classes that say what is asked.
"""

import math
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from guardbit.kernels.spec import AttentionSpec, Documents
from guardbit.numerics import round_nearest

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


class Forward(NamedTuple):
    """FP64, differentiable: `scores` with cap and masks, and P with the sink's part in `lse`."""

    scores: Tensor
    lse: Tensor
    weights: Tensor
    sink_weights: Tensor
    out: Tensor


class Dense(NamedTuple):
    """All of one call in FP64: as `Forward`, `terms` = P dP, and the gradients."""

    scores: Tensor
    lse: Tensor
    weights: Tensor
    sink_weights: Tensor
    out: Tensor
    terms: Tensor
    dq: Tensor
    dk: Tensor
    dv: Tensor
    d_sinks: Tensor

    @property
    def results(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """O, dQ, dK and dV."""
        return self.out, self.dq, self.dk, self.dv


def packed(query_lengths, key_lengths, device=DEVICE):
    starts = []
    for lengths in (query_lengths, key_lengths):
        sums = [sum(lengths[:n]) for n in range(len(lengths) + 1)]
        starts.append(torch.tensor(sums, dtype=torch.int32, device=device))
    longest = [max(lengths, default=0) for lengths in (query_lengths, key_lengths)]
    return Documents(*starts, *longest)


def seen_keys(spec: AttentionSpec, rows: int, keys: int, device: str | torch.device = DEVICE):
    """Which query sees which key, dense masks apart, by the words of `AttentionSpec`, (N, M)."""
    documents = [(0, rows, 0, keys)]
    if spec.documents is not None:
        queries, starts = (x.tolist() for x in spec.documents[:2])
        documents = list(zip(queries, queries[1:], starts, starts[1:], strict=False))
    seen = torch.zeros(rows, keys, dtype=torch.bool, device=device)
    left, right = spec.window
    for first_query, end_query, first_key, end_key in documents:
        queries, count = end_query - first_query, end_key - first_key
        n = torch.arange(queries, device=device)[:, None]
        m = torch.arange(count, device=device)
        place = n + count - queries
        last = {False: torch.full_like(n, count), True: place, "top-left": n}[spec.causal]
        far = torch.zeros(queries, count, dtype=torch.bool, device=device)
        if left >= 0:
            far |= m < place - left
        if right >= 0:
            far |= m > place + right
        seen[first_query:end_query, first_key:end_key] = (m <= last) & ~far
    return seen


def scores_of(q: Tensor, k: Tensor, spec: AttentionSpec) -> Tensor:
    """What the softmax gets, sinks apart: FP64 (B, H, N, M), -inf where a query sees no key."""
    k = k.double().repeat_interleave(q.shape[1] // k.shape[1], 1)
    hidden = ~seen_keys(spec, q.shape[2], k.shape[2], q.device)
    scores = q.double() @ k.mT * spec.scale
    if spec.softcap:
        scores = spec.softcap * torch.tanh(scores / spec.softcap)
    if spec.score_function is not None:
        positions = (torch.arange(count, device=q.device) for count in scores.shape[1:])
        scores = spec.score_function(scores, *positions)
    if spec.mask is not None and spec.mask.dtype == torch.bool:
        hidden = hidden | ~spec.mask
    elif spec.mask is not None:
        scores = scores + spec.mask
    return scores.masked_fill(hidden, -math.inf)


def largest_products(q: Tensor, k: Tensor, spec: AttentionSpec) -> Tensor:
    """The largest |scale q k| in each row, capped and else as it is, FP64 (B, H, N).

    A key counts if its score, or what is added to it, is within 30 of the row's largest. A row
    counts none if less than -900 is added, in every head, to every key that it could see.
    """
    scores = scores_of(q, k, spec)
    unseen = scores == -math.inf
    plain = scores_of(q, k, replace(spec, mask=None, score_function=None))
    # To products of 0.
    added = scores_of(torch.zeros_like(q), k, spec).masked_fill(unseen, -math.inf)
    top = added.amax(-1, keepdim=True)
    counted = (added >= top - 30) | (scores >= scores.amax(-1, keepdim=True) - 30)
    counted &= ~unseen & (top.amax(1, keepdim=True) >= -900)
    return plain.abs().masked_fill(~counted, -math.inf).amax(-1)


def attend(q, k, v, spec, sinks=None, kept=None) -> Forward:
    """Attention in FP64. A row that sees no key has weights and an output of 0.

    `sinks`, (H,), are in place of those of `spec`, for their gradient. By `kept`, (B, H, N, M),
    dropout multiplies P: 0, or one over the share that stays. Values may have another width.
    """
    scores = scores_of(q, k, spec)
    sinks = spec.sinks if sinks is None else sinks
    if sinks is None:
        sinks = torch.full((q.shape[1],), -math.inf, dtype=torch.float64, device=q.device)
    column = sinks.double()[:, None, None].expand(len(q), -1, q.shape[2], 1)
    every = torch.cat([scores, column], -1)
    dead = (every == -math.inf).all(-1, keepdim=True)
    weights = torch.softmax(every.masked_fill(dead, 0.0), -1).masked_fill(dead, 0.0)
    of_keys = weights[..., :-1]
    used = of_keys if kept is None else of_keys * kept
    out = used @ v.double().repeat_interleave(q.shape[1] // v.shape[1], 1)
    return Forward(scores, every.logsumexp(-1), of_keys, weights[..., -1], out)


def dense(d_out, q, k, v, spec, kept=None) -> Dense:
    """See `Dense`, for all heads, from tensors of any dtype; `kept` as in `attend`."""
    leaves = [x.detach().double().requires_grad_() for x in (q, k, v)]
    none = torch.full((q.shape[1],), -math.inf, dtype=torch.float64, device=q.device)
    sinks = (none if spec.sinks is None else spec.sinks.double()).clone().requires_grad_()
    forward = attend(*leaves, spec, sinks, kept)
    terms = forward.weights * (
        d_out.double() @ leaves[2].repeat_interleave(q.shape[1] // k.shape[1], 1).mT
    )
    terms = terms if kept is None else terms * kept
    gradients = torch.autograd.grad(forward.out, (*leaves, sinks), d_out.double())
    return Dense(*(x.detach() for x in (*forward, terms, *gradients)))


def split(x: Tensor, dtype: torch.dtype, parts: int) -> tuple[Tensor, ...]:
    """x as a sum of narrower numbers, the largest first: three of BF16 hold all bits of FP32."""
    pieces: list[Tensor] = []
    for _ in range(parts):
        pieces.append(round_nearest(x, dtype))
        x = (x - pieces[-1].to(x.dtype)).where(pieces[0].isfinite(), 0)
    return tuple(pieces)


def coherent_error(actual: Tensor, exact: Tensor, dim: int) -> Tensor:
    """The part of an error that adds up, FP64: the signed sum over a dimension, such as rows."""
    return (actual.double() - exact.double()).sum(dim)
