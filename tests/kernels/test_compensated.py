"""The carrier of compensated heads: Triton, interpreted or compiled, against FP64."""

import pytest
import torch

from guardbit.kernels.device import carrier
from guardbit.numerics import decode_residual, encode_residual
from tests.oracle import DEVICE


@pytest.mark.parametrize("by_rows", [True, False], ids=["rows", "heads"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("shape", [(2, 4, 33, 64), (1, 2, 70, 40)], ids=str)
def test_the_carrier_carries_the_delta_of_the_unrounded_output(shape, dtype, by_rows):
    generator = torch.Generator().manual_seed(0)
    batch, heads, rows, width = shape

    def draw():
        size = (batch, rows, heads, width) if by_rows else shape
        x = torch.randn(size, generator=generator).to(DEVICE)
        return x.transpose(1, 2) if by_rows else x

    exact, d_out = draw(), draw().to(dtype)
    out = exact.to(dtype)
    residual = encode_residual(exact, out)
    into = torch.full_like(out, torch.nan)
    chosen = [heads - 1, 0]
    carrier.carry_compensated_delta(d_out, out, residual, into=into, head_ids=chosen)
    kept = out.double() + decode_residual(out, residual).double()
    wanted = (d_out.double() * kept).sum(-1)
    carried = (d_out.double() * into.double()).sum(-1)
    # Three terms carry 24 bits in BF16; the FP32 sum of `width` products rounds to 2^-24 each.
    bound = (d_out.double() * kept).abs().sum(-1) * 2.0**-22
    assert ((carried - wanted).abs() <= bound)[:, chosen].all()
    others = [head for head in range(heads) if head not in chosen]
    assert into[:, others].isnan().all()
    assert ((into != 0).sum(-1) <= 3)[:, chosen].all()


# inf / inf in rows that are not finite.
@pytest.mark.filterwarnings("ignore:(invalid value|overflow) encountered:RuntimeWarning")
def test_rows_that_are_not_finite_keep_their_output():
    out = torch.ones(1, 1, 4, 16, dtype=torch.bfloat16, device=DEVICE)
    d_out = torch.ones_like(out)
    d_out[0, 0, 1, 3] = torch.inf
    out[0, 0, 2, 5] = torch.nan
    residual = torch.zeros_like(out, dtype=torch.int8)
    into = torch.empty_like(out)
    carrier.carry_compensated_delta(d_out, out, residual, into=into, head_ids=[0])
    for row in (1, 2):
        assert torch.equal(into[0, 0, row].isnan(), out[0, 0, row].isnan())
        assert ((into[0, 0, row] == out[0, 0, row]) | out[0, 0, row].isnan()).all()
    assert (into[0, 0, 0] != 0).sum() <= 3
