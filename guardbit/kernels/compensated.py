"""Launches the kernel that writes an O' with the delta of O and its rounding residual.

Shapes: out, residual, d_out `(B, H, N, D)`; C heads are wanted.
"""

# Triton types launches: constexpr parameters take plain values, launches take options.
# pyright: reportArgumentType=false, reportCallIssue=false

from __future__ import annotations

from collections.abc import Sequence

import triton
from torch import Tensor

from guardbit.kernels import launch
from guardbit.kernels.device.compensated import carry_kernel

# Rows of a program.
_BLOCK_M = 32


def carry_compensated_delta(
    d_out: Tensor, out: Tensor, residual: Tensor, into: Tensor, *, head_ids: Sequence[int]
) -> None:
    """Writes O' of some heads, see `guardbit.kernels.reference.write_carrier`.

    Args:
        d_out: Gradient of the output, BF16 or FP16; any strides.
        out: The output.
        residual: INT8, what rounding took from it.
        into: Where O' goes, rows adjacent in memory; may be `out`.
        head_ids: The C heads.

    Raises:
        TypeError: If a dtype is neither BF16 nor FP16.
        ValueError: If a tensor is not on a CUDA device.
    """
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
