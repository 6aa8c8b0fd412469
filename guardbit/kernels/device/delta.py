"""Exact delta in Triton, and the O' that carries it to another kernel's backward.

Scores are kept as plain products q k, as in the forward.

`guardbit.kernels.reference.delta.write_carrier` says what a row of O' holds. For most rows the
first few columns suffice: no thread reads the others, and zeros are written there. A tile with any
other row is written by a second path, a few columns at a time. That path needs few registers, so it
takes none from the kernel that calls it.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from guardbit.kernels.device import launch
from guardbit.kernels.device.primitives import (
    ADDITIVE,
    BOOLEAN,
    COUNTS,
    INTERPRET,
    LOG2_E,
    NO_MASK,
    decode_residual,
    head_of,
    load_mask,
    load_ranges,
    load_tile,
    part_of_keys,
    partial_sums,
    product,
    ranged_keys,
    round_nearest,
    tanh_and_slope,
    visible_keys,
    visible_of,
    widen,
)
from guardbit.kernels.reference.delta import (
    ENOUGH,
    FIRST_COLUMNS,
    HALF_STEP,
    MISS,
    SMALLEST_MISS,
    Carried,
)
from guardbit.kernels.spec import AttentionSpec

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
_CARRY_ROWS = 32


@triton.jit(do_not_specialize=COUNTS)
def carry_kernel(
    out_pointer, residual_pointer, d_out_pointer, carrier_pointer, head_ids_pointer,
    out_strides, residual_strides, d_out_strides, carrier_strides,
    computed_heads, seqlen_q,
    HEAD_DIM: tl.constexpr, WIDTH: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
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
    """See `reference.carry_compensated_delta`; one launch."""
    if into is None:
        into = launch.empty_like_rows(out)
        if len(head_ids) < out.size(1):
            into.copy_(out)
    d_out, out, residual = map(launch.rows_adjacent, (d_out, out, residual))
    batch, _, seqlen_q, head_dim = out.shape
    ids = launch.device_constant(tuple(head_ids), torch.int32, out.device)
    if not out.numel():
        return into
    launch.run(
        carry_kernel,
        -(-seqlen_q // _CARRY_ROWS) * batch * len(ids),
        (out, residual, d_out, into, ids),
        launch.strides(out, residual, d_out, into),
        (len(ids), seqlen_q),
        HEAD_DIM=head_dim,
        WIDTH=launch.padded_width(head_dim),
        BLOCK_M=_CARRY_ROWS,
        num_warps=4,
        enable_fp_fusion=True,
    )
    return into


@triton.jit
def _weighted(probabilities, d_probabilities, MAY_BE_BEHIND: tl.constexpr):
    """Returns sums of P dP, eight a row; MAY_BE_BEHIND if V has rows behind the last document."""
    terms = probabilities * d_probabilities
    if MAY_BE_BEHIND:
        terms = tl.where(probabilities == 0.0, 0.0, terms)
    return partial_sums(terms)


@triton.jit
def _add_keys(
    row_sum, sum_p_dp, q, d_out, keys, dense, rows, log_sum, start, end, seqlen_q, seqlen_k, shift,
    inner_scale, scale, BOUNDED: tl.constexpr, CAUSAL: tl.constexpr, RANGED: tl.constexpr,
    SOFTCAP: tl.constexpr, MASK: tl.constexpr, HEAD_DIM: tl.constexpr, WIDTH: tl.constexpr,
    VALUE_DIM: tl.constexpr, VALUE_WIDTH: tl.constexpr, BLOCK_N: tl.constexpr,
    OVERLAP: tl.constexpr, USE_TMA: tl.constexpr,
):  # fmt: skip
    """Adds the keys from `start` to `end` to the sums of P and of P dP, eight of each a row.

    `keys` are where K and V of the head begin, or with USE_TMA the tensors' descriptors; the
    strides of their rows; batch and head. `dense` is where the head's mask begins, and its strides.
    Of `rows` see `visible_of`.
    With an additive mask, `scale` and `log_sum` are in natural units, so that a format's lowest
    number, which masks use, does not overflow. Otherwise they are in log2 units, which saves a
    multiplication.
    """
    k_base, v_base, k_stride, v_stride, batch, key_head = keys
    # Other loads end with the keys that a row sees.
    MAY_BE_BEHIND: tl.constexpr = USE_TMA and RANGED and BOUNDED
    zeros = tl.zeros((q.shape[0], BLOCK_N), tl.float32)
    probabilities, d_probabilities = zeros, zeros
    for first in tl.range(start, end, BLOCK_N):
        if USE_TMA:
            k = k_base.load([batch, key_head, first, 0]).reshape(BLOCK_N, WIDTH)
            v = v_base.load([batch, key_head, first, 0]).reshape(BLOCK_N, VALUE_WIDTH)
        else:
            k = load_tile(k_base, first, k_stride, seqlen_k, BLOCK_N, HEAD_DIM, WIDTH, BOUNDED)
            v = load_tile(
                v_base, first, v_stride, seqlen_k, BLOCK_N, VALUE_DIM, VALUE_WIDTH, BOUNDED
            )
        scores = product(q, tl.trans(k), zeros)
        if OVERLAP:
            # Of the tile before, whose second product nothing has waited for yet.
            sum_p_dp += _weighted(probabilities, d_probabilities, MAY_BE_BEHIND)
        d_probabilities = product(d_out, tl.trans(v), zeros)
        if SOFTCAP:
            scores, _ = tanh_and_slope(scores * inner_scale)
        if MASK == ADDITIVE:
            mask = load_mask(dense, rows[0], first, seqlen_q - 1, seqlen_k, BLOCK_N, BOUNDED)
            exponents = tl.fma(scores, scale, mask.to(tl.float32)) - log_sum[:, None]
            exponents *= LOG2_E
        else:
            exponents = tl.fma(scores, scale, -log_sum[:, None])
        if MASK == BOOLEAN:
            mask = load_mask(dense, rows[0], first, seqlen_q - 1, seqlen_k, BLOCK_N, BOUNDED)
            exponents = tl.where(mask != 0, exponents, float("-inf"))
        if BOUNDED:
            visible = visible_of(rows, first, seqlen_k, shift, BLOCK_N, CAUSAL, RANGED)
            exponents = tl.where(visible, exponents, float("-inf"))
        probabilities = tl.exp2(exponents)
        row_sum += partial_sums(probabilities)
        if not OVERLAP:
            sum_p_dp += _weighted(probabilities, d_probabilities, MAY_BE_BEHIND)
    if OVERLAP:
        sum_p_dp += _weighted(probabilities, d_probabilities, MAY_BE_BEHIND)
    return row_sum, sum_p_dp


@triton.jit(do_not_specialize=COUNTS)
def delta_kernel(
    q_pointer, k_pointer, v_pointer, d_out_pointer, lse_pointer, mask_pointer, ranges_pointer,
    sinks_pointer, head_ids_pointer, out_pointer, delta_pointer, carrier_pointer,
    q_strides, k_strides, v_strides, d_out_strides, lse_strides, mask_strides, out_strides,
    carrier_strides,
    batch_heads, section, computed_heads, group, seqlen_q, seqlen_k, shift, inner_scale, scale,
    CAUSAL: tl.constexpr, RANGED: tl.constexpr, SOFTCAP: tl.constexpr, SINKS: tl.constexpr,
    MASK: tl.constexpr, CARRY: tl.constexpr, HEAD_DIM: tl.constexpr, WIDTH: tl.constexpr,
    VALUE_DIM: tl.constexpr, VALUE_WIDTH: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, OVERLAP: tl.constexpr, USE_TMA: tl.constexpr,
):  # fmt: skip
    """One program: delta of BLOCK_M queries of one head, and with CARRY their rows of O'.

    Programs work on `section` heads at a time, whose keys and values the cache holds. Within those,
    heavy causal tiles come first: with few heads, the launch would wait for a heavy one at the end.
    """
    row_tiles = tl.cdiv(seqlen_q, BLOCK_M)
    program = tl.program_id(0)
    first_batch_head = program // (section * row_tiles) * section
    turn = program - first_batch_head * row_tiles
    present = tl.minimum(section, batch_heads - first_batch_head)
    batch_head = first_batch_head + turn % present
    first = (row_tiles - 1 - turn // present) * BLOCK_M
    batch = batch_head // computed_heads
    head_id = tl.load(head_ids_pointer + batch_head % computed_heads)
    key_head = head_id // group

    q_base = head_of(q_pointer, q_strides, batch, head_id)
    k_base = k_pointer
    v_base = v_pointer
    if not USE_TMA:
        k_base = head_of(k_pointer, k_strides, batch, key_head)
        v_base = head_of(v_pointer, v_strides, batch, key_head)
    d_out_base = head_of(d_out_pointer, d_out_strides, batch, head_id)
    lse_base = head_of(lse_pointer, lse_strides, batch, head_id)
    mask_base = mask_pointer
    if MASK != NO_MASK:
        mask_base = head_of(mask_pointer, mask_strides, batch, head_id)
    positions = first + tl.arange(0, BLOCK_M)
    inside = positions < seqlen_q
    q = load_tile(q_base, first, q_strides[2], seqlen_q, BLOCK_M, HEAD_DIM, WIDTH, True)
    d_out = load_tile(
        d_out_base, first, d_out_strides[2], seqlen_q, BLOCK_M, VALUE_DIM, VALUE_WIDTH, True
    )
    log_sum = tl.load(lse_base + positions * lse_strides[2], mask=inside, other=0.0)
    # Whatever an engine leaves for a row that sees no key.
    log_sum = tl.where(tl.abs(log_sum) == float("inf"), 0.0, log_sum)
    if MASK != ADDITIVE:
        scale *= LOG2_E
        log_sum *= LOG2_E
    first_seen, end_seen, start, whole = 0, 0, 0, 0
    if RANGED:
        first_seen, end_seen = load_ranges(ranges_pointer, positions, seqlen_q)
        start, whole, whole_end, end = ranged_keys(first_seen, end_seen, seqlen_k, BLOCK_N)
        seqlen_k = end  # behind the last document anything may lie
    else:
        whole_end, end = visible_keys(first, seqlen_k, shift, BLOCK_M, BLOCK_N, CAUSAL)

    keys = k_base, v_base, k_strides[2], v_strides[2], batch, key_head
    dense = mask_base, mask_strides
    rows = positions, first_seen, end_seen
    row_sum = tl.zeros((BLOCK_M, 8), tl.float32)
    sum_p_dp = tl.zeros((BLOCK_M, 8), tl.float32)
    for part in tl.static_range(0 if RANGED else 1, 3):
        begin, stop = part_of_keys(part, start, whole, whole_end, end)
        # Loops never run zero times, for the reason given in the forward.
        if stop > begin:
            row_sum, sum_p_dp = _add_keys(
                row_sum, sum_p_dp, q, d_out, keys, dense, rows, log_sum, begin, stop, seqlen_q,
                seqlen_k, shift, inner_scale, scale, part != 1, CAUSAL, RANGED, SOFTCAP, MASK,
                HEAD_DIM, WIDTH, VALUE_DIM, VALUE_WIDTH, BLOCK_N, OVERLAP, USE_TMA,
            )  # fmt: skip
    row_sum = tl.sum(row_sum, 1)
    if SINKS:
        sink = tl.load(sinks_pointer + head_id)
        if MASK == ADDITIVE:
            row_sum += tl.exp2((sink - log_sum) * LOG2_E)
        else:
            row_sum += tl.exp2(sink * LOG2_E - log_sum)
    # Divided by 1, a row that sees no key keeps its 0.
    delta = tl.sum(sum_p_dp, 1) / tl.where(row_sum == 0.0, 1.0, row_sum)
    tl.store(delta_pointer + batch_head.to(tl.int64) * seqlen_q + positions, delta, mask=inside)

    if CARRY:
        # A row that sees no key keeps its O: engines differ in what they make of it.
        carried = tl.where(row_sum == 0.0, float("nan"), delta)
        write_rows(
            (head_of(carrier_pointer, carrier_strides, batch, head_id), carrier_strides[2]),
            (head_of(out_pointer, out_strides, batch, head_id), out_strides[2]),
            (d_out_base, d_out_strides[2]), first, seqlen_q, carried, VALUE_DIM, VALUE_WIDTH,
        )  # fmt: skip


# Bytes of keys and values that are read again and again: what half of the second-level cache of an
# H100 holds.
_CACHE = 2**25

# Launches that load nothing besides, descriptors of K and V, and the heads' numbers, by layouts.
_plans: dict[Hashable, tuple[Callable[..., None], list[TensorDescriptor], Tensor]] = {}


def exact_delta(
    d_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lse: Tensor,
    *,
    spec: AttentionSpec,
    head_ids: Sequence[int],
    out: Tensor | None = None,
    carrier: Tensor | None = None,
) -> Tensor:
    """See `reference.exact_delta`; with `carrier` it writes the heads' rows of O' there."""
    d_out, q, k, v = map(launch.rows_adjacent, (d_out, q, k, v))
    (batch, num_heads, seqlen_q, head_dim), head_ids = q.shape, tuple(head_ids)
    delta = q.new_empty((batch, len(head_ids), seqlen_q), dtype=torch.float32)
    out = d_out if out is None else launch.rows_adjacent(out)
    carried = out if carrier is None else carrier
    tensors = q, k, v, d_out, lse, out, carried
    layouts = [(x.dtype, x.shape, x.stride(), x.data_ptr() % 16) for x in tensors]
    key = spec, head_ids, carrier is None, q.device, *layouts
    if (found := _plans.get(key)) is not None:
        again, examples, ids = found
        keys = map(launch.described, (k, v), examples) if examples else (k, v)
        again((q, *keys, d_out, lse, delta, delta, delta, ids, out, delta, carried))
        return delta
    if not delta.numel():
        return delta
    ids = launch.device_constant(head_ids, torch.int32, q.device)
    kv_heads, seqlen_k, value_dim = v.shape[1:]
    call = launch.prepare(spec, q, v, "delta", delta)
    rows, widths = call.tile.block_n, (call.constants["WIDTH"], call.constants["VALUE_WIDTH"])
    use_tma = call.tile.use_tma and launch.can_use_tma(k) and launch.can_use_tma(v)
    keys = [
        TensorDescriptor(x, [*x.shape], [*x.stride()], [1, 1, rows, width]) if use_tma else x
        for x, width in zip((k, v), widths, strict=True)
    ]
    section = max(1, _CACHE // max(1, seqlen_k * (head_dim + value_dim) * q.element_size()))
    counts = batch * len(ids), section, len(ids), num_heads // kv_heads, seqlen_q, seqlen_k
    again = launch.run(
        delta_kernel,
        -(-seqlen_q // call.tile.block_m) * batch * len(ids),
        (q, *keys, d_out, lse, *call.loaded, ids, out, delta, carried),
        (*launch.strides(q, k, v, d_out, lse), call.mask_strides, *launch.strides(out, carried)),
        (*counts, call.shift, call.inner_scale, call.scale),
        CARRY=carrier is not None,
        OVERLAP=call.tile.overlap,
        USE_TMA=use_tma,
        **call.constants,
    )
    if all(x is delta for x in call.loaded):
        if len(_plans) >= 1024:
            _plans.clear()
        _plans[key] = again, [launch.described(None, x) for x in keys if use_tma], ids
    return delta


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
    """See `reference.carry_exact_delta`; one launch."""
    if into is None:
        into = launch.empty_like_rows(out)
        if len(set(head_ids)) < q.shape[1]:
            into.copy_(out)
    delta = exact_delta(d_out, q, k, v, lse, spec=spec, head_ids=head_ids, out=out, carrier=into)
    return Carried(into, delta)
