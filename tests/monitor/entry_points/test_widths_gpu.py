"""Values narrower, or wider, than keys, as in latent attention, where a GPU's kernels take them."""

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

    def forward(self, x):
        q, k, v = (
            y.unflatten(-1, (heads, -1)).transpose(1, 2)
            for y, heads in ((self.q_proj(x), 4), (self.k_proj(x), 2), (self.v_proj(x), 2))
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=0.5, enable_gqa=True)
        return x + self.o_proj(y.transpose(1, 2).flatten(2))


@pytest.mark.gpu
@pytest.mark.parametrize("width", [16, 64])
def test_heads_are_switched_where_a_kernel_takes_delta_from_the_output(width):
    """The CPU has no such kernel; FlexAttention's test has wider values there."""
    torch.manual_seed(0)
    model = nn.Sequential(Attention(width)).to("cuda", torch.bfloat16)
    x = torch.randn(2, 12, 64).to("cuda", torch.bfloat16)

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
    spec = AttentionSpec(0.5, "top-left")
    exact = dense(before.d_out, before.q, before.k, before.v, spec)
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
