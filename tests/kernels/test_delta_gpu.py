"""Exact delta and its carrier compiled, at lengths for which the interpreter is too slow."""

import math

import pytest
import torch

from guardbit.kernels.device import delta
from guardbit.kernels.reference import write_carrier
from guardbit.kernels.spec import AttentionSpec
from tests.oracle import dense

pytestmark = pytest.mark.gpu

# FP32 exponents, and sums of up to 2,048 terms in eight parts a row: some units of 2^-24.
DELTA_ERROR = 2e-6
# Tensor cores round dP's sums toward zero, by a unit of 2^-24 of sum_d |dO V| here and there; in
# FP16 products have 22 bits, of which such a sum loses more than of BF16's 16. Seen: 2^-22.9.
CUT = {torch.bfloat16: 0.0, torch.float16: 2.0**-22}


def inputs(heads, kv_heads, rows, keys, width, value_width, dtype):
    """d_out, q, k, v for a batch of 2."""
    generator = torch.Generator("cuda").manual_seed(rows + width)

    def normal(count, length, size):
        shape = (2, length, count, size)
        x = torch.randn(shape, generator=generator, device="cuda").to(dtype)
        return x.transpose(1, 2)

    return (
        normal(heads, rows, value_width),
        normal(heads, rows, width),
        normal(kv_heads, keys, width),
        normal(kv_heads, keys, value_width),
    )


def exact(d_out, q, k, v, spec):
    """FP64: L, O, delta and how far off it may be; L is -inf where no key is seen."""
    found = dense(d_out, q, k, v, spec)
    values = v.double().abs().repeat_interleave(q.shape[1] // v.shape[1], 1)
    products = (found.weights * (d_out.double().abs() @ values.mT)).sum(-1)
    allowed = DELTA_ERROR * found.terms.abs().sum(-1) + CUT[d_out.dtype] * products
    return found.lse, found.out, found.terms.sum(-1), allowed


def check(tensors, spec, heads):
    """delta against FP64, the fused carrier against the plain one, both against a second run."""
    lse, out, truth, allowed = exact(*tensors, spec)
    arguments = (*tensors, out.to(tensors[0].dtype), lse.float())
    result = delta.carry_exact_delta(*arguments, spec=spec, head_ids=heads)
    error = (result.delta - truth[:, heads]).abs()
    assert (error <= allowed[:, heads]).all(), (error / allowed[:, heads]).max()
    expected = arguments[4].clone()
    # A row that sees no key keeps its O, as one whose delta is not finite.
    carried = result.delta.masked_fill((lse == -math.inf)[:, heads], math.nan)
    write_carrier(expected, tensors[0], carried, heads)
    assert torch.equal(result.out, expected)
    again = delta.carry_exact_delta(*arguments, spec=spec, head_ids=heads)
    assert all(torch.equal(x, y) for x, y in zip(result, again, strict=True))
    alone = delta.exact_delta(*tensors, lse.float(), spec=spec, head_ids=heads)
    assert torch.equal(alone, result.delta)


@pytest.mark.parametrize("causal", [False, True, "top-left"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("width", "value_width"),
    [(16, 16), (32, 32), (64, 64), (80, 80), (128, 128), (192, 128), (64, 256), (256, 256)],
)
def test_agrees_with_fp64(width, value_width, dtype, causal):
    for rows, keys in [(1, 1), (127, 129), (128, 128), (1000, 300), (300, 1000), (2048, 2048)]:
        tensors = inputs(4, 2, rows, keys, width, value_width, dtype)
        check(tensors, AttentionSpec(width**-0.5, causal), [3, 0])


@pytest.mark.parametrize("width", [64, 128, 256])
@pytest.mark.parametrize("name", ["boolean", "padding", "additive", "transposed", "lowest"])
def test_dense_masks(name, width):
    generator = torch.Generator("cuda").manual_seed(1)
    rows, keys = 500, 700
    additive = torch.randn(2, 1, rows, keys, generator=generator, device="cuda")
    additive[:, :, 3] = -math.inf
    boolean = torch.rand(4, rows, keys, generator=generator, device="cuda") < 0.7
    boolean[:, 5] = False
    mask = {
        "boolean": boolean,
        "padding": (torch.arange(keys, device="cuda") < 650)[None, None, None],
        "additive": additive.bfloat16(),
        "transposed": additive.mT.contiguous().mT,
        "lowest": torch.zeros(rows, keys, device="cuda").masked_fill_(~boolean[0], -3e38)[7:8],
    }[name]
    tensors = inputs(4, 2, rows, keys, width, width, torch.bfloat16)
    for causal in (False, True):
        check(tensors, AttentionSpec(0.1, causal, mask), [0, 2])


def test_as_many_heads_as_a_launch_may_have():
    tensors = [x.repeat(256, 1, 1, 1) for x in inputs(160, 160, 3, 3, 16, 16, torch.bfloat16)]
    spec = AttentionSpec(0.25, True)
    lse, _, truth, allowed = exact(*tensors, spec)
    found = delta.exact_delta(*tensors, lse.float(), spec=spec, head_ids=range(160))
    assert ((found - truth).abs() <= allowed).all()


def test_a_backward_that_reads_o_for_delta_only_takes_the_carrier():
    # PyTorch's flash kernel, on tokens that attend mostly to themselves.
    d_out, q, k, v = inputs(4, 4, 1024, 1024, 128, 128, torch.bfloat16)
    k = (1.8 * k).bfloat16()
    q = (q + 0.4 * k).bfloat16()
    spec = AttentionSpec(128**-0.5, True)
    forward = torch.ops.aten._scaled_dot_product_flash_attention
    out, lse, *rest, _ = forward(q, k, v, 0.0, True, False, scale=spec.scale)

    def backward(o):
        state = (o, lse, *rest)
        gradients = torch.ops.aten._scaled_dot_product_flash_attention_backward(
            d_out, q, k, v, *state[:6], 0.0, True, *state[6:], scale=spec.scale
        )
        return [x.double() for x in gradients]

    carried = delta.carry_exact_delta(d_out, q, k, v, out, lse, spec=spec, head_ids=range(4))
    right = dense(d_out, q, k, v, spec).dq
    mine, native = ((backward(o)[0] - right).norm() / right.norm() for o in (carried.out, out))
    # 3.6 % against 0.25 % on such inputs, twice as long.
    assert native > 0.01
    assert mine < 0.004
    assert torch.equal(backward(carried.out)[2], backward(out)[2])
