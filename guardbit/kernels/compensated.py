"""Writes an O' with the delta of O and its rounding residual.

Shapes: out, residual, d_out `(B, H, N, D)`; C heads are wanted.
"""

# Triton kernels are typed by Triton: constexpr parameters take plain values, launches take options.
# pyright: reportArgumentType=false, reportAssignmentType=false, reportCallIssue=false
# pyright: reportGeneralTypeIssues=false, reportInvalidTypeForm=false, reportOperatorIssue=false
# pyright: reportPossiblyUnboundVariable=false

from __future__ import annotations

from collections.abc import Sequence

import triton
import triton.language as tl
from torch import Tensor

from guardbit.kernels import launch
from guardbit.kernels.device.carrier import write_rows
from guardbit.kernels.device.primitives import head_of, load_tile
from guardbit.kernels.device.rounding import decode_residual, widen

# Rows of a program.
_BLOCK_M = 32


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


def carry_compensated_delta(
    d_out: Tensor, out: Tensor, residual: Tensor, into: Tensor, *, head_ids: Sequence[int]
) -> None:
    """Writes O' of some heads, see `guardbit.kernels.reference.write_carrier`."""
    launch.check_tensors(d_out=d_out, out=out)
    d_out, out, residual = (launch.rows_adjacent(x) for x in (d_out, out, residual))
    batch, _, seqlen_q, head_dim = out.shape
    ids = launch.device_head_ids(tuple(head_ids), out.device)
    if not out.numel():
        return
    with launch.device_of(out):
        carry_kernel[(triton.cdiv(seqlen_q, _BLOCK_M) * batch * len(ids),)](
            out,
            residual,
            d_out,
            into,
            ids,
            out.stride()[:3],
            residual.stride()[:3],
            d_out.stride()[:3],
            into.stride()[:3],
            len(ids),
            seqlen_q,
            HEAD_DIM=head_dim,
            WIDTH=launch.padded_width(head_dim),
            BLOCK_M=_BLOCK_M,
            num_warps=4,
            **launch.COMPILER_OPTIONS,
        )
