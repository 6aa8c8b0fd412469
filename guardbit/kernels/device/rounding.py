"""How kernels round to nearest, what rounding took away, and random numbers.

Under Triton's interpreter (TRITON_INTERPRET=1 when this module is imported) the same kernels run on
the CPU. The interpreter truncates FP32 to BF16, so there rounding is spelled out in integers.
Compiled kernels contain none of this.
"""

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
