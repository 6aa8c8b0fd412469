"""Rounding to BF16 and FP16, and what it takes.

Random numbers come from Philox 4x32-10 (Salmon et al., "Parallel Random Numbers: As Easy as 1,
2, 3", SC 2011), the generator of Triton's `tl.philox`, so that a kernel and its oracle drop the
same entries.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

_WORD = 0xFFFFFFFF
_PHILOX_ROUNDS = 10
_PHILOX_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_PHILOX_WEYL = (0x9E3779B9, 0xBB67AE85)

#: Low bits of an FP32 significand that the narrower format has no room for.
_DROPPED_BITS = {torch.bfloat16: 16, torch.float16: 13}
#: Counts to a unit in the last place, see `encode_residual`.
RESIDUAL_STEPS = 240
#: A count in units of 2^-31 of a last place.
RESIDUAL_STEP_BITS = round(2**31 / RESIDUAL_STEPS)
_FP16_SMALLEST_NORMAL = 2.0**-14
_FP16_SUBNORMALS_PER_UNIT = 2.0**24


def round_nearest(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Rounds to nearest, ties to even, once.

    A cast from FP64 to BF16 or FP16 goes by way of FP32 and so rounds twice: 1 + 2^-8 + 2^-40
    becomes the tie 1 + 2^-8 in FP32 and then 1, though 1 + 2^-7 is nearer. Here the FP32 step
    rounds to odd (towards zero, and the last bit set when anything was lost), so the second
    rounding can tell that the value was no tie (Boldo and Melquiond, "Emulation of FMA and
    correctly rounded sums", IEEE Trans. Computers 57(4), 2008).

    >>> x = torch.tensor(1 + 2**-8 + 2**-40, dtype=torch.float64)
    >>> x.to(torch.bfloat16).item(), round_nearest(x, torch.bfloat16).item()
    (1.0, 1.0078125)

    Args:
        x: FP32 or FP64 tensor of any shape.
        dtype: Target format: BF16, FP16 or FP32.

    Returns:
        Tensor of the same shape in `dtype`. Infinities and NaN stay; beyond the largest finite
        value plus half a unit in the last place the result is infinite.
    """
    if x.dtype == torch.float64 and dtype in _DROPPED_BITS:
        x = _round_to_odd(x)
    return x.to(dtype)


def _round_to_odd(x: Tensor) -> Tensor:
    """FP64 to FP32, towards zero, with the last bit set where the result is inexact."""
    nearest = x.float()
    bits = nearest.view(torch.int32)
    # The magnitude is the integer value of the lower 31 bits, so one less is one step to zero.
    towards_zero = bits - (nearest.double().abs() > x.abs()).to(torch.int32)
    inexact = (nearest.double() != x) & ~x.isnan()
    return torch.where(inexact, towards_zero | 1, bits).view(torch.float32)


def random_halves(seed: int | Tensor, counter: tuple[Tensor, Tensor, Tensor, Tensor]) -> Tensor:
    """Halves of Philox's words, low ones first, INT64 `(*shape, 8)`; `counter` INT64, < 2^32."""
    words = philox_4x32(counter, (seed & _WORD, (seed >> 32) & _WORD))
    halves = [half for word in words for half in (word & 0xFFFF, word >> 16)]
    return torch.stack(torch.broadcast_tensors(*halves), -1)


def philox_4x32(
    counter: tuple[Tensor, Tensor, Tensor, Tensor], key: tuple[int | Tensor, int | Tensor]
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The Philox 4x32-10 bijection; all numbers INT64 in [0, 2^32), the counter's broadcast."""
    first, second, third, fourth = counter
    low_key, high_key = key
    for _ in range(_PHILOX_ROUNDS):
        # The products need 64 unsigned bits. INT64 wraps modulo 2^64, which leaves every bit in
        # place; the mask takes away the sign that the arithmetic shift drags in.
        of_first = first * _PHILOX_MULTIPLIERS[0]
        of_third = third * _PHILOX_MULTIPLIERS[1]
        first = ((of_third >> 32) & _WORD) ^ second ^ low_key
        third = ((of_first >> 32) & _WORD) ^ fourth ^ high_key
        second = of_third & _WORD
        fourth = of_first & _WORD
        low_key = (low_key + _PHILOX_WEYL[0]) & _WORD
        high_key = (high_key + _PHILOX_WEYL[1]) & _WORD
    return first, second, third, fourth


def encode_residual(exact: Tensor, rounded: Tensor) -> Tensor:
    """Encodes in a byte what rounding to nearest took: 240ths of the last place of `rounded`.

    Rounding takes at most half a place, 120 counts, which fit a byte. Halves to sixths and eighths
    of a place are whole counts: means of two to six equal weights leave just these, alike in every
    row, and an error in them would add up. A positive count means that |exact| is the larger.
    `exact` is FP32, the result INT8, 0 where `rounded` is not finite.
    """
    dropped = _DROPPED_BITS.get(rounded.dtype, 0)
    wide = rounded.float()
    lost = exact.view(torch.int32) - wide.view(torch.int32)
    counts = (lost * (RESIDUAL_STEPS << (16 - dropped)) + (1 << 15)) >> 16
    if rounded.dtype == torch.float16:
        # Up to the smallest normal number, FP16's lie evenly apart.
        steps = (exact.abs() - wide.abs()) * (RESIDUAL_STEPS * _FP16_SUBNORMALS_PER_UNIT)
        counts = steps.round().int().where(wide.abs() <= _FP16_SMALLEST_NORMAL, counts)
    return counts.where(rounded.isfinite(), 0).to(torch.int8)


def decode_residual(rounded: Tensor, counts: Tensor) -> Tensor:
    """The residual that `encode_residual` wrote of the same `rounded`, FP32; 0 where not finite."""
    dropped = _DROPPED_BITS.get(rounded.dtype, 0)
    wide = rounded.float()
    lost = (counts.int() * RESIDUAL_STEP_BITS + (1 << 30 - dropped)) >> 31 - dropped
    residual = (wide.view(torch.int32) + lost).view(torch.float32) - wide
    if rounded.dtype == torch.float16:
        steps = counts.float() * (1 / (RESIDUAL_STEPS * _FP16_SUBNORMALS_PER_UNIT))
        steps = steps * torch.ones_like(wide).copysign(wide)
        residual = steps.where(wide.abs() <= _FP16_SMALLEST_NORMAL, residual)
    return residual.where(rounded.isfinite(), 0)


@contextmanager
def ieee_products() -> Iterator[None]:
    """Runs FP32 matrix products and convolutions in FP32, whatever the program's settings."""
    # Per backend, because PyTorch refuses `get_float32_matmul_precision` after a use of these. The
    # module proxy of oneDNN hides `matmul` from type checkers.
    one_dnn: Any = torch.backends.mkldnn
    backends = (
        one_dnn.matmul,
        one_dnn.conv,
        torch.backends.cuda.matmul,
        torch.backends.cudnn.conv,  # pyright: ignore[reportAttributeAccessIssue]
    )
    before = [backend.fp32_precision for backend in backends]
    try:
        for backend in backends:
            backend.fp32_precision = "ieee"
        yield
    finally:
        for backend, precision in zip(backends, before, strict=True):
            backend.fp32_precision = precision
