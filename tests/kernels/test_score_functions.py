"""What functions of scores, as FlexAttention has them, do to the shadow; against FP64."""

import math

import pytest
import torch

from guardbit.kernels import reference
from guardbit.kernels.spec import AttentionSpec
from tests.kernels.tensors import inputs
from tests.oracle import attend, largest_products, scores_of


def test_a_score_function_counts_as_the_mask_that_adds_the_same():
    q, k, v, _ = inputs((2, 4, 2, 9, 60, 16), torch.bfloat16, 3)
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
    q, k, v, _ = inputs((2, 4, 2, 9, 60, 16), torch.bfloat16, 3)
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
