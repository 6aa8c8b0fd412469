"""Writes rows of O' that carry a delta, and computes the compensated one.

`guardbit.kernels.reference.delta.write_carrier` says what a row of O' holds. For most rows the
first few columns suffice: no thread reads the others, and zeros are written there. A tile with any
other row is written by a second path, a few columns at a time. That path needs few registers, so it
takes none from the kernel that calls it.
"""

from __future__ import annotations

from collections.abc import Sequence

import triton
import triton.language as tl
from torch import Tensor

from guardbit.kernels.device import launch
from guardbit.kernels.device.primitives import (
    COUNTS,
    INTERPRET,
    decode_residual,
    head_of,
    load_tile,
    round_nearest,
    widen,
)
from guardbit.kernels.reference.delta import ENOUGH, FIRST_COLUMNS, HALF_STEP, MISS, SMALLEST_MISS

_FIRST = tl.constexpr(FIRST_COLUMNS)
_ENOUGH, _HALF_STEP = tl.constexpr(ENOUGH), tl.constexpr(HALF_STEP)
_MISS, _SMALLEST_MISS = tl.constexpr(MISS), tl.constexpr(SMALLEST_MISS)
# Columns that are looked at together where the first do not do.
_CHUNK = tl.constexpr(16)


@triton.jit
def _number(bits, dtype: tl.constexpr):
    """Returns the BF16 or FP16 number with these bits, INT32, as FP32."""
    # The interpreter's own conversion gets BF16's subnormals wrong.
    if dtype == tl.bfloat16:
        number = (bits << 16).to(tl.float32, bitcast=True)
    else:
        number = bits.to(tl.uint16).to(dtype, bitcast=True).to(tl.float32)
    return number


@triton.jit
def _greatest(d_out, columns):
    """Returns the three greatest ranks of each row (R, C), each INT32 (R,).

    A rank is 15 bits of |dO|, 8 that put the first column first, and one for dO's sign.
    """
    bits = d_out.to(tl.uint16, bitcast=True).to(tl.int32)
    ranks = ((bits & 0x7FFF) << 9) | ((255 - columns) << 1) | (bits >> 15)
    first = tl.max(ranks, 1)
    ranks = tl.where(ranks == first[:, None], -1, ranks)
    second = tl.max(ranks, 1)
    ranks = tl.where(ranks == second[:, None], -1, ranks)
    return first, second, tl.max(ranks, 1)


@triton.jit
def _term(rank, rest, dtype: tl.constexpr):
    """Returns the number at a rank's place, in `dtype`, and what is left to carry, each (R,)."""
    LARGEST: tl.constexpr = 3.3895313892515355e38 if dtype == tl.bfloat16 else 65504.0
    gradient = _number((rank >> 9) | ((rank & 1) << 15), dtype)
    # The quotient is 0 where dO is 0.
    quotient = tl.div_rn(rest, tl.where(gradient == 0.0, float("inf"), gradient))
    quotient = tl.minimum(tl.maximum(quotient, -LARGEST), LARGEST)
    # Compiled, `round_nearest` needs two numbers a thread.
    term = round_nearest(quotient, dtype) if INTERPRET else quotient.to(dtype)
    return term, tl.fma(-gradient, term.to(tl.float32), rest)


@triton.jit
def _terms(first, second, third, delta, dtype: tl.constexpr):
    """Returns the three numbers of each row and what they leave, each (R,)."""
    x, rest = _term(first, delta, dtype)
    y, rest = _term(second, rest, dtype)
    z, rest = _term(third, rest, dtype)
    return x, y, z, rest


@triton.jit
def _placed(columns, first, second, third, x, y, z):
    """Returns (R, C): the three numbers of each row at their columns, 0 elsewhere."""
    nothing = tl.zeros((1, 1), x.dtype)
    row = tl.where(columns == 255 - ((third >> 1) & 255)[:, None], z[:, None], nothing)
    row = tl.where(columns == 255 - ((second >> 1) & 255)[:, None], y[:, None], row)
    return tl.where(columns == 255 - ((first >> 1) & 255)[:, None], x[:, None], row)


@triton.jit
def _write_searched(
    carrier,
    out,
    d_out,
    inside,
    delta,
    enough,
    few,
    VALUE_DIM: tl.constexpr,
    VALUE_WIDTH: tl.constexpr,
):
    """Writes a tile: rows marked `enough` from the ranks and numbers `few`, others by search."""
    carrier_base, carrier_stride = carrier
    out_base, out_stride = out
    d_out_base, d_out_stride = d_out
    first, second, third, x, y, z = few
    dtype: tl.constexpr = x.dtype
    rows = tl.arange(0, delta.shape[0])[:, None]
    a, b, c = first * 0 - 1, first * 0 - 1, first * 0 - 1
    for column in tl.range(0, VALUE_WIDTH, _CHUNK, num_stages=1):
        columns = column + tl.arange(0, _CHUNK)[None, :]
        present = inside[:, None] & (columns < VALUE_DIM)
        gradients = tl.load(d_out_base + rows * d_out_stride + columns, mask=present, other=0.0)
        d, e, f = _greatest(gradients, columns)
        # The three greatest of two times three in falling order.
        lower, higher = tl.minimum(a, d), tl.maximum(b, e)
        c = tl.maximum(tl.minimum(lower, higher), tl.maximum(c, f))
        a, b = tl.maximum(a, d), tl.maximum(lower, higher)
    u, v, w, rest = _terms(a, b, c, delta, dtype)
    bound = tl.maximum(tl.abs(delta) * _MISS, _number(a >> 9, dtype) * _SMALLEST_MISS)
    reached = enough | ((tl.abs(rest) <= bound) & (tl.abs(delta) < float("inf")))
    first, x = tl.where(enough, first, a), tl.where(enough, x, u)
    second, y = tl.where(enough, second, b), tl.where(enough, y, v)
    third, z = tl.where(enough, third, c), tl.where(enough, z, w)
    for column in tl.range(0, VALUE_WIDTH, _CHUNK, num_stages=1):
        columns = column + tl.arange(0, _CHUNK)[None, :]
        present = inside[:, None] & (columns < VALUE_DIM)
        kept = present & (reached == 0)[:, None]
        old = tl.load(out_base + rows * out_stride + columns, mask=kept, other=0.0)
        new = _placed(columns, first, second, third, x, y, z)
        new = tl.where(reached[:, None], new, old)
        tl.store(carrier_base + rows * carrier_stride + columns, new, mask=present)


@triton.jit
def write_rows(
    carrier, out, d_out, start, limit, delta, VALUE_DIM: tl.constexpr, VALUE_WIDTH: tl.constexpr
):
    """Writes rows of O' of one head, from `start` on and up to `limit`, that carry FP32 delta (R,).

    `carrier`, `out` and `d_out` are where the head begins in O', O and dO, BF16 or FP16, and the
    stride of its rows. Rows that cannot carry delta keep O; O may be O' itself. VALUE_WIDTH is a
    multiple of 16 and at most 256.
    """
    carrier_base, carrier_stride = carrier
    out_base, out_stride = out
    d_out_base, d_out_stride = d_out
    dtype: tl.constexpr = d_out_base.dtype.element_ty
    rows = tl.arange(0, delta.shape[0])
    inside = start + rows < limit
    carrier_base += tl.cast(start, tl.int64) * carrier_stride
    out_base += tl.cast(start, tl.int64) * out_stride
    d_out_base += tl.cast(start, tl.int64) * d_out_stride
    few = tl.arange(0, _FIRST)[None, :]
    present = inside[:, None] & (few < VALUE_DIM)
    gradients = tl.load(d_out_base + rows[:, None] * d_out_stride + few, mask=present, other=0.0)
    first, second, third = _greatest(gradients, few)
    x, y, z, rest = _terms(first, second, third, delta, dtype)
    finite = tl.abs(delta) < float("inf")
    bound = tl.maximum(tl.abs(delta) * _ENOUGH, _number(third >> 9, dtype) * _HALF_STEP)
    # False where anything is NaN.
    enough = (tl.abs(rest) <= bound) & finite
    if tl.min((enough | (inside == 0)).to(tl.int32), 0) != 0:
        row = _placed(few, first, second, third, x, y, z)
        tl.store(carrier_base + rows[:, None] * carrier_stride + few, row, mask=present)
        if VALUE_WIDTH > _FIRST:
            columns = tl.max_contiguous(tl.arange(0, VALUE_WIDTH), 8)[None, :]
            others = inside[:, None] & (columns >= _FIRST) & (columns < VALUE_DIM)
            nothing = tl.zeros((delta.shape[0], VALUE_WIDTH), dtype)
            tl.store(carrier_base + rows[:, None] * carrier_stride + columns, nothing, mask=others)
    else:
        _write_searched(
            (carrier_base, carrier_stride), (out_base, out_stride), (d_out_base, d_out_stride),
            inside, delta, enough, (first, second, third, x, y, z), VALUE_DIM, VALUE_WIDTH,
        )  # fmt: skip


# Rows of a program.
_BLOCK_M = 32


@triton.jit(do_not_specialize=COUNTS)
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
        (head_of(carrier_pointer, carrier_strides, batch, head_id), carrier_strides[2]),
        (out_base, out_strides[2]), (d_out_base, d_out_strides[2]), first, seqlen_q, delta,
        HEAD_DIM, WIDTH,
    )  # fmt: skip


def carry_compensated_delta(
    d_out: Tensor,
    out: Tensor,
    residual: Tensor,
    *,
    head_ids: Sequence[int],
    into: Tensor | None = None,
) -> Tensor:
    """See `reference.carry_compensated_delta`."""
    launch.check_tensors(d_out=d_out, out=out)
    if into is None:
        into = launch.empty_like_rows(out)
        if len(head_ids) < out.size(1):
            into.copy_(out)
    d_out, out, residual = map(launch.rows_adjacent, (d_out, out, residual))
    batch, _, seqlen_q, head_dim = out.shape
    ids = launch.device_head_ids(tuple(head_ids), out.device)
    if not out.numel():
        return into
    launch.run(
        carry_kernel,
        triton.cdiv(seqlen_q, _BLOCK_M) * batch * len(ids),
        (out, residual, d_out, into, ids),
        launch.strides(out, residual, d_out, into),
        (len(ids), seqlen_q),
        HEAD_DIM=head_dim,
        WIDTH=launch.padded_width(head_dim),
        BLOCK_M=_BLOCK_M,
        num_warps=4,
        **launch.COMPILER_OPTIONS,
    )
    return into
