"""The functions of `flash_attn_interface` and `flash_attn.cute`, private ones included."""

import sys

import torch

from tests.flash_stand_in.attention import Asked, backward, forward


def forward_3(
    q, k, v, k_new=None, v_new=None, qv=None, out_=None, cu_seqlens_q=None, cu_seqlens_k=None,
    cu_seqlens_k_new=None, seqused_q=None, seqused_k=None, max_seqlen_q=None, max_seqlen_k=None,
    softmax_scale=None, causal=False, window_size_left=-1, window_size_right=-1,
    attention_chunk=0, softcap=0.0, num_splits=1, pack_gqa=None, sm_margin=0,
):  # fmt: skip
    asked = Asked(softmax_scale, causal, window_size_left, window_size_right, softcap)
    out, lse, _ = forward(q, k, v, cu_seqlens_q, cu_seqlens_k, asked)
    return out, lse, q.new_empty(0), q.new_empty(0)


def backward_3(
    dout, q, k, v, out, softmax_lse, cu_seqlens_q=None, cu_seqlens_k=None, sequed_q=None,
    sequed_k=None, max_seqlen_q=None, max_seqlen_k=None, dq=None, dk=None, dv=None,
    softmax_scale=None, is_causal=False, window_size_left=-1, window_size_right=-1, softcap=0.0,
    deterministic=False, sm_margin=0,
):  # fmt: skip
    asked = Asked(softmax_scale, is_causal, window_size_left, window_size_right, softcap)
    found = backward(dout, q, k, v, out, softmax_lse, cu_seqlens_q, cu_seqlens_k, asked)
    for given, gradient in zip((dq, dk, dv), found, strict=False):
        given.copy_(gradient)
    return torch.zeros_like(softmax_lse)


class _Attention3(torch.autograd.Function):
    """No compiler traces it, nor a kernel."""

    @staticmethod
    @torch.compiler.disable
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
    @torch.compiler.disable
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


def forward_4(
    q, k, v, qv=None, cu_seqlens_q=None, cu_seqlens_k=None, seqused_q=None, seqused_k=None,
    max_seqlen_q=None, max_seqlen_k=None, softmax_scale=None, causal=False, softcap=None,
    window_size_left=None, window_size_right=None, learnable_sink=None, num_splits=1,
    pack_gqa=None, return_lse=False, **to_come,
):  # fmt: skip
    left, right = (-1 if n is None else n for n in (window_size_left, window_size_right))
    asked = Asked(softmax_scale, causal, left, right, softcap or 0.0, sinks=learnable_sink)
    out, lse, _ = forward(q, k, v, cu_seqlens_q, cu_seqlens_k, asked)
    o_lo = None
    if to_come.get("return_o_lo"):
        wide = [x.float() for x in (q, k, v)]
        o_lo = (forward(*wide, cu_seqlens_q, cu_seqlens_k, asked)[0] - out.float()).to(out.dtype)
    return out, lse if return_lse else None, None, None, o_lo


def backward_4(
    q, k, v, out, dout, lse, softmax_scale=None, causal=False, softcap=0.0, window_size_left=None,
    window_size_right=None, cu_seqlens_q=None, cu_seqlens_k=None, seqused_q=None, seqused_k=None,
    max_seqlen_q=None, max_seqlen_k=None, deterministic=False, dq=None, dk=None, dv=None,
    dlse=None, learnable_sink=None, **to_come,
):  # fmt: skip
    if to_come.get("o_lo") is not None:
        out = out.float() + to_come["o_lo"].float()
    left, right = (-1 if n is None else n for n in (window_size_left, window_size_right))
    asked = Asked(softmax_scale, causal, left, right, softcap, sinks=learnable_sink)
    *found, d_sinks = backward(dout, q, k, v, out, lse, cu_seqlens_q, cu_seqlens_k, asked)
    if dq is not None:
        for given, gradient in zip((dq, dk, dv), found, strict=True):
            given.copy_(gradient)
    return tuple(found) if learnable_sink is None else (*found, d_sinks.to(learnable_sink.dtype))


class _Attention4(torch.autograd.Function):
    @staticmethod
    @torch.compiler.disable
    def forward(ctx, q, k, v, starts_q, starts_k, max_q, max_k, scale, causal, window, sink, cap):
        library = sys.modules["flash_attn.cute.interface"]
        scale = q.shape[-1] ** -0.5 if scale is None else scale
        ctx.settings = {
            "cu_seqlens_q": starts_q, "cu_seqlens_k": starts_k, "max_seqlen_q": max_q,
            "max_seqlen_k": max_k, "softmax_scale": scale, "causal": causal,
            "window_size_left": window[0], "window_size_right": window[1], "softcap": cap,
            "learnable_sink": sink,
        }  # fmt: skip
        is_trained = any(x.requires_grad for x in (q, k, v))  # else there is no LSE
        out, lse, *_ = library._flash_attn_fwd(q, k, v, return_lse=is_trained, **ctx.settings)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.mark_non_differentiable(*([lse] if is_trained else []))
        return out, lse

    @staticmethod
    @torch.compiler.disable
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
