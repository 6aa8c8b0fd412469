"""Launches the gradient audit: dQ of a few heads to FP32 accuracy.

Shapes: q `(B, H, N, D)`; k `(B, H_kv, M, D)`, H a multiple of H_kv; v `(B, H_kv, M, E)`; d_out
`(B, H, N, E)`; C heads are wanted.
"""

# Triton types launches: constexpr parameters take plain values, launches take options.
# pyright: reportArgumentType=false, reportCallIssue=false

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import triton
from torch import Tensor

from guardbit.kernels import launch, tiles
from guardbit.kernels.device.audit import query_kernel
from guardbit.kernels.device.masks import NO_MASK
from guardbit.kernels.mask.geometry import causal_shift
from guardbit.kernels.reference.delta import check_heads
from guardbit.kernels.spec import AttentionSpec


def exact_query_gradient(
    d_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    spec: AttentionSpec,
    head_ids: Sequence[int],
) -> Tensor:
    """DQ of a few heads to FP32 accuracy, from the inputs a kernel got; O(N) memory."""
    launch.check_tensors(d_out=d_out, q=q, k=k, v=v)
    check_heads(head_ids, q.shape[1])
    d_out, q, k, v = (launch.rows_adjacent(x) for x in (d_out, q, k, v))
    batch, num_heads, seqlen_q, head_dim = q.shape
    seqlen_k, value_dim = v.shape[2:]
    ids = launch.device_head_ids(tuple(head_ids), q.device)
    computed_heads = len(ids)
    dq = torch.empty(
        (batch, computed_heads, seqlen_q, head_dim), dtype=torch.float32, device=q.device
    )
    shape = (batch, num_heads, seqlen_q, seqlen_k)
    dense, dense_strides, kind = launch.mask_arguments(spec, shape, dq)
    ranges, is_ranged = launch.range_arguments(spec, shape, dq)
    if not dq.numel():
        return dq
    inner_scale, outer_scale = launch.factors(spec)
    size_of_scale = launch.size_of_scale(outer_scale)
    width, value_width = launch.padded_width(head_dim), launch.padded_width(value_dim)
    tile = tiles.tile(launch.capability_of(q), max(width, value_width), "audit")
    if kind != NO_MASK.value or spec.softcap > 0:
        tile = tile.for_mask
    with launch.device_of(q):
        query_kernel[(triton.cdiv(seqlen_q, tile.block_m) * batch * computed_heads,)](
            q,
            k,
            v,
            d_out,
            dense,
            ranges,
            launch.sinks_of(spec, dq),
            ids,
            dq,
            *(x.stride()[:3] for x in (q, k, v, d_out)),
            dense_strides,
            computed_heads,
            num_heads // k.shape[1],
            seqlen_q,
            seqlen_k,
            causal_shift(spec.causal, seqlen_q, seqlen_k),
            inner_scale,
            spec.scale,
            size_of_scale * math.log2(math.e),
            1 / size_of_scale,
            NEGATIVE_SCALE=outer_scale < 0,
            **launch.call_constants(spec, kind, is_ranged, (head_dim, value_dim), tile),
        )
    return dq
