"""Shadow, row statistics and exact gradients against FP64 and brute force."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from guardbit import numerics
from guardbit.kernels import reference
from guardbit.kernels.spec import AttentionSpec
from tests.oracle import attend, largest_products, scores_of


def random_inputs(shape, dtype, seed=0):
    batch, heads, kv_heads, rows, keys, width = shape
    generator = torch.Generator().manual_seed(seed)

    def normal(*size):
        return torch.randn(size, generator=generator).to(dtype)

    q, d_out = normal(batch, heads, rows, width), normal(batch, heads, rows, width)
    k, v = normal(batch, kv_heads, keys, width), normal(batch, kv_heads, keys, width)
    return q, k, v, d_out


# Row by row, over the keys that a row may see: a witness that knows no masks, unlike tests.oracle.


def allowed_keys(row, rows, keys, causal):
    """How many keys, from the first, query `row` may see."""
    if causal is False:
        return keys
    return min(keys, max(0, row + 1 + (keys - rows if causal is True else 0)))


def dense_row(q, k, v, scale):
    """O, maximum and entropy of one row over the keys it may see, FP64."""
    scores = (k.double() @ q.double()) * scale
    weights = torch.softmax(scores, 0)
    return weights @ v.double(), scores.max(), -(weights * weights.log()).sum()


@settings(max_examples=25, deadline=None)
@given(
    kv_heads=st.integers(1, 2),
    groups=st.integers(1, 3),
    rows=st.integers(1, 12),
    keys=st.integers(0, 20),
    causal=st.sampled_from([False, True, "top-left"]),
    dtype=st.sampled_from([torch.bfloat16, torch.float16, torch.float32]),
    chunk=st.sampled_from([1, 5, 128]),
    data=st.data(),
)
def test_shadow_agrees_with_fp64(kv_heads, groups, rows, keys, causal, dtype, chunk, data):
    q, k, v, _ = random_inputs((2, kv_heads * groups, kv_heads, rows, keys, 16), dtype, rows + keys)
    chosen = data.draw(st.none() | st.lists(st.integers(0, rows - 1), min_size=1, max_size=4))
    result = reference.shadow(
        q,
        k,
        v,
        spec=AttentionSpec(0.5, causal),
        query_ids=None if chosen is None else torch.tensor(chosen),
        chunk=chunk,
    )
    positions = range(rows) if chosen is None else chosen
    assert result.out.dtype == result.row_max.dtype == result.entropy.dtype == torch.float32
    assert result.out.shape == (2, kv_heads * groups, len(positions), 16)
    # FP32 sums of 20 terms of size 10 and exponentials of scores near 20.
    close = {"rtol": 2e-5, "atol": 2e-5}
    for batch in range(2):
        for head in range(kv_heads * groups):
            for place, row in enumerate(positions):
                at = (batch, head, place)
                seen = allowed_keys(row, rows, keys, causal)
                if not seen:
                    assert (result.out[at] == 0).all()
                    assert result.row_max[at] == result.largest[at] == -math.inf
                    assert result.entropy[at] == 0
                    assert result.maxima[at] == result.maxima_bf16[at] == 0
                    continue
                group = head // groups
                out, row_max, entropy = dense_row(
                    q[batch, head, row], k[batch, group, :seen], v[batch, group, :seen], 0.5
                )
                torch.testing.assert_close(result.out[at].double(), out, **close)
                torch.testing.assert_close(result.row_max[at].double(), row_max, **close)
                torch.testing.assert_close(result.entropy[at].double(), entropy, **close)
                sizes = (k[batch, group, :seen].double() @ q[batch, head, row].double() * 0.5).abs()
                torch.testing.assert_close(result.largest[at].double(), sizes.max(), **close)


@pytest.mark.parametrize("chunk", [3, 128])
@pytest.mark.parametrize(
    ("scores", "maxima", "maxima_bf16"),
    [
        ([5.0, 4.0, 3.0, 2.0], 1, 1),
        ([5.0, 5.0, 3.0, 5.0], 3, 3),
        # BF16 has 5.0 and then 4.96875: 4.99 is a tie there.
        ([5.0, 4.0, 4.99, 2.0], 1, 2),
        # 0.0015 below: no tie at eps = 1e-3 but in BF16.
        ([5.0, 4.9985, 3.0, 2.0], 1, 2),
        # 0.0005 below: a tie in either arithmetic.
        ([3.0, 5.0, 2.0, 4.9995], 2, 2),
        # Near 1000 BF16 has steps of 4, so 1000 and 998.5 tie and do not in FP32.
        ([1000.0, 998.5, 900.0, 997.9], 1, 2),
        # Neighbours in BF16, 2^-11 apart, less than eps.
        ([0.10009765625, 0.099609375, -1.0, -2.0], 2, 2),
        ([-600.0, -600.0, -700.0, -800.0], 2, 2),
        ([0.0, 0.0, 0.0, 0.0], 4, 4),
    ],
)
def test_counts_of_maxima(scores, maxima, maxima_bf16, chunk):
    # FP32 inputs, so that the scores are these numbers.
    q = torch.tensor(scores)[None, None, None]
    k = torch.eye(4)[None, None]
    result = reference.shadow(q, k, torch.ones_like(k), spec=AttentionSpec(1.0), chunk=chunk)
    assert result.row_max.item() == max(scores)
    assert result.maxima.item() == maxima
    assert result.maxima_bf16.item() == maxima_bf16


@pytest.mark.parametrize("chunk", [1, 128])
@pytest.mark.parametrize(
    ("scores", "largest"),
    [
        ([-7.0, -300.0, -5.0, 1e5], 300.0),  # the last key is forbidden
        ([-7.0, 8.0, -5.0, -1e5], 8.0),
        ([1.0, -math.inf, 2.0, 3.0], math.inf),
        ([1.0, math.nan, -9.0, 3.0], math.nan),
        ([1.0, -9.0, 2.0, math.nan], math.nan),  # as row_max has it, and PyTorch's math kernel
    ],
)
def test_the_largest_size_is_that_of_allowed_scores(scores, largest, chunk):
    q = torch.ones(1, 1, 3, 1)
    k = torch.tensor(scores)[None, None, :, None]
    result = reference.shadow(
        q, k, torch.ones_like(k), spec=AttentionSpec(1.0, "top-left"), chunk=chunk
    )
    torch.testing.assert_close(result.largest[0, 0, 2].item(), largest, equal_nan=True)


@pytest.mark.parametrize("chunk", [1, 5, 128])
@pytest.mark.parametrize("causal", [False, True, "top-left"])
def test_maxima_alone_agree_with_fp64_and_are_the_shadows(causal, chunk):
    q, k, v, _ = random_inputs((2, 4, 2, 9, 14, 16), torch.bfloat16, 3)
    rows = torch.tensor([8, 0, 3])
    spec = AttentionSpec(0.5, causal)
    scores = scores_of(q, k, spec)
    result = reference.row_maxima(q, k, spec=spec, query_ids=rows, chunk=chunk)
    top = scores.amax(-1)[:, :, rows]
    sizes = scores.abs().where(scores > -math.inf, -math.inf).amax(-1)[:, :, rows]
    # FP32 sums of 16 products of size 1.
    torch.testing.assert_close(result.row_max.double(), top, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(result.largest.double(), sizes, rtol=1e-6, atol=1e-6)
    whole = reference.shadow(q, k, v, spec=spec, query_ids=rows, chunk=chunk)
    assert torch.equal(result.row_max, whole.row_max)
    assert torch.equal(result.largest, whole.largest)


def test_eps_is_the_width_of_a_tie():
    q = torch.tensor([1.0, 0.75, 0.5, 0.0])[None, None, None]
    k = torch.eye(4)[None, None]
    counts = [
        reference.shadow(q, k, k, spec=AttentionSpec(1.0), eps=eps).maxima.item()
        for eps in (0.1, 0.25, 0.6, 1.0)
    ]
    assert counts == [1, 2, 3, 4]


def test_entropy_of_equal_scores_is_the_logarithm_of_their_number():
    q, k = torch.zeros(1, 1, 1, 16), torch.ones(1, 1, 300, 16)
    result = reference.shadow(q, k, k, spec=AttentionSpec(1.0))
    assert result.entropy.item() == pytest.approx(math.log(300), rel=1e-6)


def test_nan_shows_and_is_not_counted_as_a_maximum():
    q, k, v, _ = random_inputs((1, 1, 1, 3, 5, 16), torch.bfloat16)
    q[0, 0, 1, 0] = math.nan
    result = reference.shadow(q, k, v, spec=AttentionSpec(1.0))
    for field in (result.out[..., 0], result.row_max, result.entropy):
        assert field[0, 0].isnan().tolist() == [False, True, False]
    assert result.maxima[0, 0].tolist() == [1, 0, 1]


@settings(max_examples=25, deadline=None)
@given(
    kv_heads=st.integers(1, 2),
    groups=st.integers(1, 3),
    rows=st.integers(1, 20),
    keys=st.integers(0, 20),
    causal=st.sampled_from([False, True, "top-left"]),
    dtype=st.sampled_from([torch.bfloat16, torch.float32]),
    chunk=st.sampled_from([1, 7, 128]),
)
def test_exact_query_gradient_agrees_with_fp64(kv_heads, groups, rows, keys, causal, dtype, chunk):
    heads = kv_heads * groups
    q, k, v, d_out = random_inputs((2, heads, kv_heads, rows, keys, 16), dtype, rows + keys)
    chosen = [heads - 1, 0]
    computed = reference.exact_query_gradient(
        d_out, q, k, v, spec=AttentionSpec(0.5, causal), head_ids=chosen, chunk=chunk
    )
    assert computed.dtype == torch.float32
    for place, head in enumerate(chosen):
        group = head // groups
        leaf = q[:, head].double().requires_grad_()
        k_head, v_head = k[:, group].double(), v[:, group].double()
        rows_out = []
        for row in range(rows):
            seen = allowed_keys(row, rows, keys, causal)
            scores = (k_head[:, :seen] @ leaf[:, row, :, None])[..., 0] * 0.5
            weights = torch.softmax(scores, -1)
            rows_out.append((weights[:, None] @ v_head[:, :seen])[:, 0])
        out = torch.stack(rows_out, 1)
        truth = torch.autograd.grad(out, leaf, d_out[:, head].double())[0]
        # FP32 sums of 20 terms of size 20 and exponentials of scores near 20.
        torch.testing.assert_close(computed[:, place].double(), truth, rtol=5e-5, atol=5e-5)


def test_exact_query_gradient_is_far_nearer_than_the_low_precision_backward():
    q, k, v, d_out = random_inputs((1, 2, 2, 64, 64, 32), torch.bfloat16)
    common = {"causal": True, "scale": 32**-0.5}
    names = {"stabilizers": ["none", "none"]}
    result = reference.forward(q, k, v, **common, **names)
    low = reference.backward(d_out, q, k, v, *result, **common, **names)
    spec = AttentionSpec(common["scale"], True)
    exact = reference.exact_query_gradient(d_out, q, k, v, spec=spec, head_ids=[0, 1])
    error = (low.dq.float() - exact).norm() / exact.norm()
    # A few roundings to 8 bits, each 2^-9 at most and about a third of it in the mean.
    assert 2.0**-11 < error < 2.0**-7


def test_exact_query_gradient_refuses_heads_that_do_not_exist():
    q, k, v, d_out = random_inputs((1, 2, 1, 3, 3, 16), torch.bfloat16)
    with pytest.raises(IndexError, match=r"takes 0 to 1, but holds \[2, -1\]"):
        reference.exact_query_gradient(d_out, q, k, v, spec=AttentionSpec(1.0), head_ids=[0, 2, -1])


@settings(deadline=None, max_examples=30)
@given(
    st.integers(1, 3),
    st.integers(1, 4),
    st.integers(1, 9),
    st.integers(1, 9),
    st.integers(0, 2**31),
)
def test_delta_bias_is_the_signed_sum(batch, heads, rows, width, seed):
    generator = torch.Generator().manual_seed(seed)
    exact, d_out = torch.randn(2, batch, heads, rows, width, generator=generator)
    d_out = d_out.bfloat16()
    out = exact.bfloat16()
    bias, bias_abs = reference.delta_bias(d_out, out, exact)
    expected = (d_out.double() * (out.double() - exact.double())).sum(-1)
    # FP32 inside a row of at most nine products, each at most about 10 times 2^-8.
    torch.testing.assert_close(bias, expected.sum((0, 2)), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(bias_abs, expected.abs().sum((0, 2)), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_delta_bias_has_the_sign_of_what_is_added_to_delta(sign):
    # delta_lp - delta_hp (equation 3): an output too large along dO makes delta too large.
    d_out = torch.ones(2, 1, 5, 4)
    exact = torch.randn(2, 1, 5, 4, generator=torch.Generator().manual_seed(8))
    bias, bias_abs = reference.delta_bias(d_out, exact + sign * 0.5, exact)
    torch.testing.assert_close(bias, torch.tensor([sign * 0.5 * 40]).double())
    torch.testing.assert_close(bias_abs, torch.tensor([0.5 * 40]).double())


def test_delta_bias_adds_many_rows_without_losing_small_ones():
    # 2^17 rows of 2^-10 after one of 1e5: in FP32 the small ones would be rounded off (ulp 2^-7).
    d_out = torch.ones(1, 1, 2**17 + 1, 1)
    error = torch.full((1, 1, 2**17 + 1, 1), 2.0**-10)
    error[0, 0, 0] = 1e5
    bias, _ = reference.delta_bias(d_out, error, torch.zeros_like(error))
    assert bias.item() == 1e5 + 2**7


def test_delta_bias_of_chosen_rows_counts_the_residual():
    # out is 2^-9 of its size too small everywhere, and the residual says so in one head of two.
    exact = torch.full((1, 2, 6, 8), 1.0 + 2.0**-9)
    out, d_out = torch.ones(1, 2, 6, 8).bfloat16(), torch.ones(1, 2, 6, 8).bfloat16()
    residual = numerics.encode_residual(exact, out)
    residual[:, 1] = 0
    rows = torch.tensor([5, 0, 3])
    bias, bias_abs = reference.delta_bias(
        d_out, out, exact[:, :, rows], residual=residual, query_ids=rows
    )
    # Three rows of eight features; half a last place is 120 of its 240 steps, kept exactly.
    assert bias.tolist() == [0.0, -3 * 8 * 2.0**-9]
    assert bias_abs.tolist() == [0.0, 3 * 8 * 2.0**-9]


def test_a_score_function_counts_as_the_mask_that_adds_the_same():
    q, k, v, _ = random_inputs((2, 4, 2, 9, 60, 16), torch.bfloat16, 3)
    positions = [torch.arange(count) for count in (9, 60)]

    def alibi(scores, heads, rows, columns):
        return scores - 2.0 * heads[:, None, None] * (rows[:, None] - columns).abs()

    modified = AttentionSpec(0.5, score_function=alibi)
    added = AttentionSpec(0.5, mask=alibi(torch.zeros(1, 4, 9, 60), torch.arange(4), *positions))
    found = reference.shadow(q, k, v, spec=modified)
    largest = largest_products(q, k, added)
    assert (largest[:, 0] > largest[:, 3]).any(), "some keys must not count"
    torch.testing.assert_close(found.largest.double(), largest, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(
        found.row_max.double(), scores_of(q, k, added).amax(-1), rtol=1e-6, atol=1e-5
    )
    assert torch.equal(reference.row_maxima(q, k, spec=modified).largest, found.largest)


@pytest.mark.parametrize("chunk", [3, 128])
@pytest.mark.parametrize(
    ("modify", "row_max"),
    [
        (lambda s, h, r, c: 3 * s, 210.0),
        (lambda s, h, r, c: -s, 90.0),
        (lambda s, h, r, c: 20 * torch.tanh(s / 20), 20 * math.tanh(3.5)),
        (lambda s, h, r, c: s * torch.log(r[:, None] + 2.0), 70 * math.log(2)),
        # 0 / 0 is added to what is exactly 0.
        (lambda s, h, r, c: s * s.abs() / s.abs(), 70.0),
    ],
    ids=["times 3", "negated", "capped", "by the logarithm of the row", "a quotient"],
)
def test_what_a_score_function_multiplies_or_caps_hides_no_key(modify, row_max, chunk):
    products = [2.0, -90.0, 70.0, -40.0, 1.0, -1.0]
    q, k = torch.ones(1, 1, 1, 1), torch.tensor(products)[None, None, :, None]
    spec = AttentionSpec(1.0, score_function=modify)
    result = reference.shadow(q, k, k, spec=spec, chunk=chunk)
    assert result.row_max.item() == pytest.approx(row_max, rel=1e-6)
    assert result.largest.item() == 90.0
    assert reference.row_maxima(q, k, spec=spec, chunk=chunk).largest.item() == 90.0


def test_a_score_function_hides_keys_whose_scores_it_makes_minus_infinity():
    products = [2.0, -90.0, 70.0, -40.0, 1.0, -1.0]
    q, k = torch.ones(1, 1, 1, 1), torch.tensor(products)[None, None, :, None]

    def by_place(scores, heads, rows, columns):
        return scores.masked_fill(columns == 1, -math.inf)

    def by_score(scores, heads, rows, columns):
        return scores.masked_fill(scores < -60, -math.inf)

    def far(scores, heads, rows, columns):
        return 2 * scores - 300.0 * (columns == 1)

    for modify in (by_place, by_score, far):
        spec = AttentionSpec(1.0, score_function=modify)
        assert reference.shadow(q, k, k, spec=spec).largest.item() == 70.0


@pytest.mark.parametrize("causal", [False, True])
def test_score_functions_agree_with_fp64(causal):
    q, k, v, _ = random_inputs((2, 4, 2, 9, 60, 16), torch.bfloat16, 3)
    slopes = torch.tensor([0.0, 0.5, 2.0, 9.0])

    def alibi_of_scaled(scores, heads, rows, columns):
        added = slopes[heads][:, None, None] * (columns - 59)
        return 0.5 * scores * torch.log(rows[:, None] + 8.0) + added

    def none_in_two_rows(scores, heads, rows, columns):
        low = (rows[:, None] < 2 + (heads[:, None, None] > 0)) * -1e3
        return alibi_of_scaled(scores, heads, rows, columns) + low

    def of_the_last_key(scores, heads, rows, columns):
        return alibi_of_scaled(scores, heads, rows, columns - 1500)

    for modify in (alibi_of_scaled, none_in_two_rows, of_the_last_key):
        spec = AttentionSpec(0.5, causal, score_function=modify)
        found = reference.shadow(q, k, v, spec=spec)
        exact, largest = attend(q, k, v, spec), largest_products(q, k, spec)
        sees = largest > -math.inf
        assert sees.logical_not().sum() == (16 if modify is none_in_two_rows else 0)
        torch.testing.assert_close(found.largest.double(), largest, rtol=1e-6, atol=1e-6)
        row_max = exact.scores.amax(-1).where(sees, -math.inf)
        torch.testing.assert_close(found.row_max.double(), row_max, rtol=1e-6, atol=1e-5)
        entropy = torch.special.entr(exact.weights).sum(-1).where(sees, 0.0)
        # FP32 scores of 1e4 have steps of 2^-10.
        torch.testing.assert_close(found.entropy.double(), entropy, rtol=0, atol=2.0**-7)
