"""Calls that no switch serves, watched against FP64.

Values narrower, or wider, than keys, as in latent attention; one key head that is broadcast.
"""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from guardbit.kernels.spec import AttentionSpec
from tests.oracle import dense
from tests.toys import instrumented


class Attention(nn.Module):
    """Two key heads for four query heads of 32; values of another width."""

    def __init__(self, width):
        super().__init__()
        self.q_proj, self.k_proj = nn.Linear(64, 128), nn.Linear(64, 64)
        self.v_proj, self.o_proj = nn.Linear(64, 2 * width), nn.Linear(4 * width, 64)

    def forward(self, x, mask=None):
        q, k, v = (
            y.unflatten(-1, (heads, -1)).transpose(1, 2)
            for y, heads in ((self.q_proj(x), 4), (self.k_proj(x), 2), (self.v_proj(x), 2))
        )
        y = F.scaled_dot_product_attention(
            q, k, v, mask, is_causal=mask is None, scale=0.5, enable_gqa=True
        )
        return x + self.o_proj(y.transpose(1, 2).flatten(2))


def build(width):
    torch.manual_seed(0)
    return nn.Sequential(Attention(width))


def tokens():
    return torch.randn(2, 12, 64, generator=torch.Generator().manual_seed(1))


def by_hand(call):
    return dense(call.d_out, call.q, call.k, call.v, AttentionSpec(0.5, "top-left"))


@pytest.mark.gpu
@pytest.mark.parametrize("width", [16, 64])
def test_heads_are_switched_where_a_kernel_takes_delta_from_the_output(width):
    """The CPU has no such kernel; FlexAttention's test has wider values there."""
    model = build(width).to("cuda", torch.bfloat16)
    x = tokens().to("cuda", torch.bfloat16)

    def run(heads):
        """The output, the call as its backward tells of it, and the site's stabilizers."""
        calls = []
        with instrumented(model, calls.append) as inst:
            model(x)  # makes the site known
            if heads:
                inst.switch("0", "exact_delta", heads=heads)
            out = model(x)
            calls.clear()
            # Large against the noise of dS, so that the rounding of O shows in dQ.
            (out.float() * 3).square().sum().backward()
            return out.detach(), calls[-1], inst.stabilizers()["0"], inst.sites["0"].calls.refusal

    out, before, *_ = run([])
    again, after, names, refusal = run([1, 2])
    assert refusal is None and names == ["none", "exact_delta", "exact_delta", "none"]
    assert torch.equal(out, again), "the forward keeps its bits"
    torch.testing.assert_close(before.d_out, after.d_out, rtol=0, atol=0)
    for head in (0, 3):
        assert torch.equal(before.dq[:, head], after.dq[:, head])
    exact = by_hand(before)
    errors = [
        (call.d_out.double() * (call.out.double() - exact.out)).sum(-1) for call in (before, after)
    ]
    squares = [(call.dq.double() - exact.dq).square().sum((0, 2, 3)) for call in (before, after)]
    for head in (1, 2):
        stock, switched = (error[:, head] for error in errors)
        # Deltas that are carried agree to 1e-5 of |dO| |O|; O itself is rounded by 2^-9.
        assert switched.abs().max() < 0.02 * stock.abs().max()
        assert abs(switched.sum()) < 0.02 * stock.abs().sum(), "the bias, with its signs"
        assert squares[1][head] < squares[0][head]


class Broadcasting(Attention):
    """One key head for all, without `enable_gqa`, as Falcon 7B has it."""

    def __init__(self):
        super().__init__(32)
        self.k_proj, self.v_proj = nn.Linear(64, 32), nn.Linear(64, 32)

    def forward(self, x):
        q = self.q_proj(x).unflatten(-1, (4, -1)).transpose(1, 2)
        k, v = self.k_proj(x)[:, None], self.v_proj(x)[:, None]
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=0.5)
        return x + self.o_proj(y.transpose(1, 2).flatten(2))


WIDTH = "its values have another head size than its keys, so PyTorch's math kernel runs it"
BROADCAST = "it broadcasts keys over heads, so PyTorch's math kernel runs it"


@pytest.mark.parametrize(
    ("make", "why"),
    [(lambda: Attention(16), WIDTH), (lambda: Attention(48), WIDTH), (Broadcasting, BROADCAST)],
    ids=["narrow", "wide", "broadcast"],
)
def test_calls_of_the_math_kernel_are_watched_and_not_switched(make, why, tiny):
    torch.manual_seed(0)
    model, calls = nn.Sequential(make()), []
    before = tiny.step(model, tokens())
    with instrumented(model, calls.append) as inst:
        assert tiny.equal(tiny.step(model, tokens()), before)
        (site,) = inst.sites.values()
        assert site.calls.unwatched is None
        assert site.calls.refusal.startswith(why)
        assert torch.equal(site.query_weights(), model[0].q_proj.weight.view(4, 32, 64))
        with pytest.raises(ValueError, match=why):
            inst.switch("0", "exact_delta")
    (call,) = calls
    assert call.out is None, "its backward takes delta from P"
    dq = by_hand(call).dq
    # FP32 against FP64.
    torch.testing.assert_close(call.dq.double(), dq, rtol=1e-4, atol=1e-5 * dq.abs().max())
