"""Launches the forward kernel: O, L and the residual, with a stabilizer for each head.

Shapes: q `(B, H, N, D)`; k, v `(B, H_kv, M, D)`, H a multiple of H_kv.
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
from guardbit.kernels.device.forward import forward_kernel
from guardbit.kernels.mask.geometry import causal_shift
from guardbit.kernels.reference import Causal, Dropout, Forward
from guardbit.kernels.reference.forward_pass import SHIFT_MAX, SHIFT_MAX_FP16, SHIFT_MIN


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: Causal,
    scale: float,
    stabilizers: Sequence[str],
    beta: float = 2.0,
    eps: float = 1e-3,
    head_ids: Sequence[int] | None = None,
    dropout: Dropout | None = None,
) -> Forward:
    """Attention as FlashAttention-2 rounds it (paper, Algorithm 1), with a stabilizer a head."""
    launch.check_tensors(q=q, k=k, v=v)
    q, k, v = launch.rows_adjacent(q), launch.rows_adjacent(k), launch.rows_adjacent(v)
    batch, num_heads, seqlen_q, head_dim = q.shape
    kv_heads, seqlen_k = k.shape[1:3]
    computed = tuple(range(num_heads)) if head_ids is None else tuple(head_ids)
    launch.check_count(stabilizers, len(computed))
    shift = causal_shift(causal, seqlen_q, seqlen_k)
    codes = launch.device_codes(tuple(stabilizers), q.device)
    out = launch.empty_like_rows(q if head_ids is None else q[:, : len(computed)])
    lse = torch.empty(out.shape[:3], dtype=torch.float32, device=q.device)
    compensated = "compensated" in stabilizers
    residual = torch.empty_like(out, dtype=torch.int8) if compensated else None
    if not out.numel():
        return Forward(out, lse, residual)

    width = launch.padded_width(head_dim)
    tile = tiles.tile(launch.capability_of(q), width, "forward")
    if dropout is not None:
        tile = tile.for_dropout
    row_tiles = triton.cdiv(seqlen_q, tile.block_m)
    shift_max = SHIFT_MAX_FP16 if q.dtype == torch.float16 else SHIFT_MAX
    size_of_scale = launch.size_of_scale(scale)
    with launch.device_of(q):
        forward_kernel[(row_tiles * batch * len(computed),)](
            q,
            k,
            v,
            out,
            lse,
            out if residual is None else residual,
            codes,
            launch.device_head_ids(computed, q.device),
            lse if dropout is None else dropout.philox_key,
            q.stride()[:3],
            k.stride()[:3],
            v.stride()[:3],
            out.stride()[:3],
            num_heads,
            len(computed),
            num_heads // kv_heads,
            seqlen_q,
            seqlen_k,
            shift,
            size_of_scale,
            size_of_scale * math.log2(math.e),
            eps / size_of_scale,
            (beta - 1) * size_of_scale / (shift_max - SHIFT_MIN),
            SHIFT_MIN * math.log2(math.e),
            (shift_max - SHIFT_MIN) * math.log2(math.e),
            threshold=0 if dropout is None else dropout.threshold,
            factor=1.0 if dropout is None else dropout.factor,
            CAUSAL=causal is not False,
            NEGATIVE_SCALE=scale < 0,
            COMPENSATED=_share(stabilizers, "compensated"),
            ROW_MAX=_share(stabilizers, "row_max"),
            DROPOUT=dropout is not None,
            HEAD_DIM=head_dim,
            WIDTH=width,
            BLOCK_M=tile.block_m,
            BLOCK_N=tile.block_n,
            **tile.options,
            **launch.COMPILER_OPTIONS,
        )
    return Forward(out, lse, residual)


def _share(stabilizers: Sequence[str], name: str) -> int:
    """Whether none, some or all of the heads have this stabilizer."""
    count = list(stabilizers).count(name)
    return 0 if count == 0 else 2 if count == len(stabilizers) else 1
