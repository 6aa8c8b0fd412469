"""What the kernels share: roundings, tiles, products, sums and maxima of rows, masks.

Under Triton's interpreter (TRITON_INTERPRET=1 when this module is imported) the same kernels run on
the CPU. It multiplies the raw bits of BF16 operands and truncates FP32 to BF16, so there products
take FP32 operands, and rounding is spelled out in integers. Compiled kernels contain none of this.
"""

import math

import triton
import triton.language as tl
from triton import knobs

from guardbit import numerics

INTERPRET = tl.constexpr(knobs.runtime.interpret)
RESIDUAL_STEPS = tl.constexpr(numerics.RESIDUAL_STEPS)
RESIDUAL_STEP_BITS = tl.constexpr(numerics.RESIDUAL_STEP_BITS)


@triton.jit
def round_nearest(x, dtype: tl.constexpr):
    """FP32 to BF16 or FP16, to nearest even; a block of two or more elements a thread.

    Spelled out for pairs: where the result is widened again LLVM converts one number at a time, at
    a sixteenth of the rate, or in integers, and the forward takes a quarter longer.
    """
    if INTERPRET:
        if dtype == tl.bfloat16:
            bits = x.to(tl.uint32, bitcast=True)
            # A NaN is kept from carrying into infinity.
            carried = bits + 0x7FFF + ((bits >> 16) & 1)
            kept = tl.where(x == x, carried, bits | 0x400000) & 0xFFFF0000
            rounded = kept.to(tl.float32, bitcast=True).to(dtype)
        else:
            rounded = x.to(dtype)
    elif dtype == tl.bfloat16:
        rounded = tl.inline_asm_elementwise(
            "cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,f,f", [x], dtype=tl.bfloat16, is_pure=True, pack=2
        )
    else:
        rounded = tl.inline_asm_elementwise(
            "cvt.rn.f16x2.f32 $0, $2, $1;", "=r,f,f", [x], dtype=tl.float16, is_pure=True, pack=2
        )
    return rounded


@triton.jit
def widen(x):
    """BF16 or FP16 to FP32; of BF16 two or more elements a thread, for the same reason."""
    if INTERPRET or x.dtype == tl.float16:
        wide = x.to(tl.float32)
    else:
        wide = tl.inline_asm_elementwise(
            "shl.b32 $0, $2, 16; and.b32 $1, $2, 0xffff0000;",
            "=f,=f,r",
            [x],
            dtype=tl.float32,
            is_pure=True,
            pack=2,
        )
    return wide


@triton.jit
def random_halves(seed, group, row, place, last):
    """`guardbit.numerics.random_halves` of a block of counters, eight a counter side by side.

    The words of a counter are `group` (1, G), `row` (R, 1), `place` and `last`. Returns (R, 8 G),
    UINT32 below 2^16.
    """
    zero = (group + row).to(tl.uint32) * 0
    first, second, third, fourth = tl.philox(
        seed,
        zero + group.to(tl.uint32),
        zero + row.to(tl.uint32),
        zero + place.to(tl.uint32),
        zero + last.to(tl.uint32),
    )
    words = tl.join(tl.join(first, third), tl.join(second, fourth))
    halves = tl.join(words & 0xFFFF, words >> 16)
    return tl.reshape(halves, (zero.shape[0], zero.shape[1] * 8))


@triton.jit
def encode_residual(exact, rounded):
    """`guardbit.numerics.encode_residual`: FP32 and what it was rounded to, to INT8.

    Where `rounded` is not finite the result is any number.
    """
    DROPPED: tl.constexpr = 16 if rounded.dtype == tl.bfloat16 else 13
    wide = widen(rounded)
    lost = exact.to(tl.int32, bitcast=True) - wide.to(tl.int32, bitcast=True)
    counts = (lost * (RESIDUAL_STEPS << (16 - DROPPED)) + (1 << 15)) >> 16
    if rounded.dtype == tl.float16:
        # Of these numbers the above may have left INT32; it is not used.
        steps = (tl.abs(exact) - tl.abs(wide)) * (RESIDUAL_STEPS * 2.0**24)
        # Beside 1.5 2^23 there is no room for a fraction: it is rounded away, to nearest even, and
        # the lowest byte of the sum is the number.
        steps = (steps + 12582912.0).to(tl.int32, bitcast=True)
        counts = tl.where(tl.abs(wide) <= 2.0**-14, steps, counts)
    return counts.to(tl.int8)


@triton.jit
def decode_residual(rounded, counts):
    """`guardbit.numerics.decode_residual`, FP32; not finite where `rounded` is not."""
    DROPPED: tl.constexpr = 16 if rounded.dtype == tl.bfloat16 else 13
    wide = widen(rounded)
    bits = wide.to(tl.int32, bitcast=True)
    lost = (counts.to(tl.int32) * RESIDUAL_STEP_BITS + (1 << (30 - DROPPED))) >> (31 - DROPPED)
    residual = (bits + lost).to(tl.float32, bitcast=True) - wide
    if rounded.dtype == tl.float16:
        steps = counts.to(tl.float32) * (1.0 / (RESIDUAL_STEPS * 2.0**24))
        steps = tl.where(bits < 0, -steps, steps)
        residual = tl.where(tl.abs(wide) <= 2.0**-14, steps, residual)
    return residual


#: Numbers that kernels get of a call: they are compiled once, whatever these are.
COUNTS = (
    "batch_heads", "computed_heads", "count", "group", "kv_heads", "num_heads", "section",
    "seqlen_k", "seqlen_q", "shift", "threshold",
)  # fmt: skip

LOG2_E = tl.constexpr(math.log2(math.e))
LN_2 = tl.constexpr(math.log(2))


@triton.jit
def head_of(pointer, strides, batch, head):
    """Returns where a head of a tensor begins; `strides` are those of batch, head and row."""
    place = tl.cast(batch, tl.int64) * strides[0] + tl.cast(head, tl.int64) * strides[1]
    return pointer + place


@triton.jit
def load_tile(
    base,
    start,
    stride,
    limit,
    SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    BOUNDED: tl.constexpr,
):
    """Loads (SIZE, WIDTH) from row `start`; 0 beyond column HEAD_DIM and, if BOUNDED, row limit."""
    rows = tl.arange(0, SIZE)
    columns = tl.arange(0, WIDTH)
    base += tl.cast(start, tl.int64) * stride
    pointers = base + rows[:, None] * stride + columns[None, :]
    if BOUNDED:
        if HEAD_DIM == WIDTH:
            tile = tl.load(pointers, mask=(start + rows < limit)[:, None], other=0.0)
        else:
            inside = (start + rows < limit)[:, None] & (columns < HEAD_DIM)[None, :]
            tile = tl.load(pointers, mask=inside, other=0.0)
    elif HEAD_DIM == WIDTH:
        tile = tl.load(pointers)
    else:
        tile = tl.load(pointers, mask=(columns < HEAD_DIM)[None, :], other=0.0)
    return tile


@triton.jit
def load_rows(base, positions, stride, limit, HEAD_DIM: tl.constexpr, WIDTH: tl.constexpr):
    """Loads (R, WIDTH), the rows at `positions` (R,); 0 outside 0..limit - 1 and HEAD_DIM."""
    columns = tl.arange(0, WIDTH)
    pointers = base + positions.to(tl.int64)[:, None] * stride + columns[None, :]
    inside = ((positions >= 0) & (positions < limit))[:, None] & (columns < HEAD_DIM)[None, :]
    return tl.load(pointers, mask=inside, other=0.0)


@triton.jit
def store_tile(
    base,
    start,
    stride,
    limit,
    tile,
    SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Stores (SIZE, WIDTH) from row `start` on, up to row `limit` and column HEAD_DIM."""
    rows = tl.arange(0, SIZE)
    # A thread stores eight numbers, of bytes too: with sixteen of them, Triton gives the copies of
    # keys and values, whose addresses are built alike, the same shape, and the loop takes longer.
    columns = tl.max_contiguous(tl.arange(0, WIDTH), 8)
    base += tl.cast(start, tl.int64) * stride
    pointers = base + rows[:, None] * stride + columns[None, :]
    inside = (start + rows < limit)[:, None] & (columns < HEAD_DIM)[None, :]
    tl.store(pointers, tile, mask=inside)


@triton.jit
def product(a, b, accumulator):
    """Returns accumulator + a b, accumulated in FP32."""
    if INTERPRET:
        result = accumulator + tl.dot(a.to(tl.float32), b.to(tl.float32), input_precision="ieee")
    else:
        result = tl.dot(a, b, accumulator)
    return result


@triton.jit
def product_exact(a, b):
    """Returns the product of FP32 a and BF16 or FP16 b to FP32 accuracy.

    Three BF16 parts hold all bits of a. FP16 b goes in as two: parts of a in FP16 would leave its
    range.
    """
    result = tl.zeros((a.shape[0], b.shape[1]), tl.float32)
    high = round_nearest(a, tl.bfloat16)
    rest = a - widen(high)
    middle = round_nearest(rest, tl.bfloat16)
    low = round_nearest(rest - widen(middle), tl.bfloat16)
    if b.dtype == tl.float16:
        wide = widen(b)
        b = round_nearest(wide, tl.bfloat16)
        b_rest = round_nearest(wide - widen(b), tl.bfloat16)
        # What low would add lies below FP32's last bit.
        result = product(middle, b_rest, result)
        result = product(high, b_rest, result)
    result = product(low, b, result)
    result = product(middle, b, result)
    return product(high, b, result)


@triton.jit
def count_above(x, threshold):
    """Counts the elements of each row (R, C) that are at least the threshold, a scalar; FP32."""
    if INTERPRET:
        above = tl.where(x >= threshold, 1.0, 0.0)
    else:
        # A saturating multiply-add costs one instruction where comparing and selecting cost two.
        # Times 2^100 any difference saturates; the threshold itself is lowered by half a step.
        huge = 2.0**100
        above = tl.inline_asm_elementwise(
            "fma.rn.sat.f32 $0, $1, $2, $3;",
            "=f,f,f,f",
            [x, huge, (tl.abs(threshold) * 2.0**-24 - threshold) * huge],
            dtype=tl.float32,
            is_pure=True,
            pack=1,
        )
    return tl.sum(above, 1)


@triton.jit
def kept_entries(philox_key, positions, batch_head, first_key, threshold, BLOCK_N: tl.constexpr):
    """Returns which entries of P dropout keeps, (R, BLOCK_N), see `reference.Dropout`.

    `batch_head` is the number of the query head among those of all batches. `first_key` and BLOCK_N
    are multiples of 8.
    """
    groups = first_key // 8 + tl.arange(0, BLOCK_N // 8)[None, :]
    last = tl.full((), 0, tl.uint32)
    return random_halves(philox_key, groups, positions[:, None], batch_head, last) >= threshold.to(
        tl.uint32
    )


@triton.jit
def mark_above(x, threshold):
    """1 where x is at least `threshold`, give or take 2^-22 of it, else 0; FP32, 0 for NaN."""
    threshold = threshold - tl.abs(threshold) * 2.0**-22
    if INTERPRET:
        marks = tl.where(x >= threshold, 1.0, 0.0)
    else:
        # As in `count_above`; the 1 lets a threshold of 0 count itself.
        marks = tl.inline_asm_elementwise(
            "fma.rn.sat.f32 $0, $1, $2, $3;",
            "=f,f,f,f",
            [x, 2.0**100, 1.0 - threshold * 2.0**100],
            dtype=tl.float32,
            is_pure=True,
            pack=1,
        )
    return marks


@triton.jit
def partial_sums(x):
    """Sums each row's columns eight apart, (R, C) to (R, 8).

    In the layout of a matrix product each thread can do that alone. The caller adds up the eight
    sums after the loop over the keys, which saves an exchange between threads for every tile.
    """
    return tl.sum(tl.reshape(x, (x.shape[0], x.shape[1] // 8, 8)), 1)


@triton.jit
def partial_maxima(x):
    """Returns the maxima of each row's columns eight apart, as `partial_sums` does sums."""
    return tl.max(tl.reshape(x, (x.shape[0], x.shape[1] // 8, 8)), 1)


@triton.jit
def tanh_and_slope(x):
    """Returns tanh of FP32 numbers and its derivative, each to about 2^-23 of itself."""
    size = tl.abs(x)
    decay = tl.exp2(size * (-2 * LOG2_E))
    # Where the difference would lose digits, its series: beyond x^9 is less than 2^-26 of it.
    square = x * x
    series = 1 + square * (-1 / 3 + square * (2 / 15 + square * (-17 / 315 + square * 62 / 2835)))
    tanh = tl.where(size < 0.25, size * series, (1 - decay) / (1 + decay))
    return tl.where(x < 0, -tanh, tanh), 4 * decay / ((1 + decay) * (1 + decay))


@triton.jit
def with_sink(sinks_pointer, head, reference):
    """Returns what a head's sink takes of its rows' probabilities, FP32 (R,) each.

    They are, in log2 units and at most 0, by how much `reference`, which was subtracted from the
    row's scores, and by how much the sink lies below the larger of both.
    """
    # exp2 of -1024 is 0 as of -inf, and 0 times it is no NaN.
    sink = tl.maximum(tl.load(sinks_pointer + head) * LOG2_E - reference, -1024.0)
    return -tl.maximum(sink, 0.0), tl.minimum(sink, 0.0)


# --- which keys the rows of a tile see, and how a dense mask is loaded ---

#: Values of a kernel's MASK: the kind of its dense mask.
NO_MASK, BOOLEAN, ADDITIVE = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)

# Far below any score, with room for the scale.
_LOWEST = tl.constexpr(-(2.0**100))


@triton.jit
def visible_keys(
    first_row, seqlen_k, shift, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, CAUSAL: tl.constexpr
):
    """Returns where the tiles end that every row sees whole, and the keys that any row sees."""
    if CAUSAL:
        whole = tl.minimum(tl.maximum(first_row + shift + 1, 0), seqlen_k)
        end = tl.minimum(tl.maximum(first_row + shift + BLOCK_M, 0), seqlen_k)
    else:
        whole = seqlen_k
        end = seqlen_k
    return whole // BLOCK_N * BLOCK_N, end


@triton.jit
def load_ranges(ranges_pointer, positions, seqlen_q):
    """Loads where the keys of each row begin and end, (R,); past the last query, those of it."""
    pointers = ranges_pointer + tl.minimum(positions, seqlen_q - 1)
    return tl.load(pointers), tl.load(pointers + seqlen_q)


@triton.jit
def ranged_keys(first_seen, end_seen, seqlen_k, BLOCK_N: tl.constexpr):
    """Returns where the keys lie that a tile of rows sees, from the range of each row.

    The first key that any row sees; the start and the end of the whole tiles, counted from there,
    that every row sees; and the end of the keys that any row sees.
    """
    seeing = first_seen < end_seen
    end = tl.max(tl.where(seeing, end_seen, 0), 0)
    start = tl.minimum(tl.min(tl.where(seeing, first_seen, seqlen_k), 0), end)
    whole = start + tl.cdiv(tl.max(first_seen, 0) - start, BLOCK_N) * BLOCK_N
    whole_end = whole + tl.maximum(tl.min(end_seen, 0) - whole, 0) // BLOCK_N * BLOCK_N
    return start, whole, whole_end, end


@triton.jit
def seeing_rows(
    first_key, seqlen_q, shift, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, CAUSAL: tl.constexpr
):
    """Returns where the rows begin that see a tile's first key, and those that see all its keys.

    Both are multiples of BLOCK_M, and these rows go on to the last one.
    """
    start = 0
    whole = 0
    if CAUSAL:
        start = tl.minimum(tl.maximum(first_key - shift, 0), seqlen_q) // BLOCK_M * BLOCK_M
        whole = tl.maximum(first_key + BLOCK_N - 1 - shift, 0)
        whole = tl.minimum(tl.cdiv(whole, BLOCK_M) * BLOCK_M, tl.cdiv(seqlen_q, BLOCK_M) * BLOCK_M)
    return start, whole


@triton.jit
def allowed(positions, columns, seqlen_k, shift, CAUSAL: tl.constexpr):
    """Returns which of `columns`, of any shape that broadcasts, the queries may see."""
    last = seqlen_k - 1
    if CAUSAL:
        # One comparison an element: the smaller bound is the same for a whole row.
        last = tl.minimum(positions + shift, last)
    return columns <= last


@triton.jit
def visible_of(
    rows,
    first_key,
    seqlen_k,
    shift,
    BLOCK_N: tl.constexpr,
    CAUSAL: tl.constexpr,
    RANGED: tl.constexpr,
):
    """Returns which keys of a tile are seen, (R, BLOCK_N); `rows`: position, first key, end."""
    positions, first_seen, end_seen = rows
    columns = first_key + tl.arange(0, BLOCK_N)
    if RANGED:
        columns = columns[None, :]
        visible = (columns >= first_seen[:, None]) & (columns < end_seen[:, None])
    else:
        visible = allowed(positions[:, None], columns[None, :], seqlen_k, shift, CAUSAL)
    return visible


@triton.jit
def part_of_keys(part: tl.constexpr, start, whole, whole_end, end):
    """Returns where a part of the keys begins and ends.

    Part 1 are the tiles that every row sees whole. What comes before is part 0, which only ranges
    of keys have, and what comes after part 2.
    """
    if part == 0:
        begin, stop = start, tl.minimum(whole, end)
    elif part == 1:
        begin, stop = whole, whole_end
    else:
        begin, stop = whole_end, end
    return begin, stop


@triton.jit
def behind(positions, columns, shift):
    """Returns which of `columns` the causal mask allows, wherever the keys end."""
    return columns <= positions + shift


@triton.jit
def load_mask(
    dense,
    positions,
    first_key,
    last_row,
    seqlen_k,
    BLOCK_N: tl.constexpr,
    BOUNDED: tl.constexpr,
):
    """Loads a tile of a dense mask, (R, BLOCK_N), from `first_key` on.

    `dense` is where the head's mask begins, and its four strides, 0 where it broadcasts. Rows past
    `last_row` get that one's. What lies past the last key is 0 if BOUNDED, else nothing does.
    """
    base, strides = dense
    columns = tl.arange(0, BLOCK_N)
    base += tl.cast(first_key, tl.int64) * strides[3]
    row_bases = base + tl.minimum(positions, last_row).to(tl.int64) * strides[2]
    pointers = row_bases[:, None] + (columns * strides[3])[None, :]
    if BOUNDED:
        tile = tl.load(pointers, mask=(first_key + columns < seqlen_k)[None, :], other=0)
    else:
        tile = tl.load(pointers)
    return tile


@triton.jit
def add_mask(
    scores,
    dense,
    positions,
    first_key,
    last_row,
    seqlen_k,
    inverse_scale,
    MASK: tl.constexpr,
    BOUNDED: tl.constexpr,
):
    """Adds a dense mask to a tile of scores that are not scaled yet, FP32 (R, K).

    Returns these, which keys are seen, and what was added, or the mask itself if it is boolean.
    """
    tile = load_mask(dense, positions, first_key, last_row, seqlen_k, scores.shape[1], BOUNDED)
    if MASK == BOOLEAN:
        seen = tile != 0
        bias = tile
    else:
        bias = tile.to(tl.float32)
        seen = bias != float("-inf")
        # What every key of a row has makes no difference, and nothing overflows.
        scores += tl.where(bias < _LOWEST, _LOWEST, bias) * inverse_scale
    return scores, seen, bias
