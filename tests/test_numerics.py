"""Rounding, what it takes, and random words, each against integers or fractions."""

from fractions import Fraction

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from guardbit.numerics import (
    RESIDUAL_STEPS,
    decode_residual,
    encode_residual,
    philox_4x32,
    random_halves,
    round_nearest,
)

NARROW = [torch.bfloat16, torch.float16]

#: Smallest exponent of a normal number, explicit significand bits.
FORMATS = {torch.bfloat16: (-126, 7), torch.float16: (-14, 10)}
LARGEST = {torch.bfloat16: (2 - 2.0**-7) * 2.0**127, torch.float16: 65504.0}


def neighbours(x: float, dtype: torch.dtype) -> tuple[Fraction, Fraction]:
    """The grid points of `dtype` at and above |x|, exact, with no largest exponent."""
    smallest, bits = FORMATS[dtype]
    magnitude = abs(Fraction(x))
    exponent = smallest
    while Fraction(2) ** (exponent + 1) <= magnitude:
        exponent += 1
    step = Fraction(2) ** (exponent - bits)
    below = magnitude // step * step
    return below, below + step


def nearest_even(x: float, dtype: torch.dtype) -> float:
    below, above = neighbours(x, dtype)
    magnitude = abs(Fraction(x))
    step = above - below
    rounds_down = magnitude - below < above - magnitude or (
        magnitude - below == above - magnitude and (below / step) % 2 == 0
    )
    rounded = float(below if rounds_down else above)
    rounded = rounded if rounded <= LARGEST[dtype] else float("inf")
    return -rounded if x < 0 else rounded


@pytest.mark.parametrize("dtype", NARROW)
@given(x=st.floats(-1e5, 1e5) | st.floats(-1e-4, 1e-4) | st.floats(-6e-8, 6e-8))
def test_round_nearest_agrees_with_exact_fractions(dtype, x):
    assert round_nearest(torch.tensor([x], dtype=torch.float64), dtype).item() == nearest_even(
        x, dtype
    )


@pytest.mark.parametrize("dtype", NARROW)
@given(x=st.floats(1, 2), tail=st.integers(25, 52), sign=st.sampled_from([-1, 1]))
def test_round_nearest_rounds_once_just_beside_a_tie(dtype, x, tail, sign):
    # FP32 cannot hold a tie of the narrow format plus 2^-25 or less, so rounding twice sees a tie.
    _, bits = FORMATS[dtype]
    tie = torch.tensor(x, dtype=torch.float64).mul(2**bits).floor().add(0.5).div(2**bits)
    beside = tie.item() + sign * 2.0**-tail
    assert round_nearest(torch.tensor(beside, dtype=torch.float64), dtype).item() == nearest_even(
        beside, dtype
    )


@pytest.mark.parametrize("source", [torch.float32, torch.float64])
@pytest.mark.parametrize("dtype", NARROW)
def test_round_nearest_keeps_infinities_nan_and_overflows(dtype, source):
    x = torch.tensor([torch.inf, -torch.inf, torch.nan, 3.4e38, -3.4e38], dtype=source)
    rounded = round_nearest(x, dtype)
    assert rounded[:2].tolist() == [torch.inf, -torch.inf]
    assert rounded[2].isnan()
    assert rounded[3:].tolist() == [torch.inf, -torch.inf]


@pytest.mark.parametrize("source", [torch.float32, torch.float64])
@pytest.mark.parametrize("dtype", NARROW)
def test_the_largest_finite_value_keeps_the_half_step_above_it(dtype, source):
    _, bits = FORMATS[dtype]
    half = LARGEST[dtype] / (2 ** (bits + 1) - 1) / 2
    x = torch.tensor([LARGEST[dtype] + half * (1 - 2.0**-10), LARGEST[dtype] + half], dtype=source)
    assert round_nearest(x, dtype).tolist() == [LARGEST[dtype], torch.inf]


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        # Known answers of philox 4x32 with 10 rounds, Random123's tests/kat_vectors.
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_philox_gives_the_published_answers(counter, key, expected):
    words = philox_4x32(tuple(torch.tensor([word]) for word in counter), key)
    assert tuple(word.item() for word in words) == expected


@pytest.mark.parametrize(
    ("seed", "expected"),
    [
        # The first words that tl.randint(seed, offset) of Triton 3.9's interpreter gives (integers
        # only, so its rounding faults play no part).
        (0, "6627e8d5 f8e4cca4 157af5a4 c5b20a9d"),
        (1, "e3e80670 ac08141b 0c8727bf 00790b3f"),
        (0x123456789ABCDEF, "b850222e adca1466 ce03e400 073402a4"),
        (-5, "c8537de9 697fb707 bdd76894 7204a024"),
    ],
)
@pytest.mark.parametrize("key", [int, torch.tensor])
def test_random_halves_begin_with_the_word_of_triton(key, seed, expected):
    zero = torch.zeros(())
    counter = torch.tensor([0, 1, 12345, 2**32 - 1])
    low, high = random_halves(key(seed), (counter, zero.long(), zero.long(), zero.long())).T[:2]
    assert [f"{word:08x}" for word in (low + (high << 16)).tolist()] == expected.split()


def test_random_halves_are_all_of_the_four_words():
    # Random123's third known answer, see above.
    counter = (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344)
    halves = random_halves(0x299F31D0A4093822, tuple(torch.tensor(word) for word in counter))
    words = "fe09 d16c cceb 94fd e420 5001 6ea1 2412"
    assert [f"{half:04x}" for half in halves.tolist()] == words.split()


@pytest.mark.parametrize("dtype", NARROW)
@given(x=st.floats(-6e4, 6e4, width=32) | st.floats(-(2.0**-13), 2.0**-13, width=32))
def test_the_residual_gives_back_what_rounding_took(dtype, x):
    exact = torch.tensor([x])
    rounded = round_nearest(exact, dtype)
    counts = encode_residual(exact, rounded)
    assert counts.dtype == torch.int8
    assert abs(counts.item()) <= 120
    below, above = neighbours(rounded.item(), dtype)
    # Half a count, and half of FP32's last place, which is 2^-13 of FP16's.
    step = float(above - below)
    restored = rounded.double() + decode_residual(rounded, counts).double()
    assert abs(restored.item() - x) <= step * (0.5 / RESIDUAL_STEPS + 2.0**-14)


@pytest.mark.parametrize("dtype", NARROW)
@pytest.mark.parametrize("parts", [2, 3, 4, 5, 6, 8, 10, 12, 15, 16])
@pytest.mark.parametrize("sign", [-1.0, 1.0])
def test_the_residual_of_a_mean_of_equal_weights_is_whole(dtype, parts, sign):
    step = 2.0 ** -FORMATS[dtype][1]
    shares = torch.arange(1, parts // 2 + 1).double() / parts
    exact = sign * (1 + step * shares)
    rounded = round_nearest(exact, dtype)
    counts = encode_residual(exact.float(), rounded)
    assert torch.equal(rounded.float() + decode_residual(rounded, counts), exact.float())


def test_what_is_not_finite_or_not_rounded_has_no_residual():
    x = torch.tensor([torch.inf, -torch.inf, torch.nan, 0.0])
    rounded = x.bfloat16()
    assert encode_residual(x, rounded).tolist() == [0] * 4
    assert decode_residual(rounded, torch.full((4,), 7, dtype=torch.int8))[:3].tolist() == [0.0] * 3


@pytest.mark.parametrize("zero", [0.0, -0.0])
def test_what_is_not_rounded_has_no_residual(zero):
    x = torch.tensor([zero, 1.0, -3.0, 1e30])
    assert not encode_residual(x[:3], x[:3].bfloat16()).any()
    assert decode_residual(x, encode_residual(x, x)).tolist() == [0.0] * 4
