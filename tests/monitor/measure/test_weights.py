"""Against FP64 brute force: whole singular value decompositions, W_Q^T W_K formed."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from guardbit.monitor.measure import weights as probe

HEADS = st.integers(1, 4)
SMALL = st.integers(1, 9)
SEEDS = st.integers(0, 2**16)

# The formula's ln(D) / 2^25 for FP32's 2^-24, and a rounding to FP32.
NORM_TOLERANCE = 4e-7


def randn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def spectral_norms(weights):
    return probe.spectral_norms(probe.gram_matrices(weights))[0]


def top_directions(weights):
    return probe.spectral_norms(probe.gram_matrices(weights))[1]


def bilinear_spectral_norms(query, key):
    query_grams, key_grams = (probe.gram_matrices(weights) for weights in (query, key))
    group = len(query) // len(key)
    return probe.spectral_norms(key_grams.repeat_interleave(group, 0), query_grams)[0]


def exact_norms(weights):
    return torch.linalg.svdvals(weights.double())[:, 0]


@settings(deadline=None, max_examples=40)
@given(HEADS, SMALL, SMALL, SEEDS, st.sampled_from([1e-30, 1e-18, 1.0, 1e12, 1e30]))
def test_spectral_norms_are_the_largest_singular_values(heads, d_head, d_model, seed, size):
    weights = size * randn(heads, d_head, d_model, seed=seed)
    norms = spectral_norms(weights)
    assert norms.shape == (heads,) and norms.dtype == torch.float32
    torch.testing.assert_close(norms.double(), exact_norms(weights), rtol=NORM_TOLERANCE, atol=0)


@pytest.mark.parametrize("growth", [0.0, 1.0, 30.0, 1e4])
def test_spectral_norms_see_one_growing_direction(growth):
    # What happens in a failing run: a rank-one part takes over (paper, figure 11).
    direction = torch.outer(randn(64, seed=1), randn(768, seed=2)) / (64 * 768) ** 0.5
    weights = torch.stack([randn(64, 768, seed=3) * 0.02, randn(64, 768, seed=4) * 0.02])
    weights[1] += growth * direction
    norms = spectral_norms(weights)
    torch.testing.assert_close(norms.double(), exact_norms(weights), rtol=NORM_TOLERANCE, atol=0)


def test_spectral_norms_of_equal_singular_values():
    # Power iteration has nothing to converge to here.
    weights = torch.linalg.qr(randn(64, 16, seed=5)).Q.T[None] * 3.0
    torch.testing.assert_close(spectral_norms(weights), torch.tensor([3.0]))


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_heads_with_weights_that_are_not_finite_are_nan_and_harm_no_other(bad):
    query, key = randn(3, 4, 8, seed=6), randn(3, 4, 8, seed=7)
    broken = query.clone()
    broken[1, 2, 3] = bad
    for whole, partly in (
        (spectral_norms(query), spectral_norms(broken)),
        (bilinear_spectral_norms(query, key), bilinear_spectral_norms(broken, key)),
        (bilinear_spectral_norms(key, query), bilinear_spectral_norms(key, broken)),
    ):
        assert partly.isnan().tolist() == [False, True, False]
        assert torch.equal(partly[[0, 2]], whole[[0, 2]])
    assert torch.equal(top_directions(broken)[1], torch.zeros(4))


def test_zero_weights_have_norm_zero():
    zeros = torch.zeros(2, 3, 5)
    assert spectral_norms(zeros).tolist() == [0.0, 0.0]
    assert bilinear_spectral_norms(zeros, randn(1, 3, 5)).tolist() == [0.0, 0.0]


@settings(deadline=None, max_examples=40)
@given(st.integers(1, 2), st.integers(1, 3), SMALL, SMALL, SEEDS)
def test_bilinear_norms_are_those_of_the_formed_product(kv_heads, group, d_head, d_model, seed):
    query = randn(kv_heads * group, d_head, d_model, seed=seed)
    key = randn(kv_heads, d_head, d_model, seed=seed + 1)
    norms = bilinear_spectral_norms(query, key)
    for head in range(kv_heads * group):
        product = query[head].double().T @ key[head // group].double()
        exact = torch.linalg.svdvals(product)[0]
        # In FP64 inside; the root of an eigenvalue halves the digits where the product vanishes.
        bound = torch.linalg.matrix_norm(query[head].double(), 2) * torch.linalg.matrix_norm(
            key[head // group].double(), 2
        )
        torch.testing.assert_close(norms[head].double(), exact, rtol=1e-6, atol=1e-7 * bound)


def test_bilinear_norm_sees_that_large_factors_miss_each_other():
    # Query and key weights both of norm 100, along orthogonal directions of the head: no logits.
    query, key = torch.zeros(1, 2, 4), torch.zeros(1, 2, 4)
    query[0, 0, 0] = key[0, 1, 1] = 100.0
    assert bilinear_spectral_norms(query, key).item() == 0.0
    key[0, 0, 1] = 3.0
    torch.testing.assert_close(bilinear_spectral_norms(query, key), torch.tensor([300.0]))


@pytest.mark.parametrize("missing", [1e-1, 1e-2, 1e-3, 1e-4])
@pytest.mark.parametrize("d_head", [2, 16, 64])
def test_bilinear_norm_of_factors_that_nearly_miss_each_other(missing, d_head):
    # W_Q is large along one direction of the head, W_K along another at nearly a right angle.
    frame = torch.linalg.qr(randn(d_head, d_head, seed=11).double()).Q
    inputs = torch.linalg.qr(randn(96, 2, seed=12).double()).Q
    query = torch.outer(frame[:, 0], inputs[:, 0]).float()
    key = torch.outer(missing * frame[:, 0] + frame[:, 1], inputs[:, 1]).float()
    exact = torch.linalg.svdvals(query.double().T @ key.double())[0]
    norm = bilinear_spectral_norms(query[None], key[None])[0]
    torch.testing.assert_close(norm.double(), exact, rtol=1e-5, atol=0)


@settings(deadline=None, max_examples=30)
@given(HEADS, st.integers(2, 9), st.integers(2, 9), SEEDS, st.sampled_from([1e-30, 1.0, 1e30]))
def test_top_directions_attain_the_norm(heads, d_head, d_model, seed, size):
    weights = size * randn(heads, d_head, d_model, seed=seed)
    directions = top_directions(weights)
    torch.testing.assert_close(directions.norm(dim=1), torch.ones(heads))
    attained = torch.einsum("hd,hdm->hm", directions.double(), weights.double()).norm(dim=1)
    torch.testing.assert_close(attained, exact_norms(weights), rtol=NORM_TOLERANCE, atol=0)
    assert (directions.gather(1, directions.abs().argmax(1, keepdim=True)) > 0).all()


@pytest.mark.parametrize("precision", ["high", "medium"])
def test_norms_do_not_depend_on_the_precision_allowed_for_products(precision):
    # Lightning recommends both settings; they let products round their operands to TF32 or BF16.
    weights = randn(2, 16, 256, seed=9)
    torch.set_float32_matmul_precision(precision)
    try:
        norms, directions = spectral_norms(weights), top_directions(weights)
    finally:
        torch.set_float32_matmul_precision("highest")
    assert torch.equal(norms, spectral_norms(weights))
    assert torch.equal(directions, top_directions(weights))
