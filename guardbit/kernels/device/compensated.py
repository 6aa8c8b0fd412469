"""The kernel that writes an O' with the delta of O and its rounding residual."""

# Triton kernels are typed by Triton: constexpr parameters take plain values.
# pyright: reportArgumentType=false, reportAssignmentType=false, reportCallIssue=false
# pyright: reportGeneralTypeIssues=false, reportInvalidTypeForm=false, reportOperatorIssue=false
# pyright: reportPossiblyUnboundVariable=false

from __future__ import annotations

import triton
import triton.language as tl

from guardbit.kernels.device.carrier import write_rows
from guardbit.kernels.device.primitives import head_of, load_tile
from guardbit.kernels.device.rounding import decode_residual, widen


@triton.jit(do_not_specialize=["computed_heads", "seqlen_q"])
def carry_kernel(
    out_pointer,
    residual_pointer,
    d_out_pointer,
    carrier_pointer,
    head_ids_pointer,
    out_strides,
    residual_strides,
    d_out_strides,
    carrier_strides,
    computed_heads,
    seqlen_q,
    HEAD_DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    """One program: BLOCK_M rows of one head."""
    row_tiles = tl.cdiv(seqlen_q, BLOCK_M)
    batch_head = tl.program_id(0) // row_tiles
    first = tl.program_id(0) % row_tiles * BLOCK_M
    batch = batch_head // computed_heads
    head_id = tl.load(head_ids_pointer + batch_head % computed_heads)
    out_base = head_of(out_pointer, out_strides, batch, head_id)
    residual_base = head_of(residual_pointer, residual_strides, batch, head_id)
    d_out_base = head_of(d_out_pointer, d_out_strides, batch, head_id)
    out = load_tile(out_base, first, out_strides[2], seqlen_q, BLOCK_M, HEAD_DIM, WIDTH, True)
    counts = load_tile(
        residual_base, first, residual_strides[2], seqlen_q, BLOCK_M, HEAD_DIM, WIDTH, True
    )
    d_out = load_tile(d_out_base, first, d_out_strides[2], seqlen_q, BLOCK_M, HEAD_DIM, WIDTH, True)
    wide = widen(out)
    lost = decode_residual(out, counts)
    exact = wide + tl.where(tl.abs(wide) < float("inf"), lost, 0.0)
    delta = tl.sum(widen(d_out) * exact, 1)
    write_rows(
        head_of(carrier_pointer, carrier_strides, batch, head_id), out_base, d_out_base,
        carrier_strides[2], out_strides[2], d_out_strides[2], first, seqlen_q, delta, HEAD_DIM,
        WIDTH,
    )  # fmt: skip
