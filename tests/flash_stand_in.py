"""Flash attention in plain torch on the CPU, for libraries that have kernels for GPUs only.

It rounds where their kernels round: O to the format of q, and dS before it is multiplied. Its
backward computes delta = rowsum(dO * O) from the O that it is handed, as theirs do. Written apart
from GuardBit's own references.

`aten_kernels` puts it under the ops that PyTorch's `varlen_attn` calls, `modules` makes modules
like those of flash_attn 2, 3 and 4 of it, with the parameters that these have.
"""

import sys
import types
from importlib.machinery import ModuleSpec
from typing import NamedTuple

import torch


class Asked(NamedTuple):
    """What one call asks for."""

    scale: float
    causal: bool = False
    left: int = -1
    right: int = -1
    softcap: float = 0.0
    sinks: torch.Tensor | None = None
    dropout_p: float = 0.0


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
    """(T, H, D) with the documents' places; returns out, lse (H, T) and the random state."""
    state = torch.zeros(2, dtype=torch.int64)
    if asked.dropout_p:
        state[0] = torch.randint(2**31, ())
    out, lse = torch.zeros_like(q), torch.full((q.shape[1], len(q)), torch.inf)
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
    group = q.shape[1] // k.shape[1]
    gradients = [torch.zeros_like(x) for x in (q, k, v)]
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


def _batched(q, k, v, asked):
    """As `forward`, of (B, N, H, D)."""
    flat = [x.flatten(0, 1) for x in (q, k, v)]
    out, lse, state = forward(*flat, _even(q), _even(k), asked)
    lse = lse.unflatten(1, (len(q), -1)).transpose(0, 1).contiguous()
    return out.view(q.shape), lse, state


def _batched_backward(d_out, q, k, v, out, lse, asked, state):
    flat = [x.flatten(0, 1) for x in (d_out, q, k, v, out)]
    lse = lse.transpose(0, 1).flatten(1)
    *gradients, d_sinks = backward(*flat, lse, _even(q), _even(k), asked, state)
    return *(g.view(x.shape) for g, x in zip(gradients, (q, k, v), strict=True)), d_sinks


def aten_kernels():
    """Gives the ops under `varlen_attn` kernels for the CPU; returns what takes them back."""
    library = torch.library.Library("aten", "IMPL")

    def flash_forward(
        query, key, value, cum_seq_q, cum_seq_k, max_q, max_k, dropout_p, is_causal,
        return_debug_mask, *, scale=None, window_size_left=None, window_size_right=None,
        seqused_k=None, alibi_slopes=None, **others,
    ):  # fmt: skip
        assert dropout_p == 0 and max_q >= cum_seq_q.diff().max() and seqused_k is None
        asked = Asked(
            query.shape[-1] ** -0.5 if scale is None else scale,
            is_causal, window_size_left, window_size_right,
        )  # fmt: skip
        out, lse, state = forward(query, key, value, cum_seq_q, cum_seq_k, asked)
        return out, lse, state.view(torch.uint64), query.new_empty(0), query.new_empty(0)

    def flash_backward(
        grad_out, query, key, value, out, logsumexp, cum_seq_q, cum_seq_k, max_q, max_k,
        dropout_p, is_causal, rng_state, unused, *, scale=None, window_size_left=None,
        window_size_right=None,
    ):  # fmt: skip
        assert logsumexp.shape == (query.shape[1], len(query))
        asked = Asked(
            query.shape[-1] ** -0.5 if scale is None else scale,
            is_causal, window_size_left, window_size_right,
        )  # fmt: skip
        starts = cum_seq_q, cum_seq_k
        return backward(grad_out, query, key, value, out, logsumexp, *starts, asked)[:3]

    library.impl("_flash_attention_forward", flash_forward, "CPU")
    library.impl("_flash_attention_backward", flash_backward, "CPU")
    return library._destroy


# --- flash_attn 2 ------------------------------------------------------------------------------

_NAMESPACE = "flash_attn_stand_in"


@torch.library.custom_op(f"{_NAMESPACE}::_flash_attn_forward", mutates_args=())
def _forward_2(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, dropout_p: float, softmax_scale: float,
    causal: bool, window_size_left: int, window_size_right: int, softcap: float,
    alibi_slopes: torch.Tensor | None, return_softmax: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    asked = Asked(softmax_scale, causal, window_size_left, window_size_right, softcap)
    out, lse, state = _batched(q, k, v, asked._replace(dropout_p=dropout_p))
    return out, lse, q.new_empty(0), state


@_forward_2.register_fake
def _(q, k, *others):
    lse = q.new_empty((len(q), q.shape[2], q.shape[1]), dtype=torch.float32)
    return torch.empty_like(q), lse, q.new_empty(0), q.new_empty(2, dtype=torch.int64)


@torch.library.custom_op(f"{_NAMESPACE}::_flash_attn_varlen_forward", mutates_args=())
def _varlen_forward_2(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor, max_seqlen_q: int, max_seqlen_k: int, dropout_p: float,
    softmax_scale: float, causal: bool, window_size_left: int = -1, window_size_right: int = -1,
    softcap: float = 0.0, alibi_slopes: torch.Tensor | None = None, return_softmax: bool = False,
    block_table: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    asked = Asked(softmax_scale, causal, window_size_left, window_size_right, softcap)
    asked = asked._replace(dropout_p=dropout_p)
    out, lse, state = forward(q, k, v, cu_seqlens_q, cu_seqlens_k, asked)
    return out, lse, q.new_empty(0), state


@_varlen_forward_2.register_fake
def _(q, k, *others):
    lse = q.new_empty((q.shape[1], len(q)), dtype=torch.float32)
    return torch.empty_like(q), lse, q.new_empty(0), q.new_empty(2, dtype=torch.int64)


@torch.library.custom_op(f"{_NAMESPACE}::_flash_attn_backward", mutates_args=("dq", "dk", "dv"))
def _backward_2(
    dout: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor,
    softmax_lse: torch.Tensor, dq: torch.Tensor | None, dk: torch.Tensor | None,
    dv: torch.Tensor | None, dropout_p: float, softmax_scale: float, causal: bool,
    window_size_left: int, window_size_right: int, softcap: float,
    alibi_slopes: torch.Tensor | None, deterministic: bool, rng_state: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    asked = Asked(softmax_scale, causal, window_size_left, window_size_right, softcap)
    asked = asked._replace(dropout_p=dropout_p)
    found = _batched_backward(dout, q, k, v, out, softmax_lse, asked, rng_state)
    for given, gradient in zip((dq, dk, dv), found, strict=False):
        given.copy_(gradient)
    return torch.zeros_like(softmax_lse)


@_backward_2.register_fake
def _(dout, q, k, v, out, softmax_lse, *others):
    return torch.empty_like(softmax_lse)


@torch.library.custom_op(
    f"{_NAMESPACE}::_flash_attn_varlen_backward", mutates_args=("dq", "dk", "dv")
)
def _varlen_backward_2(
    dout: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor,
    softmax_lse: torch.Tensor, dq: torch.Tensor | None, dk: torch.Tensor | None,
    dv: torch.Tensor | None, cu_seqlens_q: torch.Tensor, cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int, max_seqlen_k: int, dropout_p: float, softmax_scale: float, causal: bool,
    window_size_left: int, window_size_right: int, softcap: float,
    alibi_slopes: torch.Tensor | None, deterministic: bool, rng_state: torch.Tensor | None = None,
    zero_tensors: bool = False,
) -> torch.Tensor:  # fmt: skip
    asked = Asked(softmax_scale, causal, window_size_left, window_size_right, softcap)
    asked = asked._replace(dropout_p=dropout_p)
    starts = cu_seqlens_q, cu_seqlens_k
    found = backward(dout, q, k, v, out, softmax_lse, *starts, asked, rng_state)
    for given, gradient in zip((dq, dk, dv), found, strict=False):
        given.copy_(gradient)
    return torch.zeros_like(softmax_lse)


@_varlen_backward_2.register_fake
def _(dout, q, k, v, out, softmax_lse, *others):
    return torch.empty_like(softmax_lse)


class _Dense2(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, dropout_p, scale, causal, window, softcap, deterministic):
        ops = sys.modules["flash_attn.flash_attn_interface"]
        scale = q.shape[-1] ** -0.5 if scale is None else scale
        ctx.settings = dropout_p, scale, causal, *window, softcap, None
        out, lse, _, state = ops._wrapped_flash_attn_forward(q, k, v, *ctx.settings, False)
        ctx.save_for_backward(q, k, v, out, lse, state)
        ctx.deterministic = deterministic
        ctx.mark_non_differentiable(lse)
        return out, lse

    @staticmethod
    def backward(ctx, d_out, _):
        ops = sys.modules["flash_attn.flash_attn_interface"]
        q, k, v, out, lse, state = ctx.saved_tensors
        gradients = [torch.empty_like(x) for x in (q, k, v)]
        ops._wrapped_flash_attn_backward(
            d_out, q, k, v, out, lse, *gradients, *ctx.settings, ctx.deterministic, state
        )
        return *gradients, *[None] * 6


class _Packed2(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx, q, k, v, starts_q, starts_k, max_q, max_k, dropout_p, scale, causal, window,
        softcap, deterministic,
    ):  # fmt: skip
        ops = sys.modules["flash_attn.flash_attn_interface"]
        scale = q.shape[-1] ** -0.5 if scale is None else scale
        ctx.lengths = max_q, max_k
        ctx.settings = dropout_p, scale, causal, *window, softcap, None
        out, lse, _, state = ops._wrapped_flash_attn_varlen_forward(
            q, k, v, starts_q, starts_k, *ctx.lengths, *ctx.settings, False
        )
        ctx.save_for_backward(q, k, v, out, lse, starts_q, starts_k, state)
        ctx.deterministic = deterministic
        ctx.mark_non_differentiable(lse)
        return out, lse

    @staticmethod
    def backward(ctx, d_out, _):
        ops = sys.modules["flash_attn.flash_attn_interface"]
        q, k, v, out, lse, starts_q, starts_k, state = ctx.saved_tensors
        gradients = [torch.empty_like(x) for x in (q, k, v)]
        ops._wrapped_flash_attn_varlen_backward(
            d_out, q, k, v, out, lse, *gradients, starts_q, starts_k, *ctx.lengths,
            *ctx.settings, ctx.deterministic, state,
        )  # fmt: skip
        return *gradients, *[None] * 10


def flash_attn_func(
    q, k, v, dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0,
    alibi_slopes=None, deterministic=False, return_attn_probs=False,
):  # fmt: skip
    out, lse = _Dense2.apply(
        q, k, v, dropout_p, softmax_scale, causal, window_size, softcap, deterministic
    )
    return (out, lse, q.new_empty(0)) if return_attn_probs else out


def flash_attn_qkvpacked_func(
    qkv, dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0,
    alibi_slopes=None, deterministic=False, return_attn_probs=False,
):  # fmt: skip
    return _Dense2.apply(
        *qkv.unbind(2), dropout_p, softmax_scale, causal, window_size, softcap, deterministic
    )[0]


def flash_attn_kvpacked_func(
    q, kv, dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0,
    alibi_slopes=None, deterministic=False, return_attn_probs=False,
):  # fmt: skip
    return _Dense2.apply(
        q, *kv.unbind(2), dropout_p, softmax_scale, causal, window_size, softcap, deterministic
    )[0]


def flash_attn_varlen_func(
    q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p=0.0,
    softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0, alibi_slopes=None,
    deterministic=False, return_attn_probs=False, block_table=None,
):  # fmt: skip
    out, lse = _Packed2.apply(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p,
        softmax_scale, causal, window_size, softcap, deterministic,
    )  # fmt: skip
    return (out, lse, q.new_empty(0)) if return_attn_probs else out


def flash_attn_varlen_qkvpacked_func(
    qkv, cu_seqlens, max_seqlen, dropout_p=0.0, softmax_scale=None, causal=False,
    window_size=(-1, -1), softcap=0.0, alibi_slopes=None, deterministic=False,
    return_attn_probs=False,
):  # fmt: skip
    return _Packed2.apply(
        *qkv.unbind(1), cu_seqlens, cu_seqlens, max_seqlen, max_seqlen, dropout_p,
        softmax_scale, causal, window_size, softcap, deterministic,
    )[0]  # fmt: skip


def flash_attn_varlen_kvpacked_func(
    q, kv, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p=0.0,
    softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0, alibi_slopes=None,
    deterministic=False, return_attn_probs=False,
):  # fmt: skip
    return _Packed2.apply(
        q, *kv.unbind(1), cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p,
        softmax_scale, causal, window_size, softcap, deterministic,
    )[0]  # fmt: skip


def pad_input(x, indices, batch, length):
    padded = x.new_zeros(batch * length, *x.shape[1:])
    padded[indices] = x
    return padded.unflatten(0, (batch, length))


def flash_attn_with_kvcache(q, k_cache, v_cache, **others):
    raise NotImplementedError


# --- flash_attn 3 and 4 ------------------------------------------------------------------------


def _forward_3(
    q, k, v, k_new=None, v_new=None, qv=None, out_=None, cu_seqlens_q=None, cu_seqlens_k=None,
    cu_seqlens_k_new=None, seqused_q=None, seqused_k=None, max_seqlen_q=None, max_seqlen_k=None,
    softmax_scale=None, causal=False, window_size_left=-1, window_size_right=-1,
    attention_chunk=0, softcap=0.0, num_splits=1, pack_gqa=None, sm_margin=0,
):  # fmt: skip
    asked = Asked(softmax_scale, causal, window_size_left, window_size_right, softcap)
    if cu_seqlens_q is None:
        out, lse, _ = _batched(q, k, v, asked)
    else:
        out, lse, _ = forward(q, k, v, cu_seqlens_q, cu_seqlens_k, asked)
    return out, lse, q.new_empty(0), q.new_empty(0)


def _backward_3(
    dout, q, k, v, out, softmax_lse, cu_seqlens_q=None, cu_seqlens_k=None, sequed_q=None,
    sequed_k=None, max_seqlen_q=None, max_seqlen_k=None, dq=None, dk=None, dv=None,
    softmax_scale=None, is_causal=False, window_size_left=-1, window_size_right=-1, softcap=0.0,
    deterministic=False, sm_margin=0,
):  # fmt: skip
    asked = Asked(softmax_scale, is_causal, window_size_left, window_size_right, softcap)
    if cu_seqlens_q is None:
        found = _batched_backward(dout, q, k, v, out, softmax_lse, asked, None)
    else:
        found = backward(dout, q, k, v, out, softmax_lse, cu_seqlens_q, cu_seqlens_k, asked)
    for given, gradient in zip((dq, dk, dv), found, strict=False):
        given.copy_(gradient)
    return torch.zeros_like(softmax_lse)


class _Attention3(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, starts_q, starts_k, max_q, max_k, scale, causal, window, softcap):
        library = sys.modules["flash_attn_interface"]
        scale = q.shape[-1] ** -0.5 if scale is None else scale
        packed = {
            "cu_seqlens_q": starts_q, "cu_seqlens_k": starts_k,
            "max_seqlen_q": max_q, "max_seqlen_k": max_k,
        }  # fmt: skip
        ctx.settings = {
            "softmax_scale": scale, "window_size_left": window[0], "window_size_right": window[1],
            "softcap": softcap, **packed,
        }  # fmt: skip
        ctx.causal = causal
        out, lse, *_ = library._flash_attn_forward(q, k, v, causal=causal, **ctx.settings)
        ctx.save_for_backward(q, k, v, out, lse)
        return out

    @staticmethod
    def backward(ctx, d_out):
        library = sys.modules["flash_attn_interface"]
        q, k, v, out, lse = ctx.saved_tensors
        dq, dk, dv = (torch.empty_like(x) for x in (q, k, v))
        library._flash_attn_backward(
            d_out, q, k, v, out, lse, dq=dq, dk=dk, dv=dv, is_causal=ctx.causal, **ctx.settings
        )
        return dq, dk, dv, *[None] * 8


def func_3(
    q, k, v, softmax_scale=None, causal=False, qv=None, q_descale=None, k_descale=None,
    v_descale=None, window_size=(-1, -1), attention_chunk=0, softcap=0.0, num_splits=1,
    pack_gqa=None, deterministic=False, sm_margin=0, return_attn_probs=False,
):  # fmt: skip
    nothing = (None,) * 4
    return _Attention3.apply(q, k, v, *nothing, softmax_scale, causal, window_size, softcap)


def qkvpacked_func_3(
    qkv, softmax_scale=None, causal=False, q_descale=None, k_descale=None, v_descale=None,
    window_size=(-1, -1), attention_chunk=0, softcap=0.0, deterministic=False, num_heads_q=None,
    sm_margin=0, return_attn_probs=False,
):  # fmt: skip
    nothing = (None,) * 4
    if qkv.dim() == 5:
        q, k, v = qkv.unbind(-3)
    else:
        shared = (qkv.shape[2] - num_heads_q) // 2
        q, k, v = qkv.split([num_heads_q, shared, shared], -2)
    return _Attention3.apply(q, k, v, *nothing, softmax_scale, causal, window_size, softcap)


def varlen_func_3(
    q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, seqused_q=None,
    seqused_k=None, softmax_scale=None, causal=False, qv=None, q_descale=None, k_descale=None,
    v_descale=None, window_size=(-1, -1), attention_chunk=0, softcap=0.0, num_splits=1,
    pack_gqa=None, deterministic=False, sm_margin=0, return_attn_probs=False,
):  # fmt: skip
    packed = cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k
    return _Attention3.apply(q, k, v, *packed, softmax_scale, causal, window_size, softcap)


def _forward_4(
    q, k, v, qv=None, cu_seqlens_q=None, cu_seqlens_k=None, seqused_q=None, seqused_k=None,
    max_seqlen_q=None, max_seqlen_k=None, softmax_scale=None, causal=False, softcap=None,
    window_size_left=None, window_size_right=None, learnable_sink=None, num_splits=1,
    pack_gqa=None, return_lse=False,
):  # fmt: skip
    left, right = (-1 if n is None else n for n in (window_size_left, window_size_right))
    asked = Asked(softmax_scale, causal, left, right, softcap or 0.0, learnable_sink)
    if cu_seqlens_q is None:
        out, lse, _ = _batched(q, k, v, asked)
    else:
        out, lse, _ = forward(q, k, v, cu_seqlens_q, cu_seqlens_k, asked)
    return out, lse if return_lse else None, None, None


def _backward_4(
    q, k, v, out, dout, lse, softmax_scale=None, causal=False, softcap=0.0, window_size_left=None,
    window_size_right=None, cu_seqlens_q=None, cu_seqlens_k=None, seqused_q=None, seqused_k=None,
    max_seqlen_q=None, max_seqlen_k=None, deterministic=False, dq=None, dk=None, dv=None,
    dlse=None, learnable_sink=None,
):  # fmt: skip
    left, right = (-1 if n is None else n for n in (window_size_left, window_size_right))
    asked = Asked(softmax_scale, causal, left, right, softcap, learnable_sink)
    if cu_seqlens_q is None:
        *found, d_sinks = _batched_backward(dout, q, k, v, out, lse, asked, None)
    else:
        *found, d_sinks = backward(dout, q, k, v, out, lse, cu_seqlens_q, cu_seqlens_k, asked)
    if dq is not None:
        for given, gradient in zip((dq, dk, dv), found, strict=True):
            given.copy_(gradient)
    return tuple(found) if learnable_sink is None else (*found, d_sinks.to(learnable_sink.dtype))


class _Attention4(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, starts_q, starts_k, max_q, max_k, scale, causal, window, sink, cap):
        library = sys.modules["flash_attn.cute.interface"]
        scale = q.shape[-1] ** -0.5 if scale is None else scale
        ctx.settings = {
            "cu_seqlens_q": starts_q, "cu_seqlens_k": starts_k, "max_seqlen_q": max_q,
            "max_seqlen_k": max_k, "softmax_scale": scale, "causal": causal,
            "window_size_left": window[0], "window_size_right": window[1], "softcap": cap,
            "learnable_sink": sink,
        }  # fmt: skip
        out, lse, *_ = library._flash_attn_fwd(q, k, v, return_lse=True, **ctx.settings)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.mark_non_differentiable(lse)
        return out, lse

    @staticmethod
    def backward(ctx, d_out, _):
        library = sys.modules["flash_attn.cute.interface"]
        q, k, v, out, lse = ctx.saved_tensors
        found = library._flash_attn_bwd(q, k, v, out, d_out, lse, **ctx.settings)
        return *found[:3], *[None] * 7, found[3] if len(found) > 3 else None, None


def func_4(
    q, k, v, qv=None, gather_kv_indices=None, softmax_scale=None, causal=False,
    window_size=(None, None), learnable_sink=None, softcap=0.0, num_splits=1, pack_gqa=None,
    deterministic=False, score_mod=None, mask_mod=None, return_lse=False,
):  # fmt: skip
    return _Attention4.apply(
        q, k, v, *[None] * 4, softmax_scale, causal, window_size, learnable_sink, softcap
    )


def varlen_func_4(
    q, k, v, qv=None, cu_seqlens_q=None, cu_seqlens_k=None, max_seqlen_q=None, max_seqlen_k=None,
    min_seqlen_k=None, seqused_q=None, seqused_k=None, gather_kv_indices=None, page_table=None,
    softmax_scale=None, causal=False, window_size=(None, None), learnable_sink=None, softcap=0.0,
    num_splits=1, pack_gqa=None, deterministic=False, score_mod=None, mask_mod=None,
    return_lse=False,
):  # fmt: skip
    packed = cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k
    return _Attention4.apply(
        q, k, v, *packed, softmax_scale, causal, window_size, learnable_sink, softcap
    )


def modules():
    """Name -> module, of all three."""
    ops = getattr(torch.ops, _NAMESPACE)
    public_2 = {
        f.__name__: f
        for f in (
            flash_attn_func, flash_attn_qkvpacked_func, flash_attn_kvpacked_func,
            flash_attn_varlen_func, flash_attn_varlen_qkvpacked_func,
            flash_attn_varlen_kvpacked_func, flash_attn_with_kvcache,
        )
    }  # fmt: skip
    private_2 = {
        "_wrapped_flash_attn_forward": ops._flash_attn_forward,
        "_wrapped_flash_attn_backward": ops._flash_attn_backward,
        "_wrapped_flash_attn_varlen_forward": ops._flash_attn_varlen_forward,
        "_wrapped_flash_attn_varlen_backward": ops._flash_attn_varlen_backward,
    }
    public_4 = {"flash_attn_func": func_4, "flash_attn_varlen_func": varlen_func_4}
    contents = {
        "flash_attn": {**public_2, "__version__": "2.8.4"},
        "flash_attn.flash_attn_interface": {**public_2, **private_2},
        "flash_attn.bert_padding": {"pad_input": pad_input, "unpad_input": None},
        "flash_attn_interface": {
            "flash_attn_func": func_3,
            "flash_attn_varlen_func": varlen_func_3,
            "flash_attn_qkvpacked_func": qkvpacked_func_3,
            "flash_attn_with_kvcache": flash_attn_with_kvcache,
            "_flash_attn_forward": _forward_3,
            "_flash_attn_backward": _backward_3,
        },
        "flash_attn.cute": public_4,
        "flash_attn.cute.interface": {
            **public_4, "_flash_attn_fwd": _forward_4, "_flash_attn_bwd": _backward_4
        },
    }  # fmt: skip
    made = {}
    for name, content in contents.items():
        made[name] = types.ModuleType(name)
        made[name].__path__ = []
        made[name].__spec__ = ModuleSpec(name, None, is_package=True)
        vars(made[name]).update(content)
    return made


def install(monkeypatch):
    """Puts all of it in its places for a test; returns what takes the kernels back."""
    for name, module in modules().items():
        monkeypatch.setitem(sys.modules, name, module)
    return aten_kernels()
