"""Triton's shadow and gradient audit on a GPU, over the grid of shapes, against FP64."""

import math
from functools import partial

import pytest
import torch

from guardbit.kernels import audit, backward, delta_bias, forward, shadow
from guardbit.kernels.spec import AttentionSpec
from guardbit.numerics import decode_residual
from tests.kernels import tensors as drawn
from tests.oracle import attend, dense

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.usefixtures("poisoned_memory"),
    # FP64 products, which serve as reference, need not repeat their bits.
    pytest.mark.filterwarnings("ignore:Attempting to run cuBLAS:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*deterministic.*:UserWarning"),
]

LENGTHS = (1, 17, 127, 128, 129, 1000, 1024)
inputs = partial(drawn.inputs, ties=True, by_rows=True, on="cuda")


def relative(computed, truth):
    return ((computed - truth).norm() / truth.norm().clamp_min(1e-30)).item()


@pytest.mark.parametrize("causal", [False, True, "top-left"])
@pytest.mark.parametrize(
    ("width", "dtype"),
    [
        (16, torch.bfloat16),
        (32, torch.bfloat16),
        (64, torch.bfloat16),
        (80, torch.bfloat16),
        (128, torch.bfloat16),
        (256, torch.bfloat16),
        (64, torch.float16),
        (128, torch.float16),
    ],
)
def test_shadow_and_audit_agree_with_fp64(width, dtype, causal):
    scale = 2.0 ** -round(math.log2(width) / 2)
    for rows in LENGTHS:
        lengths = {rows, rows + 70} if causal == "top-left" else {rows, rows + 70, (rows + 1) // 2}
        for keys in lengths:
            q, k, v, d_out = inputs((2, 4, 2, rows, keys, width), dtype, seed=rows)
            spec = AttentionSpec(scale, causal)
            exact = dense(d_out, q, k, v, spec)
            scores = exact.scores
            result = shadow.shadow(q, k, v, spec=spec)
            alive = scores.amax(-1) > -math.inf
            # Two parts of P-bar: 17 bits in BF16, 22 in FP16; in FP32 the exponents' rounding.
            assert relative(result.out, exact.out) <= (6e-6 if dtype == torch.bfloat16 else 1e-6)
            row_max = scores.amax(-1)
            assert torch.equal(result.row_max == -math.inf, ~alive)
            assert torch.allclose(result.row_max[alive].double(), row_max[alive], atol=1e-5)
            entropy = torch.special.entr(exact.weights).sum(-1)
            assert (result.entropy - entropy).abs().max() <= 1e-5
            # By their definitions; a score on a boundary may fall to its other side, of which a
            # last place of FP32 meets 2^-16 of those of BF16.
            rounded = scores.float().bfloat16().float()
            tied = row_max[..., None].float() - scores.float() <= 1e-3
            tied_bf16 = rounded.amax(-1, keepdim=True) - rounded <= 1e-3
            for field, expected in (
                (result.maxima, tied),
                (result.maxima_bf16, tied_bf16),
            ):
                assert not field[~alive].any()
                # Exact ties, which repeated keys make, and all but a few near ones.
                wrong = (field != expected.sum(-1))[alive]
                assert wrong.sum() <= max(2, 1e-3 * wrong.numel())

            heads = [3, 0]
            computed = audit.exact_query_gradient(d_out, q, k, v, spec=spec, head_ids=heads)
            right = exact.dq[:, heads]
            assert relative(computed, right) <= 3e-6 or right.norm() <= 1e-6


@pytest.mark.parametrize("width", [64, 128])
def test_chosen_rows_delta_bias_and_repetition(width):
    q, k, v, d_out = inputs((2, 4, 2, 1000, 1000, width))
    options = {"causal": True, "scale": width**-0.5}
    spec = AttentionSpec(width**-0.5, True)
    every = shadow.shadow(q, k, v, spec=spec)
    again = shadow.shadow(q, k, v, spec=spec)
    assert all(torch.equal(x, y) for x, y in zip(every, again, strict=True))
    rows = torch.linspace(0, 999, 130, device="cuda").round().long()
    some = shadow.shadow(q, k, v, spec=spec, query_ids=rows)
    for whole, chosen in zip(every, some, strict=True):
        torch.testing.assert_close(chosen, whole[:, :, rows], rtol=1e-6, atol=1e-6)

    names = ["none", "compensated"] * 2
    result = forward.forward(q, k, v, **options, stabilizers=names)
    truth = attend(q, k, v, spec).out
    used = result.out.double() + decode_residual(result.out, result.residual)
    error = (d_out.double() * (used - truth)).sum(-1)
    for chosen in (None, rows):
        exact = every.out if chosen is None else some.out
        bias, size = delta_bias.delta_bias(
            d_out, result.out, exact, residual=result.residual, query_ids=chosen
        )
        picked = error if chosen is None else error[:, :, chosen]
        scale = picked.abs().sum((0, 2))
        # The shadow's own error, 1e-6 of O, beside a kernel's of 1e-3.
        assert ((bias - picked.sum((0, 2))).abs() <= 2e-3 * scale).all()
        torch.testing.assert_close(size, scale, rtol=2e-3, atol=0)


def test_audit_repeats_its_bits_and_is_far_nearer_than_the_kernels():
    q, k, v, d_out = inputs((1, 4, 2, 2048, 2048, 64))
    options = {"causal": True, "scale": 0.125}
    spec = AttentionSpec(0.125, True)
    computed = audit.exact_query_gradient(d_out, q, k, v, spec=spec, head_ids=[2, 1])
    again = audit.exact_query_gradient(d_out, q, k, v, spec=spec, head_ids=[2, 1])
    assert torch.equal(computed, again)
    names = {"stabilizers": ["none"] * 4}
    result = forward.forward(q, k, v, **options, **names)
    low = backward.backward(d_out, q, k, v, *result, **options, **names)
    right = dense(d_out, q, k, v, spec).dq[:, [2, 1]]
    assert relative(computed, right) <= relative(low.dq[:, [2, 1]], right) / 1000


def test_long_sums_do_not_drift():
    # Values of one sign: what tensor cores cut off a long sum has one sign too.
    q, k, v, _ = inputs((1, 1, 1, 256, 32_768, 64))
    q, v = q * 0.1, v.abs() + 1
    truth = attend(q, k, v, AttentionSpec(0.125)).out
    out = shadow.shadow(q, k, v, spec=AttentionSpec(0.125)).out
    drift = (out - truth).sum() / truth.sum()
    assert drift.abs() <= 5e-7


def test_more_heads_than_a_grid_axis_holds():
    # 65,535 programs is the limit of the second and third grid axis.
    q, k, v, d_out = inputs((1, 70_000, 70_000, 33, 33, 16))
    result = shadow.shadow(q, k, v, spec=AttentionSpec(0.25, True))
    bias, _ = delta_bias.delta_bias(d_out, q, result.out)
    for start in (0, 69_900):
        heads = slice(start, start + 100)
        few = shadow.shadow(q[:, heads], k[:, heads], v[:, heads], spec=AttentionSpec(0.25, True))
        for whole, piece in zip(result, few, strict=True):
            assert torch.equal(whole[:, heads], piece)
        part, _ = delta_bias.delta_bias(d_out[:, heads], q[:, heads], few.out)
        assert torch.equal(bias[heads], part)
