"""Attention that replaces PyTorch's, or a library's, in watched models.

Shapes: q `(B, H, N, D)`; k, v `(B, H_kv, M, D)`, H a multiple of H_kv; out `(B, H, N, D)`;
lse `(B, H, N)` FP32.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from guardbit.kernels import execution, op
from guardbit.kernels.autocast import autocast_tensors, is_autocast
from guardbit.kernels.engines import LibraryEngine
from guardbit.kernels.library import library_attention
from guardbit.kernels.runtime import runtime
from guardbit.kernels.spec import AttentionSpec


def switchable_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    site: Tensor,
    *,
    attn_mask: Tensor | None = None,
    is_causal: bool,
    scale: float | None,
    dropout_p: float = 0.0,
) -> Tensor:
    """Computes `F.scaled_dot_product_attention`, with heads that can be switched."""
    scale = 1.0 / math.sqrt(q.size(-1)) if scale is None else scale
    spec = AttentionSpec(scale, "top-left" if is_causal else False, attn_mask, dropout_p)
    return attention_at_site(q, k, v, site, spec)[0]


def attention_at_site(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    site: Tensor,
    spec: AttentionSpec,
    library: LibraryEngine | None = None,
) -> tuple[Tensor, Tensor]:
    """Computes attention with heads that can be switched; see `switchable_attention`."""
    if library is not None:
        return library_attention(q, k, v, site, spec, library)
    q, k, v = autocast_tensors(q, k, v)
    mask = spec.mask
    if mask is not None and mask.is_floating_point() and is_autocast(q):
        mask = mask.to(torch.get_autocast_dtype(q.device.type))
    wants_mask = torch.is_grad_enabled() and mask is not None and bool(mask.requires_grad)
    return op.attention(
        execution.Request(
            q,
            k,
            v,
            mask,
            site,
            [0] * q.size(1),
            causal=execution.causal_code(spec.causal),
            scale=spec.scale,
            dropout_p=spec.dropout_p,
            training=wants_mask or execution.is_training(q, k, v),
            wants_mask=wants_mask,
            traced=torch.compiler.is_compiling(),
            # With dropout `exact_delta` gives way to `compensated`, which needs the room.
            keeps_residual=runtime.keeps_residuals or (spec.dropout_p > 0.0 and mask is None),
        )
    )
