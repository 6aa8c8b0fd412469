"""The kernels' codec of the residual against `guardbit.numerics`, bit for bit."""

import pytest
import torch
import triton
import triton.language as tl

from guardbit import numerics
from guardbit.kernels.device import primitives

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@triton.jit
def codec_kernel(exact_pointer, rounded_pointer, counts_pointer, residual_pointer, N: tl.constexpr):
    places = tl.arange(0, N)
    rounded = tl.load(rounded_pointer + places)
    counts = primitives.encode_residual(tl.load(exact_pointer + places), rounded)
    tl.store(counts_pointer + places, counts)
    tl.store(residual_pointer + places, primitives.decode_residual(rounded, counts))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_residual_is_that_of_numerics(dtype):
    # FP16's exponents but the last, and those below; ties, numbers next to powers of two, zeros.
    exponents = torch.arange(127 - 30, 127 + 15, dtype=torch.int32)[:, None] << 23
    fractions = [0, 1, 0x0FFF, 0x1000, 0x1001, 0x7FFF, 0x8000, 0x8001, 0x18000, 0x7FF000, 0x7FFFFF]
    exact = (exponents + torch.tensor(fractions, dtype=torch.int32)).flatten().view(torch.float32)
    generator = torch.Generator().manual_seed(0)
    exact = torch.cat([torch.zeros(1), exact, torch.randn(1024, generator=generator)])[:1024]
    exact = torch.cat([exact, -exact]).to(DEVICE)
    rounded = numerics.round_nearest(exact, dtype)
    counts = torch.empty_like(exact, dtype=torch.int8)
    residual = torch.empty_like(exact)
    codec_kernel[(1,)](exact, rounded, counts, residual, N=exact.numel())
    expected = numerics.encode_residual(exact, rounded)
    assert expected.unique().numel() > 100
    assert torch.equal(counts, expected)
    assert torch.equal(residual, numerics.decode_residual(rounded, expected))
