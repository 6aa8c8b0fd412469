"""What the Triton kernels share: tiles, products, roundings, and which keys a tile of rows sees.

Under Triton's interpreter (TRITON_INTERPRET=1 when this module is imported) the same kernels run on
the CPU. The interpreter truncates FP32 to BF16 and multiplies the raw bits of BF16 operands, so
there products take FP32 operands and rounding is spelled out in integers; compiled kernels contain
none of this.
"""

# pyright: reportArgumentType=false, reportAssignmentType=false, reportCallIssue=false
# pyright: reportGeneralTypeIssues=false, reportInvalidTypeForm=false, reportOperatorIssue=false
# pyright: reportPossiblyUnboundVariable=false

import math

import triton
import triton.language as tl
from triton import knobs

INTERPRET = tl.constexpr(knobs.runtime.interpret)

LOG2_E = tl.constexpr(math.log2(math.e))
LN_2 = tl.constexpr(math.log(2))


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
    columns = tl.arange(0, WIDTH)
    base += tl.cast(start, tl.int64) * stride
    pointers = base + rows[:, None] * stride + columns[None, :]
    inside = (start + rows < limit)[:, None] & (columns < HEAD_DIM)[None, :]
    tl.store(pointers, tile, mask=inside)


@triton.jit
def product(a, b, accumulator):
    """The sum of the accumulator and a b, accumulated in FP32."""
    if INTERPRET:
        result = accumulator + tl.dot(a.to(tl.float32), b.to(tl.float32), input_precision="ieee")
    else:
        result = tl.dot(a, b, accumulator)
    return result


@triton.jit
def round_nearest(x, dtype: tl.constexpr):
    """FP32 to BF16 or FP16, to nearest even."""
    if INTERPRET and dtype == tl.bfloat16:
        bits = x.to(tl.uint32, bitcast=True)
        # A NaN is kept from carrying into infinity.
        carried = bits + 0x7FFF + ((bits >> 16) & 1)
        kept = tl.where(x == x, carried, bits | 0x400000) & 0xFFFF0000
        rounded = kept.to(tl.float32, bitcast=True).to(dtype)
    else:
        rounded = x.to(dtype)
    return rounded


@triton.jit
def random_words(seed, counter, places):
    """`tl.randint(seed, counter + places)` for a 64-bit scalar and a block of small numbers.

    Adding them in 32-bit halves spares the registers of a block of 64-bit counters.
    """
    counter_low = counter.to(tl.uint32)
    low = counter_low + places.to(tl.uint32)
    high = (counter >> 32).to(tl.uint32) + (low < counter_low).to(tl.uint32)
    zero = low * 0
    words, _, _, _ = tl.philox(seed, low, high, zero, zero)
    return words


@triton.jit
def round_stochastic(x, words, dtype: tl.constexpr):
    """FP32 to BF16 or FP16 as `guardbit.numerics.round_stochastic` does, bit for bit.

    Args:
        x: FP32 block.
        words: 32 random bits for each element.
        dtype: BF16 or FP16.
    """
    DROPPED: tl.constexpr = 16 if dtype == tl.bfloat16 else 13
    words = words.to(tl.uint32, bitcast=True)
    magnitude = tl.abs(x)
    bits = magnitude.to(tl.uint32, bitcast=True) + (words >> (32 - DROPPED))
    rounded = ((bits >> DROPPED) << DROPPED).to(tl.float32, bitcast=True)
    if dtype == tl.float16:
        # Below the smallest normal number, 2^-14, steps are 2^-24 wide. The fraction that is
        # compared with the random word is exact in FP32.
        steps = magnitude * 16777216.0
        whole = tl.floor(steps)
        fraction = ((steps - whole) * 4294967296.0).to(tl.uint64)
        carry = ((fraction + words.to(tl.uint64)) >> 32).to(tl.float32)
        subnormal = (whole + carry) * (1.0 / 16777216.0)
        rounded = tl.where(magnitude < 6.103515625e-05, subnormal, rounded)
    rounded = tl.where(x < 0, -rounded, rounded)
    # Infinity and NaN pass.
    finite = magnitude < float("inf")
    return tl.where(finite, rounded, x).to(dtype)


@triton.jit
def visible_keys(
    first_row, keys, shift, ROWS: tl.constexpr, KEYS: tl.constexpr, CAUSAL: tl.constexpr
):
    """Where the keys that a tile of rows sees end.

    Returns:
        The end of the whole tiles that every row sees, a multiple of KEYS, and the end of the keys
        that any row sees.
    """
    if CAUSAL:
        whole = tl.minimum(tl.maximum(first_row + shift + 1, 0), keys)
        end = tl.minimum(tl.maximum(first_row + shift + ROWS, 0), keys)
    else:
        whole = keys
        end = keys
    return whole // KEYS * KEYS, end


@triton.jit
def allowed(rows, columns, keys, shift, CAUSAL: tl.constexpr):
    """Which of `columns` (any shape that broadcasts against `rows`) a query may see."""
    inside = columns < keys
    if CAUSAL:
        inside = inside & (columns <= rows + shift)
    return inside
