"""Triton's forward and backward on small shapes: interpreted, or compiled where there is a GPU."""

import math
from functools import partial

import pytest
import torch

from guardbit.kernels import reference
from guardbit.kernels.device import backward, forward, launch
from guardbit.kernels.spec import AttentionSpec
from guardbit.numerics import decode_residual
from tests.kernels import tensors
from tests.oracle import DEVICE, attend, coherent_error, dense

SPACING = {torch.bfloat16: 2.0**-7, torch.float16: 2.0**-10}
pytestmark = tensors.MARKS

#: Those that have a kernel of their own, and none; the others leave it to the engine.
STABILIZERS = ("none", "compensated", "none", "row_max")


inputs = partial(tensors.inputs, ties=True)


def key_tile(q):
    return launch.tile_of(q, launch.padded_width(q.shape[-1]), "forward").block_n


# B, H, H_kv, N, M, D: one key; odd lengths; grouped; rows without a key; more keys than a tile.
SHAPES = [
    (1, 4, 4, 1, 1, 16),
    (2, 4, 2, 37, 37, 24),
    (1, 4, 1, 70, 33, 16),
    (1, 4, 2, 20, 150, 64),
]


MASKS = pytest.mark.parametrize("causal", [False, True, "top-left"])
CASES = pytest.mark.parametrize(
    ("shape", "dtype"), [(shape, torch.bfloat16) for shape in SHAPES] + [(SHAPES[3], torch.float16)]
)


@MASKS
@CASES
def test_every_stabilizer_in_one_launch(dtype, shape, causal):
    q, k, v, _ = inputs(shape, dtype)
    scale = shape[-1] ** -0.5
    options = {"causal": causal, "scale": scale, "stabilizers": STABILIZERS}
    ours = forward.forward(q, k, v, **options)
    # P-bar is rounded relative to the maximum so far, which depends on the tile.
    oracle = reference.forward(q, k, v, **options, key_tile=key_tile(q))
    _, lse, *_, truth = attend(q, k, v, AttentionSpec(scale, causal))
    assert ours.out.dtype == dtype
    # P-bar is rounded by half a step at most, O by half a step.
    bar = 1.5 * SPACING[dtype] * v.abs().max().double()
    assert (ours.out - truth).abs().max() <= bar
    assert torch.equal(ours.lse == -math.inf, lse == -math.inf)
    alive = lse > -math.inf
    error = (ours.lse.double() - lse).where(alive, 0).abs()
    head = STABILIZERS.index("compensated")
    # Of the rounded P-bar in the compensated head: each is off by half a step at most.
    assert error[:, head].max() <= SPACING[dtype] / 2
    error[:, head] = 0
    assert error.max() <= 1e-5
    # The oracle sums in another order, in FP32: the few elements that this moves across a rounding
    # boundary differ by a step.
    difference = (ours.out.double() - oracle.out.double()).abs()
    assert difference.max() <= 2 * SPACING[dtype] * truth.abs().max()
    assert (difference > 0).double().mean() <= (0.01 if dtype == torch.bfloat16 else 0.05)
    pair = (ours.out.double() + decode_residual(ours.out, ours.residual))[:, head]
    oracle_pair = (oracle.out.double() + decode_residual(oracle.out, oracle.residual))[:, head]
    # The residual is rounded to 1 / 240 of a step of O; an element of P-bar that crosses a boundary
    # moves the pair by a step of its own.
    moved = (pair - oracle_pair).abs()
    assert moved.max() <= SPACING[dtype] * v.abs().max()
    finest = SPACING[dtype] / 240 * truth.abs().max() + 1e-6
    assert (moved > finest).double().mean() <= (0.01 if dtype == torch.bfloat16 else 0.05)
    assert not ours.residual[:, [number for number in range(4) if number != head]].any()


def test_a_head_does_not_depend_on_the_others():
    q, k, v, _ = inputs((2, 4, 2, 40, 40, 16))
    options = {"causal": True, "scale": 0.25}
    mix = forward.forward(q, k, v, stabilizers=STABILIZERS, **options)
    for head, name in enumerate(STABILIZERS):
        alone = forward.forward(q, k, v, stabilizers=[name] * 4, **options)
        assert torch.equal(alone.out[:, head], mix.out[:, head])
        assert torch.equal(alone.lse[:, head], mix.lse[:, head])
        chosen = forward.forward(q, k, v, stabilizers=[name], head_ids=[head], **options)
        assert torch.equal(chosen.out[:, 0], mix.out[:, head])
        if name == "compensated":
            assert torch.equal(chosen.residual[:, 0], mix.residual[:, head])


@pytest.mark.parametrize("scale", [-0.3, 0.0, 3.0])
def test_any_scale(scale):
    q, k, v, _ = inputs((1, 4, 4, 20, 50, 16))
    ours = forward.forward(q, k, v, causal=True, scale=scale, stabilizers=STABILIZERS)
    truth = attend(q, k, v, AttentionSpec(scale, True)).out
    assert (ours.out - truth).abs().max() <= 1.5 * SPACING[q.dtype] * v.abs().max()


def test_large_scores_and_infinite_inputs():
    q, k, v, _ = inputs((1, 4, 4, 20, 50, 16))
    ours = forward.forward(q * 100, k * 100, v, causal=False, scale=2.0, stabilizers=STABILIZERS)
    truth = attend(q * 100, k * 100, v, AttentionSpec(2.0)).out
    assert (ours.out - truth).abs().max() <= 1.5 * SPACING[q.dtype] * v.abs().max()
    q[:, :, 3, 0], q[:, :, 5, 0] = math.nan, math.inf
    ours = forward.forward(q, k, v, causal=False, scale=1.0, stabilizers=STABILIZERS)
    spoilt = ours.out.isnan().all(-1)
    assert spoilt[:, :, [3, 5]].all()
    assert spoilt.sum() == 2 * 4


def test_compensation_takes_the_coherent_error_with_either_sign():
    # Four equal keys; the mean of the values lies a quarter of a step above a BF16 number in even
    # features, which all rows round down, and a quarter below one in odd features.
    q = torch.ones(1, 2, 256, 16, dtype=torch.bfloat16, device=DEVICE)
    k = torch.ones(1, 2, 4, 16, dtype=torch.bfloat16, device=DEVICE)
    v = torch.ones(1, 2, 4, 16, dtype=torch.bfloat16, device=DEVICE)
    v[..., :1, 0::2] += 2.0**-7
    v[..., 1:, 1::2] += 2.0**-7
    ours = forward.forward(q, k, v, causal=False, scale=1.0, stabilizers=["none", "compensated"])
    error = coherent_error(ours.out, v.double().mean(2, keepdim=True).expand_as(q), -2)
    assert (error[..., 0::2] == -256 * 2.0**-9).all()
    assert (error[..., 1::2] == 256 * 2.0**-9).all()
    # A quarter of a step.
    assert (ours.residual[:, 1, :, 0::2] == 60).all()
    assert (ours.residual[:, 1, :, 1::2] == -60).all()


@MASKS
@CASES
def test_gradients_of_every_stabilizer(dtype, shape, causal):
    q, k, v, d_out = inputs(shape, dtype)
    options = {"causal": causal, "scale": shape[-1] ** -0.5, "stabilizers": STABILIZERS}
    result = reference.forward(q, k, v, **options)
    ours = backward.backward(d_out, q, k, v, *result, **options)
    oracle = reference.backward(d_out, q, k, v, *result, **options)
    truth = dense(d_out, q, k, v, AttentionSpec(options["scale"], causal)).results[1:]
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


def test_a_key_alone_has_a_probability_of_one_however_large_its_score():
    # In log2 units L of 10^5 is off by up to 2^-8, and P, rounded to BF16, often below 1.
    generator = torch.Generator().manual_seed(7)
    size = 1e5
    q = torch.randn(1, 12, 1, 64, generator=generator)
    k = (q * 8 * size / q.square().sum(-1, keepdim=True)).bfloat16().to(DEVICE)
    q = q.bfloat16().to(DEVICE)
    d_out = torch.ones_like(q)
    options = {"causal": False, "scale": 0.125, "stabilizers": ["none"] * 12}
    result = forward.forward(q, k, k, **options)
    assert (result.lse > 0.9 * size).all()
    assert (backward.backward(d_out, q, k, k, *result, **options).dv == 1).all()
