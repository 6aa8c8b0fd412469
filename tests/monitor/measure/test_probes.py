"""What probes compute: the keys' common part, and what a sum needs."""

import pytest
import torch

from guardbit.kernels.runtime import AttentionCall
from guardbit.kernels.spec import AttentionSpec
from guardbit.monitor.measure.probes import (
    CallView,
    DeltaProbe,
    GradientAudit,
    KeyProbe,
)
from tests.kernels.spec_cases import packed


def call_with(k, heads, documents=None, mask=None):
    q = torch.zeros(k.size(0), heads, 3, k.size(3), dtype=k.dtype)
    fields = {"q": q, "k": k, "spec": AttentionSpec(1.0, mask=mask, documents=documents)}
    return AttentionCall(**{**dict.fromkeys(AttentionCall.__dataclass_fields__), **fields})


def common_modes(calls, heads, documents=None, mask=None):
    probe = KeyProbe(["key_common_mode"])
    found = [probe.update(CallView(call_with(k, heads, documents, mask))) for k in calls]
    state = dict(zip(probe.sums, map(sum, zip(*found, strict=True)), strict=True))
    return probe.compute(state, 1.0)["key_common_mode"]


def test_equal_keys_are_common_and_opposite_ones_are_not():
    k = torch.ones(2, 3, 6, 4)
    k[:, 1, ::2] *= -1
    k[:, 2, 0] = 5.0  # mean 10 / 6 of each, mean square (25 + 5) / 6
    expected = torch.tensor([1.0, 0.0, 10 / 6 / 5**0.5], dtype=torch.float64)
    torch.testing.assert_close(common_modes([k, k], 3), expected, rtol=1e-6, atol=1e-6)


def test_heads_of_a_group_share_their_keys_and_sequences_their_means():
    generator = torch.Generator().manual_seed(0)
    calls = [torch.randn(*size, generator=generator) + 0.5 for size in ((2, 2, 7, 5), (1, 2, 9, 5))]
    means = squares = 0.0
    for k in calls:
        for sequence in k.double():
            means = means + sequence.mean(1).square().sum(-1)
            squares = squares + sequence.square().sum((1, 2)) / sequence.size(1)
    expected = (means / squares).sqrt().repeat_interleave(2)
    torch.testing.assert_close(common_modes(calls, 4), expected, rtol=1e-6, atol=0)


def test_packed_documents_have_a_mean_each():
    lengths = [4, 1, 0, 6]
    generator = torch.Generator().manual_seed(3)
    parts = [torch.randn(1, 2, length, 5, generator=generator) + 0.5 for length in lengths]
    packed_keys = torch.cat([*parts, torch.full((1, 2, 3, 5), 9.0)], 2)  # padding behind
    found = common_modes([packed_keys], 4, packed(lengths, lengths, "cpu"))
    alone = common_modes([part for part in parts if part.size(2)], 4)
    torch.testing.assert_close(found, alone, rtol=1e-6, atol=0)


@pytest.mark.parametrize("kind", ["boolean", "additive", "one a head"])
def test_padding_that_a_mask_hides_from_all_queries_counts_nowhere(kind):
    k = torch.randn(2, 2, 7, 5, generator=torch.Generator().manual_seed(4)) + 0.5
    k[0, :, :3], k[1, :, 6:] = 9.0, torch.nan
    mask = torch.ones(2, 1, 3, 7, dtype=torch.bool).tril(4)
    mask[0, ..., :3], mask[1, ..., 6:] = False, False
    if kind == "additive":
        mask = torch.zeros(mask.shape).masked_fill(~mask, torch.finfo(torch.float32).min)
    if kind == "one a head":
        mask = mask.repeat(1, 4, 1, 1)
        mask[:, ::2] = False  # the other head of the group sees them
    found = common_modes([k], 4, mask=mask)
    alone = common_modes([k[:1, :, 3:], k[1:, :, :6]], 4)
    torch.testing.assert_close(found, alone, rtol=1e-6, atol=0)


def test_keys_that_are_zero_have_nothing_in_common():
    assert common_modes([torch.zeros(1, 2, 4, 3)], 2).isnan().all()


def test_a_sum_needs_what_it_sums_up():
    assert DeltaProbe(["delta_bias_cumulative"]).indicators == ("delta_bias",)
    assert GradientAudit(["dq_relative_error", "loss"]).indicators == ("dq_relative_error",)
    assert DeltaProbe(["max_logit"]).indicators == ()
