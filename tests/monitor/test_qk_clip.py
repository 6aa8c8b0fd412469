"""QK clip, against the logits that modules compute from the scaled weights."""

import math

import pytest
import torch
from torch import nn

from guardbit.kernels.spec import AttentionSpec
from guardbit.monitor.actions import Clipping, clip
from guardbit.monitor.layouts import LayoutUnavailable
from guardbit.monitor.policy import Policy
from guardbit.records import Sample
from tests import toys
from tests.oracle import scores_of

WIDTH, HEADS, TOKENS = 24, 6, 5
SIZE = WIDTH // HEADS
WHY = "no switch has helped"


class Grouped(toys.Attention):
    """Attention of 6 query heads over `groups` key heads, with biases."""

    def __init__(self, groups=HEADS, expands=False, fused=False, norm=False):
        super().__init__(HEADS, groups, head_dim=SIZE, width=WIDTH, is_fused=fused, has_out=False)
        self.copies = HEADS // groups if expands else 1
        self.norm = nn.RMSNorm(SIZE) if norm else nn.Identity()

    def project(self, x):
        q, *shared = super().project(x)
        return self.norm(q), *(y.repeat_interleave(self.copies, 1) for y in shared)


def logits(module, x):
    """FP64 logits of every head, (H, N, N)."""
    q, k, _ = module.double().project(x.double())
    result = scores_of(q, k, AttentionSpec(SIZE**-0.5))[0].detach()
    module.float()
    return result


@pytest.fixture
def sites_of(instrument):
    """The sites of layers that were trained for a step, and what the layers were given."""

    def sites(*layers):
        x = torch.randn(1, TOKENS, WIDTH, generator=torch.Generator().manual_seed(1))
        inst = instrument(nn.ModuleList(layers))
        sum(layer(x).square().mean() for layer in layers).backward()
        return inst.sites, x

    return sites


def unchanged(*layers):
    """Returns a function that checks that the weights are as they are now."""
    before = [(p, p.detach().clone()) for layer in layers for p in layer.parameters()]
    return lambda: all(torch.equal(p, value) for p, value in before)


@pytest.mark.parametrize(
    ("groups", "expands", "fused"),
    [(6, False, True), (2, False, False), (2, True, True), (1, False, True)],
)
def test_only_the_logits_above_the_bound_shrink_and_to_the_bound(groups, expands, fused, sites_of):
    torch.manual_seed(0)
    module = Grouped(groups, expands, fused)
    sites, x = sites_of(module)
    before = logits(module, x)
    clip(sites["0"], [40.0, 90.0, math.nan, 300.0, 100.0, math.inf], 100.0)
    expected = before.clone()
    expected[3] *= 100.0 / 300.0
    # Two FP32 roundings of each weight, of both factors of a product: 2^-22 of a sum of 24 terms.
    torch.testing.assert_close(logits(module, x), expected, rtol=1e-5, atol=1e-6)


def test_other_rows_of_a_fused_weight_keep_their_bits(sites_of):
    torch.manual_seed(0)
    module = Grouped(fused=True)
    before = module.qkv.weight.detach().clone(), module.qkv.bias.detach().clone()
    clip(sites_of(module)[0]["0"], [1.0, 8.0, 1.0, 1.0, 1.0, 1.0], 2.0)
    touched = torch.zeros(3 * WIDTH, dtype=torch.bool)
    touched[SIZE : 2 * SIZE] = touched[WIDTH + SIZE : WIDTH + 2 * SIZE] = True
    for old, new in zip(before, (module.qkv.weight, module.qkv.bias), strict=True):
        assert torch.equal(old[~touched], new.detach()[~touched])
        assert torch.equal(0.5 * old[touched], new.detach()[touched])


def test_a_module_with_normalised_queries_is_refused(sites_of):
    is_unchanged = unchanged(module := Grouped(norm=True))
    with pytest.raises(LayoutUnavailable, match="its queries are normalised"):
        clip(sites_of(module)[0]["0"], [1000.0] * HEADS, 100.0)
    assert is_unchanged()


def test_where_ranks_hold_different_layers_none_is_clipped_and_each_is_told(sites_of):
    is_unchanged, told = unchanged(module := Grouped()), []
    samples = [Sample(7, site, n, "max_logit", (300.0,) * HEADS) for n, site in enumerate("01")]
    clipping(told).act(sites_of(module)[0], samples)
    assert is_unchanged()
    assert [(event.kind, event.site) for event in told] == [("refusal", "0"), ("refusal", "1")]
    assert {event.why for event in told} == {
        f"not clipped: ranks hold different parts of the model ({WHY})"
    }


def test_weights_of_two_modules_are_not_clipped_for_one(sites_of):
    torch.manual_seed(0)
    one, other = Grouped(), Grouped()
    other.k_proj = one.k_proj
    sites, is_unchanged, told = sites_of(one, other)[0], unchanged(one, other), []
    samples = [Sample(0, "0", 0, "max_logit", (400.0,) + (1.0,) * (HEADS - 1))]
    clipping(told).act(sites, samples)
    assert is_unchanged()
    (event,) = told
    assert event.kind == "refusal"
    assert "'1' shares its W_Q or W_K, and a clip would scale that, too" in event.why


def clipping(told):
    policy = Policy(qk_clip=100.0)
    policy.clipping = 0, WHY
    return Clipping(policy, False, told.append)
