"""Launches the kernel of exact delta, and of the O' that carries it to another kernel's backward.

Shapes: q `(B, H, N, D)`; k `(B, H_kv, M, D)`, H a multiple of H_kv; v `(B, H_kv, M, E)`; out, d_out
`(B, H, N, E)`; C heads are wanted.
"""

# Triton types launches: constexpr parameters take plain values, launches take options.
# pyright: reportArgumentType=false, reportCallIssue=false

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
from torch import Tensor

from guardbit.kernels import launch, tiles
from guardbit.kernels.device.delta import delta_kernel
from guardbit.kernels.device.masks import NO_MASK
from guardbit.kernels.mask.geometry import causal_shift
from guardbit.kernels.reference.delta import check_heads
from guardbit.kernels.spec import AttentionSpec

# Bytes of keys and values that are read again and again: what half of the second-level cache of an
# H100 holds.
_CACHE = 2**25


class Carried(NamedTuple):
    """What `carry_exact_delta` made.

    Attributes:
        out: (B, H, N, E), O' for the kernel's backward.
        delta: FP32 (B, C, N), what the wanted heads' rows carry.
    """

    out: Tensor
    delta: Tensor


def exact_delta(
    d_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lse: Tensor,
    *,
    spec: AttentionSpec,
    head_ids: Sequence[int],
) -> Tensor:
    """Delta of a few heads as a backward needs it, from unrounded probabilities."""
    return _launch(d_out, q, k, v, None, lse, spec, head_ids, None)


def carry_exact_delta(
    d_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    *,
    spec: AttentionSpec,
    head_ids: Sequence[int],
    into: Tensor | None = None,
) -> Carried:
    """The O' with which a kernel's backward uses the exact delta of some heads, in one launch."""
    check_heads(head_ids, q.shape[1])
    if into is None:
        into = launch.empty_as(out)
        if len(set(head_ids)) < q.shape[1]:
            into.copy_(out)
    if into.stride(-1) != 1:
        raise ValueError("`into` needs rows whose neighbouring elements are adjacent in memory.")
    return Carried(into, _launch(d_out, q, k, v, out, lse, spec, head_ids, into))


def _launch(
    d_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor | None,
    lse: Tensor,
    spec: AttentionSpec,
    head_ids: Sequence[int],
    carrier: Tensor | None,
) -> Tensor:
    """Launches the kernel, which writes delta, and with `carrier` the heads' rows of O'."""
    launch.check_tensors(d_out=d_out, q=q, k=k, v=v, **({} if out is None else {"out": out}))
    check_heads(head_ids, q.shape[1])
    d_out, q, k, v = (launch.rows_adjacent(x) for x in (d_out, q, k, v))
    batch, num_heads, seqlen_q, head_dim = q.shape
    kv_heads, seqlen_k, value_dim = v.shape[1:]
    ids = launch.device_head_ids(tuple(head_ids), q.device)
    computed_heads = len(ids)
    delta = torch.empty((batch, computed_heads, seqlen_q), dtype=torch.float32, device=q.device)
    shape = (batch, num_heads, seqlen_q, seqlen_k)
    mask, mask_strides, kind = launch.mask_arguments(spec, shape, delta)
    ranges, is_ranged = launch.range_arguments(spec, shape, delta)
    inner_scale, scale = launch.factors(spec)
    if not delta.numel():
        return delta
    out = d_out if out is None else launch.rows_adjacent(out)
    carried = out if carrier is None else carrier
    width, value_width = launch.padded_width(head_dim), launch.padded_width(value_dim)
    tile = tiles.tile(launch.capability_of(q), max(width, value_width), "delta")
    if kind != NO_MASK.value or spec.softcap > 0:
        tile = tile.for_mask
    use_tma = tile.use_tma and launch.can_use_tma(k) and launch.can_use_tma(v)
    with launch.device_of(q):
        delta_kernel[(triton.cdiv(seqlen_q, tile.block_m) * batch * computed_heads,)](
            q,
            launch.tma_descriptor(k, tile.block_n, width) if use_tma else k,
            launch.tma_descriptor(v, tile.block_n, value_width) if use_tma else v,
            d_out,
            lse,
            mask,
            ranges,
            launch.sinks_of(spec, delta),
            ids,
            out,
            delta,
            carried,
            q.stride()[:3],
            k.stride()[:3],
            v.stride()[:3],
            d_out.stride()[:3],
            lse.stride(),
            mask_strides,
            out.stride()[:3],
            carried.stride()[:3],
            batch * computed_heads,
            max(1, _CACHE // max(1, seqlen_k * (head_dim + value_dim) * q.element_size())),
            computed_heads,
            num_heads // kv_heads,
            seqlen_q,
            seqlen_k,
            causal_shift(spec.causal, seqlen_q, seqlen_k),
            inner_scale,
            scale,
            CARRY=carrier is not None,
            OVERLAP=tile.overlap,
            USE_TMA=use_tma,
            **launch.call_constants(spec, kind, is_ranged, (head_dim, value_dim), tile),
        )
    return delta
