"""Launches the backward kernels: delta, dQ, dK and dV.

Shapes: q, out, d_out `(B, H, N, D)`; k, v `(B, H_kv, M, D)`, H a multiple of H_kv; lse FP32
`(B, H, N)`.
"""

# Triton types launches: constexpr parameters take plain values, launches take options.
# pyright: reportArgumentType=false, reportCallIssue=false

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
from torch import Tensor

from guardbit.kernels import launch, tiles
from guardbit.kernels.device.backward import key_gradients_kernel, query_gradients_kernel
from guardbit.kernels.mask.geometry import causal_shift
from guardbit.kernels.reference import Causal, Dropout, Gradients


def backward(
    d_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    residual: Tensor | None,
    *,
    causal: Causal,
    scale: float,
    stabilizers: Sequence[str],
    dropout: Dropout | None = None,
) -> Gradients:
    """Backward with the roundings of FlashAttention-2 (paper, Algorithm 2)."""
    launch.check_tensors(d_out=d_out, q=q, k=k, v=v, out=out)
    d_out, q, k, v, out = (launch.rows_adjacent(x) for x in (d_out, q, k, v, out))
    batch, computed_heads, seqlen_q, head_dim = q.shape
    kv_heads, seqlen_k = k.shape[1:3]
    launch.check_count(stabilizers, computed_heads)
    shift = causal_shift(causal, seqlen_q, seqlen_k)
    codes = launch.device_codes(tuple(stabilizers), q.device)
    if "compensated" in stabilizers and residual is None:
        raise ValueError("Compensated heads need the forward's residual, but it is None.")
    # Never read if no head is compensated; any pointer to bytes will do.
    residual = out.view(torch.int8) if residual is None else launch.rows_adjacent(residual)
    dq, dk, dv = (launch.empty_like_rows(x) for x in (q, k, v))

    width = launch.padded_width(head_dim)
    capability = launch.capability_of(q)
    query_tile = tiles.tile(capability, width, "query_gradients")
    key_tile = tiles.tile(capability, width, "key_gradients")
    if dropout is not None:
        query_tile, key_tile = query_tile.for_dropout, key_tile.for_dropout
    lse = lse.contiguous()
    statistics = lse.new_empty((*lse.shape, 2))
    random, dropped = (codes, lse), (computed_heads, 0, 1.0)
    if dropout is not None:
        random = (launch.device_head_ids(dropout.head_ids, q.device), dropout.philox_key)
        dropped = (dropout.num_heads, dropout.threshold, dropout.factor)
    shared = (computed_heads // kv_heads, seqlen_q, seqlen_k, shift, scale, *dropped)
    options = {
        "DROPOUT": dropout is not None,
        "CAUSAL": causal is not False,
        "HEAD_DIM": head_dim,
        "WIDTH": width,
        **launch.COMPILER_OPTIONS,
    }
    with launch.device_of(q):
        if q.numel():
            query_gradients_kernel[
                (triton.cdiv(seqlen_q, query_tile.block_m) * batch * computed_heads,)
            ](
                q,
                k,
                v,
                out,
                residual,
                d_out,
                lse,
                codes,
                dq,
                statistics,
                *random,
                q.stride()[:3],
                k.stride()[:3],
                v.stride()[:3],
                out.stride()[:3],
                residual.stride()[:3],
                d_out.stride()[:3],
                dq.stride()[:3],
                computed_heads,
                *shared,
                **options,
                BLOCK_M=query_tile.block_m,
                BLOCK_N=query_tile.block_n,
                **query_tile.options,
            )
        if k.numel():
            key_gradients_kernel[(triton.cdiv(seqlen_k, key_tile.block_n) * batch * kv_heads,)](
                q,
                k,
                v,
                d_out,
                statistics,
                dk,
                dv,
                *random,
                q.stride()[:3],
                k.stride()[:3],
                v.stride()[:3],
                d_out.stride()[:3],
                dk.stride()[:3],
                dv.stride()[:3],
                kv_heads,
                *shared,
                **options,
                BOUNDED=seqlen_q % key_tile.block_m != 0,
                BLOCK_M=key_tile.block_m,
                BLOCK_N=key_tile.block_n,
                **key_tile.options,
            )
    return Gradients(dq, dk, dv)
