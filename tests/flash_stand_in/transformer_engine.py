"""TransformerEngine's attention on the CPU, with the signatures of its release 2.18.

Of NVIDIA/TransformerEngine at v2.18, in transformer_engine/pytorch: `FusedAttnFunc` and the calls
of `FusedAttention` and `FlashAttention` are those of attention/dot_product_attention/backends.py,
`fused_attn_fwd` and `fused_attn_bwd` those of cpp_extensions/fused_attn.py. As there, kernels take
strides from the name of a layout alone.
"""

import sys

import torch
import torch.nn.functional as F
from torch import nn

from tests.flash_stand_in.attention import Asked, backward, forward

KERNELS = "transformer_engine.pytorch.cpp_extensions.fused_attn"
BACKENDS = "transformer_engine.pytorch.attention.dot_product_attention.backends"

FusedAttnBackend = {"F16_arbitrary_seqlen": 1, "FP8": 2, "No_Backend": -1}


def _plain(form, x):
    """(B, N, H, D) of a format."""
    return x.transpose(0, 1) if form == "sbhd" else x


def _places(layout, shapes):
    """For each of q, k and v the whole tensor that it is part of, the axis, and its place there."""
    for part in layout.split("_"):
        number = next((int(c) for c in part if c.isdigit()), 1)
        axis, group, shapes = max(part.find(str(number)), 0), shapes[:number], shapes[number:]
        whole = torch.empty((*group[0][:axis], number, *group[0][axis:]), device="meta")
        yield from ((whole, axis, place) for place in range(number))


def _read(layout, *tensors):
    """What a kernel reads: by the layout's strides, whatever those of the tensors are."""
    places = _places(layout, [x.shape for x in tensors])
    for x, (whole, axis, _) in zip(tensors, places, strict=True):
        yield x.as_strided(x.shape, whole.select(axis, 0).stride())


def _written(layout, *tensors):
    """Gradients in the memory of a layout."""
    made = None
    places = _places(layout, [x.shape for x in tensors])
    for x, (whole, axis, place) in zip(tensors, places, strict=True):
        made = x.new_empty(whole.shape) if place == 0 else made
        yield made.select(axis, place).copy_(x)


def _asked(mask, lengths, scale, window, dropout, bottom_right, bias, softmax):
    assert (bias, softmax) == ("no_bias", "vanilla")
    assert mask in ("no_mask", "causal", "causal_bottom_right")
    assert mask != "causal" or lengths[0] == lengths[1]
    assert bottom_right is (mask != "causal")
    return Asked(scale, mask != "no_mask", *window, dropout_p=dropout)


def fused_attn_fwd(
    is_training, max_seqlen_q, max_seqlen_kv, cu_seqlens_q, cu_seqlens_kv, q, k, v, fake_dtype,
    fused_attention_backend, attn_bias=None, cu_seqlens_q_padded=None, cu_seqlens_kv_padded=None,
    page_table_k=None, page_table_v=None, s_quantizer=None, o_quantizer=None, attn_scale=None,
    dropout=0.0, fast_zero_fill=True, qkv_layout="sbh3d", o_format="sbhd",
    qkv_scale_inv_format=None, attn_bias_type="no_bias", attn_mask_type="padding",
    softmax_type="vanilla", window_size=(-1, -1), bottom_right_diagonal=None, rng_gen=None,
    softmax_offset=None, return_max_logit=False, cuda_graph=False,
):  # fmt: skip
    assert fused_attention_backend == 1 and fake_dtype == q.dtype
    form = o_format
    assert form == qkv_layout.replace("3", "").split("_")[0]
    q, k, v = (_plain(form, x) for x in _read(qkv_layout, q, k, v))
    lengths = q.shape[1], k.shape[1]
    assert lengths == (max_seqlen_q, max_seqlen_kv)
    starts = cu_seqlens_q, cu_seqlens_kv
    assert all(
        x.dtype == torch.int32 and x.tolist() == [n * i for i in range(len(q) + 1)]
        for x, n in zip(starts, lengths, strict=True)
    )
    asked = _asked(
        attn_mask_type, lengths, attn_scale, window_size, dropout, bottom_right_diagonal,
        attn_bias_type, softmax_type,
    )  # fmt: skip
    out, lse, state = forward(*(x.contiguous() for x in (q, k, v)), None, None, asked)
    return _plain(form, out).contiguous(), ([lse.unsqueeze(-1), state] if is_training else None)


def fused_attn_bwd(
    max_seqlen_q, max_seqlen_kv, cu_seqlens_q, cu_seqlens_kv, q, k, v, o, d_o, fake_dtype,
    aux_ctx_tensors, fused_attention_backend, cu_seqlens_q_padded=None, cu_seqlens_kv_padded=None,
    s_quantizer=None, dp_quantizer=None, dqkv_quantizer=None, attn_scale=None, dropout=0.0,
    fast_zero_fill=True, qkv_layout="sbh3d", o_format="sbhd", do_format="sbhd",
    dqkv_layout="sbh3d", qkv_scale_inv_format=None, do_scale_inv_format=None,
    attn_bias_type="no_bias", attn_mask_type="padding", softmax_type="vanilla",
    window_size=(-1, -1), bottom_right_diagonal=None, deterministic=False, cuda_graph=False,
):  # fmt: skip
    assert fused_attention_backend == 1 and fake_dtype == q.dtype
    form = o_format
    plain = f"{form}_{form}_{form}"
    q, k, v = (_plain(form, x).contiguous() for x in _read(qkv_layout, q, k, v))
    o, d_o = (_plain(form, next(_read(plain, x))).contiguous() for x in (o, d_o))
    lse, state = aux_ctx_tensors
    assert lse.shape == (len(q), q.shape[2], max_seqlen_q, 1) and lse.dtype == torch.float32
    asked = _asked(
        attn_mask_type, (max_seqlen_q, max_seqlen_kv), attn_scale, window_size, dropout,
        bottom_right_diagonal, attn_bias_type, softmax_type,
    )  # fmt: skip
    *found, _ = backward(d_o, q, k, v, o, lse.squeeze(-1), None, None, asked, state)
    return [*_written(dqkv_layout, *(_plain(form, x) for x in found)), None, None]


class FusedAttnFunc(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx, is_training, max_seqlen_q, max_seqlen_kv, cu_seqlens_q, cu_seqlens_kv,
        cu_seqlens_q_padded, cu_seqlens_kv_padded, page_table_k, page_table_v, q, k, v, attn_bias,
        attn_scale, dropout_p, fast_zero_fill, qkv_layout, attn_bias_type, attn_mask_type,
        softmax_type, window_size, bottom_right_diagonal, rng_gen, fused_attention_backend,
        use_FAv2_bwd, fp8, fp8_meta, quantizers, deterministic, softmax_offset, fp8_output,
        layer_number, return_max_logit,
    ):  # fmt: skip
        form = qkv_layout.replace("3", "").replace("2", "").split("_")[0]
        shared = max_seqlen_q, max_seqlen_kv, cu_seqlens_q, cu_seqlens_kv
        kernels = sys.modules[KERNELS]
        own = (fp8, attn_bias_type, softmax_type, return_max_logit, fused_attention_backend)
        if own != (False, "no_bias", "vanilla", False, 1) or "padding" in attn_mask_type:
            ctx.shape = None  # GuardBit leaves it alone
            return q * 1.0
        out, saved = kernels.fused_attn_fwd(
            is_training, *shared, q, k, v, q.dtype, fused_attention_backend, attn_bias,
            cu_seqlens_q_padded, cu_seqlens_kv_padded, page_table_k, page_table_v, None, None,
            attn_scale, dropout_p, fast_zero_fill, qkv_layout, form, None, attn_bias_type,
            attn_mask_type, softmax_type, window_size, bottom_right_diagonal, rng_gen,
            softmax_offset, return_max_logit, False,
        )  # fmt: skip
        ctx.save_for_backward(q, k, v, out, *(saved or ()))
        ctx.shared, ctx.form, ctx.layout = shared, form, qkv_layout
        ctx.rest = attn_bias_type, attn_mask_type, softmax_type, window_size
        ctx.numbers = fused_attention_backend, attn_scale, dropout_p, deterministic
        ctx.shape, ctx.bottom_right = q.shape, bottom_right_diagonal
        return out

    @staticmethod
    def backward(ctx, d_out, *_args):
        if ctx.shape is None:
            return (*[None] * 9, d_out, *[None] * 23)
        kernels = sys.modules[KERNELS]
        q, k, v, out, *saved = ctx.saved_tensors
        number, scale, dropout_p, deterministic = ctx.numbers
        form = ctx.form
        dq, dk, dv, *_ = kernels.fused_attn_bwd(
            *ctx.shared, q, k, v, out, d_out.contiguous(), q.dtype, saved, number, None, None,
            None, None, None, scale, dropout_p, True, ctx.layout, form, form, ctx.layout, None,
            None, *ctx.rest, ctx.bottom_right, deterministic, False,
        )  # fmt: skip
        return (*[None] * 9, dq, dk, dv, *[None] * 21)


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias, is_fused):
        ctx.inputs, ctx.is_fused = (x, weight), is_fused
        return F.linear(x, weight, bias)

    @staticmethod
    def backward(ctx, grad):
        (x, weight), ctx.inputs = ctx.inputs, None
        if ctx.is_fused:
            weight.main_grad.add_(1)
        flat, of_x = (each.flatten(0, -2).float() for each in (grad, x))
        return (
            (grad.to(weight) @ weight).to(x), (flat.T @ of_x).to(weight), flat.sum(0).to(weight),
            None,
        )  # fmt: skip


class Linear(nn.Linear):
    """A graph of it serves for one backward, as in 2.20, which its weight keeps count of."""

    def __init__(self, *sizes):
        super().__init__(*sizes)
        self.fuse_wgrad_accumulation, self.weight.main_grad = True, torch.zeros(())

    def forward(self, x):
        return _Product.apply(x, self.weight, self.bias, self.fuse_wgrad_accumulation)


class FusedAttention(nn.Module):
    """Calls `FusedAttnFunc` as the source's does; `options` set other arguments by name."""

    def __init__(self, softmax_scale=None, attention_dropout=0.0, **options):
        super().__init__()
        self.scale, self.dropout, self.options = softmax_scale, attention_dropout, options

    @torch._dynamo.disable
    def forward(self, q, k, v, qkv_layout="sbh3d", attn_mask_type="causal", window_size=None):
        assert all(x.dtype in (torch.float16, torch.bfloat16) for x in (q, k, v))  # so does theirs
        causal = attn_mask_type != "no_mask"
        first = qkv_layout.startswith("sb")
        batch, rows, keys = q.shape[int(first)], q.shape[int(not first)], k.shape[int(not first)]
        starts = torch.arange(batch + 1, dtype=torch.int32)
        arguments = {
            "is_training": self.training, "max_seqlen_q": rows, "max_seqlen_kv": keys,
            "cu_seqlens_q": starts * rows, "cu_seqlens_kv": starts * keys,
            "cu_seqlens_q_padded": None, "cu_seqlens_kv_padded": None, "page_table_k": None,
            "page_table_v": None, "q": q, "k": k, "v": v, "attn_bias": None,
            "attn_scale": q.shape[-1] ** -0.5 if self.scale is None else self.scale,
            "dropout_p": self.dropout if self.training else 0.0, "fast_zero_fill": True,
            "qkv_layout": qkv_layout, "attn_bias_type": "no_bias",
            "attn_mask_type": attn_mask_type, "softmax_type": "vanilla",
            "window_size": window_size or (-1, 0 if causal else -1),
            "bottom_right_diagonal": attn_mask_type != "causal", "rng_gen": None,
            "fused_attention_backend": 1, "use_FAv2_bwd": False, "fp8": False,
            "fp8_meta": {"fp8_checkpoint": False}, "quantizers": {"scaling_fwd": []},
            "deterministic": False, "softmax_offset": None, "fp8_output": False,
            "layer_number": 1, "return_max_logit": False, **self.options,
        }  # fmt: skip
        output = sys.modules[BACKENDS].FusedAttnFunc.apply(*arguments.values())
        return output.view(*output.shape[:-2], -1)


class FlashAttention(nn.Module):
    """Calls flash_attn 2 as the source's does, for "bshd"."""

    def forward(self, q, k, v):
        output = sys.modules[BACKENDS].flash_attn_func(
            q, k, v, 0.0, softmax_scale=q.shape[-1] ** -0.5, causal=True, window_size=(-1, 0),
            alibi_slopes=None, deterministic=False,
        )  # fmt: skip
        return output.view(*output.shape[:-2], -1)


def contents(flash_attn_func):
    """Name -> what is in the module; `backends` has flash_attn's function by name, as there."""
    kernels = {
        "fused_attn_fwd": fused_attn_fwd, "fused_attn_bwd": fused_attn_bwd,
        "FusedAttnBackend": FusedAttnBackend,
    }  # fmt: skip
    return {
        KERNELS: kernels,
        BACKENDS: {
            **kernels, "FusedAttnFunc": FusedAttnFunc, "flash_attn_func": flash_attn_func
        },
    }  # fmt: skip
