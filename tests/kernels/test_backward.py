"""The Triton backward on small shapes: in the interpreter, or compiled where there is a GPU."""

import pytest
import torch

from guardbit.kernels import reference
from guardbit.kernels.device import backward, forward
from guardbit.kernels.spec import AttentionSpec
from tests.kernels.tensors import inputs
from tests.oracle import DEVICE, dense

SPACING = {torch.bfloat16: 2.0**-7, torch.float16: 2.0**-10}
# -inf - -inf in rows that see no key, whose NaN is then not taken.
pytestmark = [
    pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning"),
    pytest.mark.usefixtures("poisoned_memory"),
]

#: Those that have a kernel of their own, and none; the others leave it to the engine.
STABILIZERS = ("none", "compensated", "none", "row_max")


def exact(q, k, v, d_out, causal, scale):
    truth = dense(d_out, q, k, v, AttentionSpec(scale, causal))
    return truth.dq, truth.dk, truth.dv


# B, H, H_kv, N, M, D: one key; odd lengths; grouped; rows without a key; keys no row sees.
SHAPES = [
    (1, 4, 4, 1, 1, 16),
    (2, 4, 2, 37, 37, 32),
    (1, 4, 1, 70, 33, 16),
    (1, 4, 2, 20, 90, 64),
    (1, 4, 4, 33, 33, 80),
]


@pytest.mark.parametrize("causal", [False, True, "top-left"])
@pytest.mark.parametrize(
    ("shape", "dtype"), [(shape, torch.bfloat16) for shape in SHAPES] + [(SHAPES[3], torch.float16)]
)
def test_gradients_of_every_stabilizer(dtype, shape, causal):
    q, k, v, d_out = inputs(shape, dtype)
    options = {"causal": causal, "scale": shape[-1] ** -0.5, "stabilizers": STABILIZERS}
    result = reference.forward(q, k, v, **options)
    ours = backward.backward(d_out, q, k, v, *result, **options)
    oracle = reference.backward(d_out, q, k, v, *result, **options)
    truth = exact(q, k, v, d_out, causal, options["scale"])
    for name, mine, other, right in zip(("dQ", "dK", "dV"), ours, oracle, truth, strict=False):
        assert mine.dtype == dtype
        # Sums of FP32 in another order move a few elements across a rounding boundary of dS or of
        # the gradient itself.
        difference = (mine.double() - other.double()).abs().max().item()
        largest = right.abs().max().item()
        # One key has no gradient but that of FP32's error in P, 1e-6 or less.
        assert difference <= 2 * SPACING[dtype] * largest + 1e-6, name
        error = (mine.double() - right).norm().item()
        allowed = 1.02 * (other.double() - right).norm().item() + 1e-6
        assert error <= allowed, f"{name}: {error:.3g} above {allowed:.3g}"


def test_keys_that_no_row_sees_have_no_gradient():
    q, k, v, d_out = inputs((1, 4, 2, 9, 150, 16))
    options = {"causal": "top-left", "scale": 1.0, "stabilizers": STABILIZERS}
    result = forward.forward(q, k, v, **options)
    ours = backward.backward(d_out, q, k, v, *result, **options)
    assert not ours.dk[:, :, 9:].any()
    assert not ours.dv[:, :, 9:].any()
    assert ours.dv[:, :, :9].all()


def test_a_key_alone_has_a_probability_of_one_however_large_its_score():
    # In log2 units L of 10^5 is off by up to 2^-8, and P, rounded to BF16, often below 1.
    generator = torch.Generator().manual_seed(7)
    size = 1e5
    q = torch.randn(1, 40, 1, 64, generator=generator)
    k = (q * 8 * size / q.square().sum(-1, keepdim=True)).bfloat16().to(DEVICE)
    q = q.bfloat16().to(DEVICE)
    d_out = torch.ones_like(q)
    options = {"causal": False, "scale": 0.125, "stabilizers": ["none"] * 40}
    result = forward.forward(q, k, k, **options)
    assert (result.lse > 0.9 * size).all()
    assert (backward.backward(d_out, q, k, k, *result, **options).dv == 1).all()


def test_gradients_are_laid_out_as_their_tensors_and_strides_may_be_0():
    q, k, v, d_out = inputs((1, 4, 2, 17, 17, 16))
    options = {"causal": True, "scale": 0.25, "stabilizers": STABILIZERS}
    result = forward.forward(q, k, v, **options)
    by_rows = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (d_out, q, k, v)]
    ours = backward.backward(*by_rows, *result, **options)
    assert ours.dk.stride() == by_rows[2].stride()
    constant = torch.ones((), dtype=q.dtype, device=q.device).expand_as(q)
    expanded = backward.backward(constant, q, k, v, *result, **options)
    whole = backward.backward(constant.contiguous(), q, k, v, *result, **options)
    assert torch.equal(expanded.dq, whole.dq)


def test_refusals():
    q, k, v, d_out = inputs((1, 2, 2, 4, 4, 16))
    options = {"causal": False, "scale": 1.0, "stabilizers": ["none", "compensated"]}
    result = forward.forward(q, k, v, **options)
    with pytest.raises(ValueError, match="residual, but it is None"):
        backward.backward(d_out, q, k, v, result.out, result.lse, None, **options)
