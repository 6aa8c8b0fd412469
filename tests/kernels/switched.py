"""Calls of `F.scaled_dot_product_attention` through the op, and what their site then runs."""

import math

from guardbit.kernels.op import attention_at_site
from guardbit.kernels.spec import AttentionSpec


def switchable_attention(q, k, v, site, *, is_causal, scale, attn_mask=None, dropout_p=0.0):
    """Computes a call of the module with this number; its heads may be switched."""
    scale = 1.0 / math.sqrt(q.size(-1)) if scale is None else scale
    spec = AttentionSpec(scale, "top-left" if is_causal else False, attn_mask, dropout_p)
    return attention_at_site(q, k, v, site, spec)[0]


def in_force(state):
    """One name a head: what is asked for, or the last call's own where the kernels failed."""
    return state.asked if state.failure is None else state.requested
