"""Centred keys: the same attention, in which a wrong delta does less harm."""

import pytest
import torch

from guardbit.kernels.heads import shift_keys, shift_of_lse
from guardbit.kernels.spec import AttentionSpec
from tests.kernels.exact_delta_cases import KINDS, make, relative, sink
from tests.oracle import attend


def common_mode(kind, dtype, shape=(2, 4, 4, 64, 32)):
    """A call whose keys have much in common, as those of heads that fail do."""
    case = make(kind, dtype, shape, "cpu", sharpness=0.5)
    return case._replace(k=(case.k.float() + 6.0).to(dtype))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_dq_is_better_where_keys_have_much_in_common(dtype, kind):
    case = common_mode(kind, dtype)
    native, exact = case.native(), case.exact
    found, state = case.switched(("centered_keys",) * 4)
    assert state.ran == ("centered_keys",) * 4
    # What a wrong delta adds to dQ is a multiple of the mean key, which is taken off.
    assert relative(found[1], exact[0]) < relative(native[1], exact[0])
    # The output is as near to the exact one: only rounding sees what keys have in common.
    torch.testing.assert_close(found[0].float(), native[0].float(), rtol=0.05, atol=0.05)


@pytest.mark.parametrize("heads", [(1,), (0, 3)], ids=str)
def test_other_heads_keep_their_bits(heads):
    case = common_mode("causal", torch.bfloat16)
    native = case.native()
    names = tuple("centered_keys" if head in heads else "none" for head in range(4))
    found, _ = case.switched(names)
    others = [head for head in range(4) if head not in heads]
    for mine, before in zip(found, native, strict=True):
        assert torch.equal(mine[:, others], before[:, others])
    assert not torch.equal(found[1][:, list(heads)], native[1][:, list(heads)])


def test_a_group_of_query_heads_shares_its_centred_key_head():
    k = torch.randn(2, 3, 7, 16, generator=torch.Generator().manual_seed(0)) + 4
    names = tuple("centered_keys" if head in (1, 5) else "none" for head in range(6))
    keys, shift = shift_keys(k, names)
    assert shift is not None and shift.any(-1)[0, :, 0].tolist() == [True, False, True]
    torch.testing.assert_close(keys[:, [0, 2]], k[:, [0, 2]] - k[:, [0, 2]].mean(2, keepdim=True))
    assert torch.equal(keys[:, 1], k[:, 1])
    assert keys.stride() == k.stride()


def test_a_key_head_is_centered_once_whichever_of_its_query_heads_ask():
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(2, 4, 7, 16, generator=generator)
    k = torch.randn(2, 2, 7, 16, generator=generator) + 4
    for names in (("centered_keys", "none"), ("centered_keys", "centered_keys")):
        keys, shift = shift_keys(k, (*names, "none", "none"))
        torch.testing.assert_close(keys[:, 0], k[:, 0] - k[:, 0].mean(1, keepdim=True))
        assert torch.equal(keys[:, 1], k[:, 1])
        before, after = (attend(q, x, x, AttentionSpec(0.25)).lse for x in (k, keys))
        moved = shift_of_lse(q, shift, 0.25).double()
        torch.testing.assert_close(moved, before - after, rtol=1e-5, atol=1e-5)


def test_a_key_that_is_not_finite_spoils_no_others():
    k = torch.randn(1, 1, 5, 16, generator=torch.Generator().manual_seed(0))
    k[0, 0, 4, 3] = torch.inf
    centered = shift_keys(k, ("centered_keys",))[0]
    assert centered[..., :4, :].isfinite().all()
    assert centered[0, 0, 4, 3] == torch.inf


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_little_of_what_adds_up_over_the_rows_of_a_sink_is_left(dtype):
    case = sink("causal", dtype, (4, 4, 4, 128, 64), "cpu")
    native, exact = case.native(), case.exact[0]
    found, _ = case.switched(("centered_keys",) * 4)
    before, after = ((x[1].double() - exact).sum(2) for x in (native, found))
    # What all keys have in common is off; what a row's large P have in common still stands in P K.
    assert after.norm() < 0.2 * before.norm()


@pytest.mark.parametrize("stabilizer", ["none", "exact_delta", "centered_keys"])
def test_later_tokens_reach_earlier_outputs_by_their_rounding_at_most(stabilizer):
    case = common_mode("causal", torch.bfloat16)
    q, k, v = (
        torch.cat([x[:, :, :32], x.roll(1, 0)[:, :, 32:]], 2) for x in (case.q, case.k, case.v)
    )
    first, second = (
        x.switched((stabilizer,) * 4)[0][0][:, :, :32] for x in (case, case._replace(q=q, k=k, v=v))
    )
    if stabilizer != "centered_keys":
        assert torch.equal(first, second)
    # Keys less another mean are rounded otherwise, and so is the output: each rounding is off by
    # 0.166 % in root mean square, so two differ by 0.235 %.
    assert relative(second, first.double()) < 0.004
