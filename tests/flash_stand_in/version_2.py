"""The functions of `flash_attn` 2, private ones included."""

import sys

import torch

from tests.flash_stand_in.attention import Asked, backward, forward

NAMESPACE = "flash_attn_stand_in"


@torch.library.custom_op(f"{NAMESPACE}::_flash_attn_forward", mutates_args=())
def _forward_2(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, dropout_p: float, softmax_scale: float,
    causal: bool, window_size_left: int, window_size_right: int, softcap: float,
    alibi_slopes: torch.Tensor | None, return_softmax: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    asked = Asked(softmax_scale, causal, window_size_left, window_size_right, softcap, dropout_p)
    out, lse, state = forward(q, k, v, None, None, asked)
    return out, lse, q.new_empty(0), state


@torch.library.custom_op(f"{NAMESPACE}::_flash_attn_varlen_forward", mutates_args=())
def _varlen_forward_2(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor, max_seqlen_q: int, max_seqlen_k: int, dropout_p: float,
    softmax_scale: float, causal: bool, window_size_left: int = -1, window_size_right: int = -1,
    softcap: float = 0.0, alibi_slopes: torch.Tensor | None = None, return_softmax: bool = False,
    block_table: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    asked = Asked(softmax_scale, causal, window_size_left, window_size_right, softcap, dropout_p)
    out, lse, state = forward(q, k, v, cu_seqlens_q, cu_seqlens_k, asked)
    return out, lse, q.new_empty(0), state


@_forward_2.register_fake
@_varlen_forward_2.register_fake
def _(q, *others):
    lse = q.new_empty((*q.shape[:-3], q.shape[-2], q.shape[-3]), dtype=torch.float32)
    return torch.empty_like(q), lse, q.new_empty(0), q.new_empty(2, dtype=torch.int64)


@torch.library.custom_op(f"{NAMESPACE}::_flash_attn_backward", mutates_args=("dq", "dk", "dv"))
def _backward_2(
    dout: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor,
    softmax_lse: torch.Tensor, dq: torch.Tensor | None, dk: torch.Tensor | None,
    dv: torch.Tensor | None, dropout_p: float, softmax_scale: float, causal: bool,
    window_size_left: int, window_size_right: int, softcap: float,
    alibi_slopes: torch.Tensor | None, deterministic: bool, rng_state: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    asked = Asked(softmax_scale, causal, window_size_left, window_size_right, softcap, dropout_p)
    found = backward(dout, q, k, v, out, softmax_lse, None, None, asked, rng_state)
    for given, gradient in zip((dq, dk, dv), found, strict=False):
        given.copy_(gradient)
    return torch.zeros_like(softmax_lse)


@torch.library.custom_op(
    f"{NAMESPACE}::_flash_attn_varlen_backward", mutates_args=("dq", "dk", "dv")
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
    asked = Asked(softmax_scale, causal, window_size_left, window_size_right, softcap, dropout_p)
    starts = cu_seqlens_q, cu_seqlens_k
    found = backward(dout, q, k, v, out, softmax_lse, *starts, asked, rng_state)
    for given, gradient in zip((dq, dk, dv), found, strict=False):
        given.copy_(gradient)
    return torch.zeros_like(softmax_lse)


@_backward_2.register_fake
@_varlen_backward_2.register_fake
def _(dout, q, k, v, out, softmax_lse, *others):
    return torch.empty_like(softmax_lse)


class _Attention2(torch.autograd.Function):
    """`packed` are the documents' places and longest ones; nothing for sequences of one length."""

    @staticmethod
    def forward(ctx, q, k, v, dropout_p, scale, causal, window, softcap, deterministic, *packed):
        ops = sys.modules["flash_attn.flash_attn_interface"]
        scale = q.shape[-1] ** -0.5 if scale is None else scale
        ctx.lengths = packed[2:]
        ctx.settings = dropout_p, scale, causal, *window, softcap, None
        forward = getattr(ops, f"_wrapped_flash_attn_{'varlen_' if packed else ''}forward")
        out, lse, _, state = forward(q, k, v, *packed, *ctx.settings, False)
        ctx.save_for_backward(q, k, v, out, lse, state, *packed[:2])
        ctx.deterministic = deterministic
        ctx.mark_non_differentiable(lse)
        return out, lse

    @staticmethod
    def backward(ctx, d_out, _):
        ops = sys.modules["flash_attn.flash_attn_interface"]
        q, k, v, out, lse, state, *starts = ctx.saved_tensors
        gradients = [torch.empty_like(x) for x in (q, k, v)]
        backward = getattr(ops, f"_wrapped_flash_attn_{'varlen_' if starts else ''}backward")
        backward(
            d_out, q, k, v, out, lse, *gradients, *starts, *ctx.lengths, *ctx.settings,
            ctx.deterministic, state,
        )  # fmt: skip
        return *gradients, *[None] * (6 + 2 * len(starts))


def flash_attn_func(
    q, k, v, dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0,
    alibi_slopes=None, deterministic=False, return_attn_probs=False,
):  # fmt: skip
    out, lse = _Attention2.apply(
        q, k, v, dropout_p, softmax_scale, causal, window_size, softcap, deterministic
    )
    return (out, lse, q.new_empty(0)) if return_attn_probs else out


def flash_attn_qkvpacked_func(
    qkv, dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0,
    alibi_slopes=None, deterministic=False, return_attn_probs=False,
):  # fmt: skip
    return _Attention2.apply(
        *qkv.unbind(2), dropout_p, softmax_scale, causal, window_size, softcap, deterministic
    )[0]


def flash_attn_kvpacked_func(
    q, kv, dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0,
    alibi_slopes=None, deterministic=False, return_attn_probs=False,
):  # fmt: skip
    return _Attention2.apply(
        q, *kv.unbind(2), dropout_p, softmax_scale, causal, window_size, softcap, deterministic
    )[0]


def flash_attn_varlen_func(
    q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p=0.0,
    softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0, alibi_slopes=None,
    deterministic=False, return_attn_probs=False, block_table=None,
):  # fmt: skip
    out, lse = _Attention2.apply(
        q, k, v, dropout_p, softmax_scale, causal, window_size, softcap, deterministic,
        cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k,
    )  # fmt: skip
    return (out, lse, q.new_empty(0)) if return_attn_probs else out


def flash_attn_varlen_qkvpacked_func(
    qkv, cu_seqlens, max_seqlen, dropout_p=0.0, softmax_scale=None, causal=False,
    window_size=(-1, -1), softcap=0.0, alibi_slopes=None, deterministic=False,
    return_attn_probs=False,
):  # fmt: skip
    return _Attention2.apply(
        *qkv.unbind(1), dropout_p, softmax_scale, causal, window_size, softcap, deterministic,
        cu_seqlens, cu_seqlens, max_seqlen, max_seqlen,
    )[0]  # fmt: skip


def flash_attn_varlen_kvpacked_func(
    q, kv, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p=0.0,
    softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0, alibi_slopes=None,
    deterministic=False, return_attn_probs=False,
):  # fmt: skip
    return _Attention2.apply(
        q, *kv.unbind(1), dropout_p, softmax_scale, causal, window_size, softcap, deterministic,
        cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k,
    )[0]  # fmt: skip


def pad_input(x, indices, batch, length):
    padded = x.new_zeros(batch * length, *x.shape[1:])
    padded[indices] = x
    return padded.unflatten(0, (batch, length))


def flash_attn_with_kvcache(q, k_cache, v_cache, **others):
    raise NotImplementedError
