"""Calls that no switch serves, watched against FP64.

Values narrower, or wider, than keys, as in latent attention; one key head that is broadcast.
"""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import guardbit
from guardbit import MonitorSession
from guardbit.monitor.measure import Measurement


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
    """Scores, P and dQ in FP64."""
    q = call.q.double().requires_grad_()
    k, v = (x.double().repeat_interleave(4 // x.size(1), 1) for x in (call.k, call.v))
    hidden = torch.ones(12, 12, dtype=torch.bool).triu(1)
    scores = (q @ k.mT * 0.5).masked_fill(hidden, -torch.inf)
    (dq,) = torch.autograd.grad(scores.softmax(-1) @ v, q, call.d_out.double())
    return scores.detach(), scores.detach().softmax(-1), dq


@pytest.mark.parametrize("width", [16, 48])
def test_what_is_measured_is_of_the_call(width, tiny, monkeypatch):
    model, calls, consume = build(width), [], Measurement.consume
    before = tiny.step(model, tokens())
    monkeypatch.setattr(
        Measurement, "consume", lambda self, call: (calls.append(call), consume(self, call))
    )
    session = MonitorSession(model, every_n_train_steps=1, num_audited_heads=4, strict=True)
    for step in range(2):  # the second one knows directions, which an audit needs
        with session.step(step):
            assert tiny.equal(tiny.step(model, tokens()), before)
    (site,) = session.instrumentation.sites.values()
    assert site.unwatched is None
    assert "another head size" in site.refusal
    assert torch.equal(site.query_weights(), model[0].q_proj.weight.view(4, 32, 64))
    with pytest.raises(ValueError, match="another head size than its keys"):
        session.instrumentation.switch("0", "exact_delta")
    session.close()
    values = {sample.indicator: torch.tensor(sample.values).double() for sample in session.samples}
    scores, p, dq = by_hand(calls[-1])
    # FP32 against FP64.
    largest = scores.abs().where(scores.isfinite(), 0.0).amax((0, 2, 3))
    torch.testing.assert_close(values["max_logit"], largest, rtol=1e-5, atol=0.0)
    entropy = torch.special.entr(p).sum(-1).mean((0, 2))
    torch.testing.assert_close(values["attention_entropy"], entropy, rtol=1e-5, atol=0.0)
    torch.testing.assert_close(calls[-1].dq.double(), dq, rtol=1e-4, atol=1e-5 * dq.abs().max())
    assert values["dq_relative_error"].max() < 1e-5


def test_the_rounded_output_is_heard_of_where_delta_comes_from_it(tiny, monkeypatch):
    """As on a GPU, whose fused kernels serve such calls; their delta is rowsum(dO O)."""
    monkeypatch.setattr(
        "guardbit.monitor.interception.entry_points.base._keeps_output", lambda bound: True
    )
    model, calls = build(16).bfloat16(), []
    inst = guardbit.instrument(model)
    try:
        inst.observe(calls.append)
        tiny.step(model, tokens().bfloat16())
    finally:
        inst.remove()
    (call,) = calls
    assert call.out.shape == call.d_out.shape == (2, 4, 12, 16)
    _, p, _ = by_hand(call)
    exact = p @ call.v.double().repeat_interleave(2, 1)
    # PyTorch's math kernel rounds P and O to BF16, an ulp is 2^-8.
    assert 0 < (call.out.double() - exact).abs().max() < 2**-6 * exact.abs().max()


def test_compiled_it_is_not_watched_and_says_so(tiny):
    torch._dynamo.reset()
    model = build(16)
    inst = guardbit.instrument(model)
    try:
        tiny.step(model, tokens(), run=torch.compile(model, backend="aot_eager", fullgraph=True))
        (site,) = inst.sites.values()
        assert "another head size" in site.unwatched
        assert site.unwatched.endswith("compiled it is not watched either")
    finally:
        inst.remove()
        torch._dynamo.reset()


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


def test_one_key_head_that_is_broadcast(tiny):
    torch.manual_seed(0)
    model, calls = nn.Sequential(Broadcasting()), []
    before = tiny.step(model, tokens())
    inst = guardbit.instrument(model)
    try:
        inst.observe(calls.append)
        assert tiny.equal(tiny.step(model, tokens()), before)
        (site,) = inst.sites.values()
        assert site.unwatched is None
        assert site.refusal.startswith("it broadcasts keys over heads, which PyTorch's math kernel")
    finally:
        inst.remove()
    (call,) = calls
    assert call.out is None, "its backward takes delta from P"
    _, _, dq = by_hand(call)
    # FP32 against FP64.
    torch.testing.assert_close(call.dq.double(), dq, rtol=1e-4, atol=1e-5 * dq.abs().max())
