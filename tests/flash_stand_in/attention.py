"""Flash attention in plain torch, rounded where kernels for GPUs round."""

from typing import NamedTuple

import torch


class Asked(NamedTuple):
    scale: float
    causal: bool = False
    left: int = -1
    right: int = -1
    softcap: float = 0.0
    dropout_p: float = 0.0
    sinks: torch.Tensor | None = None


def _kept(shape, p, state):
    generator = torch.Generator().manual_seed(int(state.view(torch.int64)[0]))
    return (torch.rand(shape, generator=generator) >= p) / (1 - p)


def _probabilities(q, k, asked):
    """P (H, N, M), lse (H, N) and the slope of the cap, of one document, FP32."""
    k = k.repeat_interleave(q.shape[1] // k.shape[1], 1)
    scores = torch.einsum("nhd,mhd->hnm", q.float(), k.float()) * asked.scale
    slope = torch.ones_like(scores)
    if asked.softcap:
        tanh = (scores / asked.softcap).tanh()
        scores, slope = asked.softcap * tanh, 1 - tanh**2
    rows, keys = scores.shape[1:]
    place = torch.arange(rows)[:, None] + keys - rows
    key = torch.arange(keys)
    hidden = torch.zeros(rows, keys, dtype=torch.bool)
    right = 0 if asked.causal else asked.right
    if right >= 0:
        hidden |= key > place + right
    if asked.left >= 0:
        hidden |= key < place - asked.left
    scores = scores.masked_fill(hidden, -torch.inf)
    lse = scores.logsumexp(-1)
    if asked.sinks is not None:
        lse = torch.logaddexp(lse, asked.sinks.float()[:, None].expand_as(lse))
    weights = (scores - lse.masked_fill(lse.isinf(), 0)[..., None]).exp()
    # FlashAttention's logsumexp of a row that sees nothing.
    return weights, lse.masked_fill(lse == -torch.inf, torch.inf), slope


@torch.autocast("cpu", enabled=False)
def forward(q, k, v, starts_q, starts_k, asked):
    """(T, H, D) with the documents' places; returns out, lse (H, T) and the random state.

    Without places (B, N, H, D), and lse (B, H, N).
    """
    if starts_q is not None:
        return _packed_forward(q, k, v, starts_q, starts_k, asked)
    flat = [x.flatten(0, 1) for x in (q, k, v)]
    out, lse, state = _packed_forward(*flat, _even(q), _even(k), asked)
    lse = lse.unflatten(1, (len(q), -1)).transpose(0, 1).contiguous()
    return out.view(q.shape), lse, state


# Apart: Dynamo never leaves the outer autocast of a decorated function that calls itself.
def _packed_forward(q, k, v, starts_q, starts_k, asked):
    state = torch.zeros(2, dtype=torch.int64)
    if asked.dropout_p:
        state[0] = torch.randint(2**31, ())
    # Tokens behind the last document stay as memory was.
    out, lse = torch.full_like(q, torch.nan), torch.full((q.shape[1], len(q)), torch.nan)
    for a, b, c, d in _documents(starts_q, starts_k):
        weights, lse[:, a:b], _ = _probabilities(q[a:b], k[c:d], asked)
        if asked.dropout_p:
            weights = weights * _kept(weights.shape, asked.dropout_p, state)
        values = v[c:d].repeat_interleave(q.shape[1] // v.shape[1], 1).float()
        out[a:b] = torch.einsum("hnm,mhd->nhd", weights, values).to(q.dtype)
    return out, lse, state


@torch.autocast("cpu", enabled=False)
def backward(d_out, q, k, v, out, lse, starts_q, starts_k, asked, state=None):
    """dq, dk, dv as the inputs lie, and the gradient of the sinks."""
    if starts_q is not None:
        return _packed_backward(d_out, q, k, v, out, lse, starts_q, starts_k, asked, state)
    flat = [x.flatten(0, 1) for x in (d_out, q, k, v, out)]
    lse = lse.transpose(0, 1).flatten(1)
    *gradients, d_sinks = _packed_backward(*flat, lse, _even(q), _even(k), asked, state)
    return *(g.view(x.shape) for g, x in zip(gradients, (q, k, v), strict=True)), d_sinks


def _packed_backward(d_out, q, k, v, out, lse, starts_q, starts_k, asked, state):
    group = q.shape[1] // k.shape[1]
    gradients = [torch.full_like(x, torch.nan) for x in (q, k, v)]
    d_sinks = torch.zeros(q.shape[1])
    # The only use of O.
    delta = (d_out.float() * out.float()).sum(-1).T
    for a, b, c, d in _documents(starts_q, starts_k):
        weights, _, slope = _probabilities(q[a:b], k[c:d], asked)
        values = v[c:d].repeat_interleave(group, 1).float()
        keys = k[c:d].repeat_interleave(group, 1).float()
        d_weights = torch.einsum("nhd,mhd->hnm", d_out[a:b].float(), values)
        dropped = weights
        if asked.dropout_p:
            kept = _kept(weights.shape, asked.dropout_p, state)
            dropped, d_weights = weights * kept, d_weights * kept
        d_scores = weights * (d_weights - delta[:, a:b, None]) * slope
        d_scores = d_scores.to(q.dtype).float() * asked.scale
        d_values = torch.einsum("hnm,nhd->mhd", dropped.to(q.dtype).float(), d_out[a:b].float())
        d_keys = torch.einsum("hnm,nhd->mhd", d_scores, q[a:b].float())
        gradients[0][a:b] = torch.einsum("hnm,mhd->nhd", d_scores, keys).to(q.dtype)
        gradients[1][c:d] = d_keys.unflatten(1, (-1, group)).sum(2).to(q.dtype)
        gradients[2][c:d] = d_values.unflatten(1, (-1, group)).sum(2).to(q.dtype)
        if asked.sinks is not None:
            of_sink = (asked.sinks.float()[:, None] - lse[:, a:b]).exp()
            d_sinks -= (of_sink * delta[:, a:b]).sum(-1)
    return *gradients, d_sinks


def _documents(starts_q, starts_k):
    starts_q, starts_k = starts_q.tolist(), starts_k.tolist()
    return zip(starts_q[:-1], starts_q[1:], starts_k[:-1], starts_k[1:], strict=True)


def _even(x):
    """The places of sequences of one length."""
    return torch.arange(x.shape[0] + 1, dtype=torch.int32) * x.shape[1]
