"""What functions of scores, as FlexAttention has them, do to the shadow; against FP64."""

import math

import pytest
import torch

from guardbit.kernels import reference
from guardbit.kernels.spec import AttentionSpec
from tests.kernels.tensors import inputs
from tests.kernels.test_spec_numerics import check_shadow
from tests.oracle import dense, largest_products


def test_a_quotient_of_scores_hides_no_key():
    """It adds 0 / 0 to what is exactly 0."""
    q, k = torch.ones(1, 1, 1, 1), torch.tensor([2.0, -90.0, 70.0, -40.0])[None, None, :, None]
    spec = AttentionSpec(1.0, score_function=lambda s, h, r, c: s * s.abs() / s.abs())
    result = reference.shadow(q, k, k, spec=spec)
    assert (result.row_max.item(), result.largest.item()) == (70.0, 90.0)


@pytest.mark.parametrize("causal", [False, True])
def test_score_functions_agree_with_fp64(causal):
    q, k, v, d_out = inputs((2, 4, 2, 9, 60, 16), torch.bfloat16, 3)
    slopes = torch.tensor([0.0, 0.5, 2.0, 9.0])

    def alibi_of_scaled(scores, heads, rows, columns):
        added = slopes[heads][:, None, None] * (columns - 59)
        return 0.5 * scores * torch.log(rows[:, None] + 8.0) + added

    def none_in_two_rows(scores, heads, rows, columns):
        low = (rows[:, None] < 2 + (heads[:, None, None] > 0)) * -1e3
        return alibi_of_scaled(scores, heads, rows, columns) + low

    def of_the_last_key(scores, heads, rows, columns):
        return alibi_of_scaled(scores, heads, rows, columns - 1500)

    for modify in (
        alibi_of_scaled,
        none_in_two_rows,
        of_the_last_key,
        # What multiplies or caps hides no key.
        lambda s, h, r, c: -3 * s,
        lambda s, h, r, c: 2 * torch.tanh(s / 2),
        # Keys are hidden where minus infinity is made of their scores, or they are put far below.
        lambda s, h, r, c: s.masked_fill(c % 7 == 1, -math.inf),
        lambda s, h, r, c: s.masked_fill(s < -2, -math.inf),
        lambda s, h, r, c: 2 * s - 300.0 * (c % 7 == 1),
    ):
        spec = AttentionSpec(0.5, causal, score_function=modify)
        sees = largest_products(q, k, spec) > -math.inf
        assert sees.logical_not().sum() == (16 if modify is none_in_two_rows else 0)
        check_shadow(reference, (d_out, q, k, v), spec, dense(d_out, q, k, v, spec))
