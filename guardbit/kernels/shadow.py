"""Launches the shadow kernel: O to FP32 accuracy, and statistics of its rows or their maxima alone.

Shapes: q `(B, H, N, D)`; k `(B, H_kv, M, D)`, H a multiple of H_kv; v `(B, H_kv, M, E)`; R is the
number of queries looked at.
"""


# Triton types launches: constexpr parameters take plain values, launches take options.
# pyright: reportArgumentType=false, reportCallIssue=false

from __future__ import annotations

import math

import torch
import triton
from torch import Tensor

from guardbit.kernels import launch, tiles
from guardbit.kernels.device.masks import NO_MASK
from guardbit.kernels.device.shadow import shadow_kernel
from guardbit.kernels.mask.geometry import causal_shift, hidden_rows
from guardbit.kernels.reference import RowMaxima, Shadow
from guardbit.kernels.spec import AttentionSpec


def shadow(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    spec: AttentionSpec,
    eps: float = 1e-3,
    query_ids: Tensor | None = None,
) -> Shadow:
    """Recomputes O in FP32 and counts maxima, in one launch and memory proportional to the rows."""
    launch.check_tensors(q=q, k=k, v=v)
    shape = (*q.shape[:2], q.shape[2] if query_ids is None else len(query_ids))
    out = torch.empty((*shape, v.shape[3]), dtype=torch.float32, device=q.device)
    row_max, entropy, largest = (
        torch.empty(shape, dtype=torch.float32, device=q.device) for _ in range(3)
    )
    counts = [torch.empty(shape, dtype=torch.int64, device=q.device) for _ in range(2)]
    result = Shadow(out, row_max, *counts, entropy, largest)
    _launch(q, k, v, spec, eps, query_ids, result)
    hidden = hidden_rows(spec, (*q.shape[:3], k.shape[2]), query_ids)
    if hidden is not None:
        for field in (result.row_max, result.largest):
            field.masked_fill_(hidden, -math.inf)
        for field in (result.maxima, result.maxima_bf16, result.entropy):
            field.masked_fill_(hidden, 0)
    return result


def row_maxima(
    q: Tensor, k: Tensor, *, spec: AttentionSpec, query_ids: Tensor | None = None
) -> RowMaxima:
    """The maxima of `shadow` alone, to the bit: one pass over the keys and no values."""
    if spec.mask is not None and spec.mask.dtype != torch.bool:
        found = shadow(q, k, k, spec=spec, query_ids=query_ids)
        return RowMaxima(found.row_max, found.largest)
    launch.check_tensors(q=q, k=k)
    shape = (*q.shape[:2], q.shape[2] if query_ids is None else len(query_ids))
    row_max, largest = (torch.empty(shape, dtype=torch.float32, device=q.device) for _ in range(2))
    nowhere = row_max  # what is not written
    result = Shadow(nowhere, row_max, nowhere, nowhere, nowhere, largest)
    _launch(q, k, k, spec, 0.0, query_ids, result, only_maxima=True)
    return RowMaxima(row_max, largest)


def _launch(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    spec: AttentionSpec,
    eps: float,
    query_ids: Tensor | None,
    result: Shadow,
    only_maxima: bool = False,
) -> None:
    """Fills a shadow, or the maxima of one."""
    q, k, v = launch.rows_adjacent(q), launch.rows_adjacent(k), launch.rows_adjacent(v)
    batch, num_heads, seqlen_q, head_dim = q.shape
    kv_heads, seqlen_k, value_dim = v.shape[1:]
    entropy, count = result.entropy, result.row_max.shape[2]
    whole_shape = (batch, num_heads, seqlen_q, seqlen_k)
    dense, dense_strides, kind = launch.mask_arguments(spec, whole_shape, entropy)
    ranges, is_ranged = launch.range_arguments(spec, whole_shape, entropy)
    if not result.out.numel():
        return

    width, value_width = launch.padded_width(head_dim), launch.padded_width(value_dim)
    tile = tiles.tile(launch.capability_of(q), max(width, value_width), "shadow")
    if kind != NO_MASK.value or is_ranged or spec.softcap > 0:
        tile = tile.for_mask
    inner_scale, scale = launch.factors(spec)
    size_of_scale = launch.size_of_scale(scale)
    with launch.device_of(q):
        shadow_kernel[(triton.cdiv(count, tile.block_m) * batch * num_heads,)](
            q,
            k,
            v,
            dense,
            ranges,
            launch.sinks_of(spec, entropy),
            entropy if query_ids is None else query_ids.contiguous(),
            result.out,
            result.row_max,
            entropy,
            result.maxima,
            result.maxima_bf16,
            result.largest,
            q.stride()[:3],
            k.stride()[:3],
            v.stride()[:3],
            dense_strides,
            num_heads,
            num_heads // kv_heads,
            count,
            seqlen_q,
            seqlen_k,
            causal_shift(spec.causal, seqlen_q, seqlen_k),
            inner_scale,
            size_of_scale,
            size_of_scale * math.log2(math.e),
            1 / size_of_scale,
            eps,
            eps * math.log2(math.e),
            HAS_QUERY_IDS=query_ids is not None,
            NEGATIVE_SCALE=scale < 0,
            ONLY_MAXIMA=only_maxima,
            **launch.call_constants(spec, kind, is_ranged, (head_dim, value_dim), tile),
        )
