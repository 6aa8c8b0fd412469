"""Sums the error of delta, with its sign and without.

Shapes: out, d_out `(B, H, N, D)`; R is the number of queries looked at.
"""

# Triton kernels are typed by Triton: constexpr parameters take plain values, launches take options.
# pyright: reportArgumentType=false, reportAssignmentType=false, reportCallIssue=false
# pyright: reportGeneralTypeIssues=false, reportInvalidTypeForm=false, reportOperatorIssue=false
# pyright: reportPossiblyUnboundVariable=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from guardbit.kernels import launch
from guardbit.kernels.device.primitives import head_of, load_rows, load_tile
from guardbit.kernels.device.rounding import decode_residual, widen

# Rows of a program that sums up the bias of delta.
_BIAS_BLOCK_M = 64


@triton.jit(do_not_specialize=["num_heads", "count", "seqlen_q"])
def delta_bias_kernel(
    d_out_pointer,
    out_pointer,
    residual_pointer,
    exact_pointer,
    query_ids_pointer,
    bias_pointer,
    size_pointer,
    d_out_strides,
    out_strides,
    residual_strides,
    num_heads,
    count,
    seqlen_q,
    HAS_QUERY_IDS: tl.constexpr,
    COMPENSATED: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    """One program: the part of the two sums from BLOCK_M of the `count` rows of one head."""
    row_tiles = tl.cdiv(count, BLOCK_M)
    program = tl.program_id(0)
    batch_head = program // row_tiles
    first = program % row_tiles * BLOCK_M
    batch = batch_head // num_heads
    head = batch_head % num_heads
    places = first + tl.arange(0, BLOCK_M)
    positions = places
    if HAS_QUERY_IDS:
        chosen = tl.load(query_ids_pointer + places, mask=places < count, other=-1)
        positions = chosen.to(tl.int32)

    d_out_base = head_of(d_out_pointer, d_out_strides, batch, head)
    d_out = load_rows(d_out_base, positions, d_out_strides[2], seqlen_q, HEAD_DIM, WIDTH)
    out_base = head_of(out_pointer, out_strides, batch, head)
    rounded = load_rows(out_base, positions, out_strides[2], seqlen_q, HEAD_DIM, WIDTH)
    exact_base = exact_pointer + batch_head.to(tl.int64) * count * HEAD_DIM
    exact = load_tile(exact_base, first, HEAD_DIM, count, BLOCK_M, HEAD_DIM, WIDTH, True)
    errors = widen(rounded) - exact
    if COMPENSATED:
        residual_base = head_of(residual_pointer, residual_strides, batch, head)
        counts = load_rows(residual_base, positions, residual_strides[2], seqlen_q, HEAD_DIM, WIDTH)
        errors += decode_residual(rounded, counts)
    bias = tl.sum(widen(d_out) * errors, 1)
    tl.store(bias_pointer + program, tl.sum(bias, 0))
    tl.store(size_pointer + program, tl.sum(tl.abs(bias), 0))


def delta_bias(
    d_out: Tensor,
    out: Tensor,
    exact: Tensor,
    *,
    residual: Tensor | None = None,
    query_ids: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The error of delta = rowsum(dO * O) that adds up (paper, equation 3 and figure 5a)."""
    launch.check_tensors(d_out=d_out, out=out)
    d_out, out, exact = launch.rows_adjacent(d_out), launch.rows_adjacent(out), exact.contiguous()
    batch, num_heads, seqlen_q, head_dim = out.shape
    count = exact.shape[2]
    row_tiles = triton.cdiv(count, _BIAS_BLOCK_M)
    sums = torch.empty((2, batch, num_heads, row_tiles), dtype=torch.float32, device=out.device)
    width = launch.padded_width(head_dim)
    counts = launch.rows_adjacent(residual) if residual is not None else out
    if sums.numel():
        with launch.device_of(out):
            delta_bias_kernel[(sums[0].numel(),)](
                d_out,
                out,
                counts,
                exact,
                exact if query_ids is None else query_ids.contiguous(),
                *sums,
                d_out.stride()[:3],
                out.stride()[:3],
                counts.stride()[:3],
                num_heads,
                count,
                seqlen_q,
                HAS_QUERY_IDS=query_ids is not None,
                COMPENSATED=residual is not None,
                HEAD_DIM=head_dim,
                WIDTH=width,
                BLOCK_M=_BIAS_BLOCK_M,
                num_warps=4 if width <= 64 else 8,
                **launch.COMPILER_OPTIONS,
            )
    bias, size = sums.double().sum((1, 3))
    return bias, size
