"""Triton's gradient audit on small shapes: in the interpreter, or compiled where there is a GPU."""

import math

import pytest
import torch

from guardbit.kernels import reference
from guardbit.kernels.device import audit
from guardbit.kernels.spec import AttentionSpec
from tests.oracle import dense

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
pytestmark = pytest.mark.usefixtures("poisoned_memory")


def inputs(shape, dtype=torch.bfloat16, seed=0):
    """d_out, q, k, v."""
    batch, heads, kv_heads, rows, keys, width = shape
    generator = torch.Generator().manual_seed(seed)
    q, d_out = (torch.randn(batch, heads, rows, width, generator=generator) for _ in range(2))
    k, v = (torch.randn(batch, kv_heads, keys, width, generator=generator) for _ in range(2))
    return [x.to(DEVICE, dtype) for x in (d_out, q, k, v)]


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


@pytest.mark.parametrize("causal", [False, True, "top-left"])
@pytest.mark.parametrize(
    ("shape", "dtype"), [(shape, torch.bfloat16) for shape in SHAPES] + [(SHAPES[2], torch.float16)]
)
def test_agrees_with_fp64(shape, dtype, causal):
    tensors = inputs(shape, dtype)
    heads = [shape[1] - 1, 0]
    options = {"spec": AttentionSpec(0.25, causal), "head_ids": heads}
    computed = audit.exact_query_gradient(*tensors, **options)
    truth = exact(*tensors, causal, 0.25, heads)
    assert computed.dtype == torch.float32
    assert computed.shape == truth.shape
    # FP32 sums and exponentials: 1e-7 of each term, and terms of dS that cancel.
    assert relative(computed, truth) <= 2e-6
    if shape[4] == 1:
        return
    # A BF16 kernel's rounding, 2^-9 at most, is hundreds of times as large.
    names = {"stabilizers": ["none"] * shape[1]}
    common = {"causal": causal, "scale": 0.25}
    d_out, q, k, v = tensors
    forward = reference.forward(q, k, v, **common, **names)
    low = reference.backward(d_out, q, k, v, *forward, **common, **names)
    assert relative(computed, truth) <= relative(low.dq[:, heads], truth) / 100


def masks(rows, keys):
    """Dense masks by name, for a batch of 2 and 4 heads; some rows see no key."""
    generator = torch.Generator().manual_seed(7)
    additive = torch.randn(2, 1, rows, keys, generator=generator)
    additive[:, :, 3] = -math.inf
    boolean = torch.rand(1, 4, rows, keys, generator=generator) < 0.7
    boolean[:, :, 5] = False
    lowest = torch.finfo(torch.bfloat16).min
    return {
        "boolean": boolean,
        "padding": (torch.arange(keys) < torch.tensor([[keys], [keys - 9]]))[:, None, None],
        "additive": additive,
        "lowest": torch.zeros(rows, keys)
        .bfloat16()
        .masked_fill(boolean[0, 0].logical_not(), lowest),
    }


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("name", sorted(masks(9, 9)))
@pytest.mark.parametrize("module", [audit, reference])
def test_dense_masks(module, name, causal):
    tensors = inputs((2, 4, 2, 40, 70, 16))
    mask = masks(40, 70)[name].to(DEVICE)
    spec = AttentionSpec(-0.25, causal, mask)
    computed = module.exact_query_gradient(*tensors, spec=spec, head_ids=[3, 0])
    truth = exact(*tensors, causal, -0.25, [3, 0], mask)
    assert relative(computed, truth) <= 2e-6
    # Rows that see no key.
    assert not computed[truth == 0].any()


@pytest.mark.parametrize("scale", [-0.3, 0.0, 3.0])
def test_any_scale(scale):
    tensors = inputs((1, 2, 2, 20, 40, 16))
    computed = audit.exact_query_gradient(
        *tensors, spec=AttentionSpec(scale, True), head_ids=[0, 1]
    )
    assert relative(computed, exact(*tensors, True, scale, [0, 1])) <= 2e-6
    if scale == 0:
        assert not computed.any()


@pytest.mark.parametrize("size", [2.0**-22, 2.0**12])
def test_gradients_of_any_size_in_fp16(size):
    # As loss scaling makes them: dO of FP16's last places, and dS beyond its largest number.
    d_out, q, k, v = inputs((1, 1, 1, 20, 40, 16), torch.float16)
    tensors = (d_out.sign() * size, q, k, v * (16.0 if size > 1 else 1.0))
    computed = audit.exact_query_gradient(*tensors, spec=AttentionSpec(0.25, True), head_ids=[0])
    assert relative(computed, exact(*tensors, True, 0.25, [0])) <= 2e-6


def test_rows_without_a_key_have_no_gradient():
    tensors = inputs((1, 1, 1, 70, 33, 16))
    dq = audit.exact_query_gradient(*tensors, spec=AttentionSpec(0.25, True), head_ids=[0])
    assert not dq[:, :, :37].any()
    assert dq[:, :, 38:].any(-1).all()


def test_layouts_strides_and_repeated_heads():
    tensors = inputs((1, 4, 2, 20, 20, 16))
    options = {"spec": AttentionSpec(0.25, True)}
    expected = audit.exact_query_gradient(*tensors, **options, head_ids=[0, 3])
    by_rows = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in tensors]
    transposed = [x.mT.contiguous().mT for x in tensors]
    for layout in (by_rows, transposed):
        computed = audit.exact_query_gradient(*layout, **options, head_ids=[3, 0, 3])
        assert torch.equal(computed, expected[:, [1, 0, 1]])


def test_no_keys_no_rows_no_heads():
    for shape in [(1, 2, 2, 5, 0, 16), (1, 2, 2, 0, 5, 16), (0, 2, 2, 5, 5, 16)]:
        computed = audit.exact_query_gradient(*inputs(shape), spec=AttentionSpec(1.0), head_ids=[1])
        assert computed.shape == (shape[0], 1, shape[3], 16)
        assert not computed.any()
    tensors = inputs((1, 2, 2, 5, 5, 16))
    dq = audit.exact_query_gradient(*tensors, spec=AttentionSpec(1.0), head_ids=[])
    assert dq.shape == (1, 0, 5, 16)


def test_refusals():
    tensors = inputs((1, 2, 1, 3, 3, 16))
    with pytest.raises(IndexError, match=r"takes 0 to 1, but holds \[2, -1\]"):
        audit.exact_query_gradient(*tensors, spec=AttentionSpec(1.0), head_ids=[0, 2, -1])
    with pytest.raises(TypeError, match=r"d_out torch.float32, q torch.bfloat16"):
        audit.exact_query_gradient(
            tensors[0].float(), *tensors[1:], spec=AttentionSpec(1.0), head_ids=[0]
        )
