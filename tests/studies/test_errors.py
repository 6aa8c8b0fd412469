"""What is handed on in place of the exact delta, against FP64, and a run in which it is."""

import pytest
import torch

from guardbit.kernels import heads
from studies.rescue.errors import FACTORS, RANDOM, HandOn
from tests.kernels.exact_delta_cases import make
from tests.oracle import attend

SHAPE = 2, 4, 4, 64, 32


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def case(request):
    return make("causal", torch.bfloat16, SHAPE, request.param)


def handed(case, factor):
    """(B, H, N) in FP64: the kernel's delta, the exact one, and the one that is handed on."""
    forward = attend(case.q, case.k, case.v, case.spec)
    rounded = forward.out.bfloat16()
    carried = HandOn(factor, 3)(
        case.d_out, case.q, case.k, case.v, rounded, forward.lse.float(),
        spec=case.spec, head_ids=(0, 1, 2, 3), into=None,
    )  # fmt: skip
    d_out = case.d_out.double()
    return [(d_out * x.double()).sum(-1) for x in (rounded, forward.out, carried)]


@pytest.mark.parametrize("factor", FACTORS)
def test_delta_is_the_exact_one_and_a_multiple_of_the_error(case, factor):
    own, exact, found = handed(case, factor)
    error = own - exact
    # FP32 sums on the way, where the error is BF16's: 2^-9 of the products.
    close = {"rtol": 0.0, "atol": 2.0**-20 * case.d_out.abs().max().item() * 8}
    assert error.abs().mean() > 100 * close["atol"]
    if factor == RANDOM:
        torch.testing.assert_close((found - exact).abs(), error.abs(), **close)
        kept = ((found - exact) * error > 0).double().mean()
        # 512 rows: 5 standard deviations are .11.
        assert 0.39 < kept < 0.61
    else:
        torch.testing.assert_close(found, exact + float(factor) * error, **close)


def test_it_runs_in_a_call(case, monkeypatch):
    """With factor 1 gradients are the kernel's own; with 0 those of `exact_delta`."""
    native = case.native()
    exact, _ = case.switched(("exact_delta",) * 4)
    for factor, same in (("1", native), ("0", exact)):
        hand = HandOn(factor, 0)
        monkeypatch.setitem(heads.DELTAS, "exact_delta", hand)
        found, state = case.switched(("exact_delta",) * 4)
        assert state.ran == ("exact_delta",) * 4, state.substituted
        assert (hand.rows, int(hand.kept)) == (2 * 4 * 64, 0)
        # A few numbers lie next to where BF16 rounds, and round the other way: 2^-8 of them.
        torch.testing.assert_close(found[1], same[1], rtol=2.0**-7, atol=1e-4)
    assert not torch.equal(native[1], exact[1])
