"""The exact dQ against FP64: plain torch, and Triton interpreted or compiled."""

import pytest
import torch

from guardbit.kernels import reference
from guardbit.kernels.device import audit
from guardbit.kernels.spec import AttentionSpec
from tests.kernels.tensors import backward_inputs as inputs
from tests.kernels.tensors import masks
from tests.oracle import dense

pytestmark = pytest.mark.usefixtures("poisoned_memory")
BOTH = pytest.mark.parametrize("module", [reference, audit], ids=["torch", "triton"])


def exact(d_out, q, k, v, causal, scale, heads, mask=None):
    """dQ of single query heads in FP64."""
    return dense(d_out, q, k, v, AttentionSpec(scale, causal, mask)).dq[:, heads]


def relative(mine, right):
    """Norm of the error over that of the truth, or of the error alone where the truth is 0."""
    return ((mine - right).norm() / (right.norm() if right.any() else 1.0)).item()


# B, H, H_kv, N, M, D: one key; about a tile; grouped; rows without a key; more keys.
SHAPES = [
    (1, 2, 2, 1, 1, 16),
    (2, 2, 1, 17, 17, 16),
    (1, 4, 2, 65, 65, 80),
    (1, 2, 1, 70, 33, 16),
    (1, 2, 1, 20, 129, 64),
]


CASES = [
    *((module, shape, torch.bfloat16) for module in (reference, audit) for shape in SHAPES),
    *((module, SHAPES[2], torch.float16) for module in (reference, audit)),
    (reference, SHAPES[2], torch.float32),
]


@pytest.mark.parametrize("causal", [False, True, "top-left"])
@pytest.mark.parametrize(("module", "shape", "dtype"), CASES)
def test_agrees_with_fp64(module, shape, dtype, causal):
    call = inputs(shape, dtype)
    heads = [shape[1] - 1, 0]
    options = {"spec": AttentionSpec(0.25, causal), "head_ids": heads}
    computed = module.exact_query_gradient(*call, **options)
    truth = exact(*call, causal, 0.25, heads)
    assert computed.dtype == torch.float32
    assert computed.shape == truth.shape
    # FP32 sums and exponentials: 1e-7 of each term, and terms of dS that cancel.
    assert relative(computed, truth) <= 2e-6
    if module is reference:  # some rows at a time, the first of which may see no key
        assert relative(module.exact_query_gradient(*call, **options, chunk=7), truth) <= 2e-6
    if shape[4] == 1 or dtype == torch.float32:
        return
    # A BF16 kernel's rounding, 2^-9 at most, is hundreds of times as large.
    names = {"stabilizers": ["none"] * shape[1]}
    common = {"causal": causal, "scale": 0.25}
    d_out, q, k, v = call
    forward = reference.forward(q, k, v, **common, **names)
    low = reference.backward(d_out, q, k, v, *forward, **common, **names)
    assert relative(computed, truth) <= relative(low.dq[:, heads], truth) / 100


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("name", ["boolean", "padding", "additive", "lowest"])
@BOTH
def test_dense_masks(module, name, causal):
    call = inputs((2, 4, 2, 40, 70, 16))
    mask = masks(40, 70)[name]
    spec = AttentionSpec(-0.25, causal, mask)
    computed = module.exact_query_gradient(*call, spec=spec, head_ids=[3, 0])
    truth = exact(*call, causal, -0.25, [3, 0], mask)
    assert relative(computed, truth) <= 2e-6
    # Rows that see no key.
    assert not computed[truth == 0].any()


@BOTH
@pytest.mark.parametrize("scale", [-0.3, 0.0, 3.0])
def test_any_scale(module, scale):
    call = inputs((1, 2, 2, 20, 40, 16))
    computed = module.exact_query_gradient(*call, spec=AttentionSpec(scale, True), head_ids=[0, 1])
    assert relative(computed, exact(*call, True, scale, [0, 1])) <= 2e-6
    if scale == 0:
        assert not computed.any()


@BOTH
@pytest.mark.parametrize("size", [2.0**-22, 2.0**12])
def test_gradients_of_any_size_in_fp16(module, size):
    # As loss scaling makes them: dO of FP16's last places, and dS beyond its largest number.
    d_out, q, k, v = inputs((1, 1, 1, 20, 40, 16), torch.float16)
    call = (d_out.sign() * size, q, k, v * (16.0 if size > 1 else 1.0))
    computed = module.exact_query_gradient(*call, spec=AttentionSpec(0.25, True), head_ids=[0])
    assert relative(computed, exact(*call, True, 0.25, [0])) <= 2e-6


def test_heads_may_repeat():
    call = inputs((1, 4, 2, 20, 20, 16))
    options = {"spec": AttentionSpec(0.25, True)}
    expected = audit.exact_query_gradient(*call, **options, head_ids=[0, 3])
    computed = audit.exact_query_gradient(*call, **options, head_ids=[3, 0, 3])
    assert torch.equal(computed, expected[:, [1, 0, 1]])


@BOTH
def test_no_heads(module):
    call = inputs((1, 2, 2, 5, 5, 16))
    dq = module.exact_query_gradient(*call, spec=AttentionSpec(1.0), head_ids=[])
    assert dq.shape == (1, 0, 5, 16)


def test_refusals():
    call = inputs((1, 2, 1, 3, 3, 16))
    for module in (reference, audit):
        with pytest.raises(IndexError, match=r"takes 0 to 1, but holds \[2, -1\]"):
            module.exact_query_gradient(*call, spec=AttentionSpec(1.0), head_ids=[0, 2, -1])
