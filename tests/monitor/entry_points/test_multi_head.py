"""`nn.MultiheadAttention` that returns its weights: watched by all indicators, never changed."""

import math
import types

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from guardbit import MonitorSession
from guardbit.kernels.spec import AttentionSpec
from guardbit.monitor.interception.entry_points import multi_head
from tests.oracle import attend
from tests.toys import instrumented

HEADS, WIDTH = 4, 64


class ReturnsWeights(nn.Module):
    def __init__(self, mask=None, checkpointed=False, uses_weights=0.0, **options):
        super().__init__()
        torch.manual_seed(0)
        self.attention = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True, **options)
        self.mask, self.checkpointed, self.uses_weights = mask, checkpointed, uses_weights
        nn.init.normal_(self.attention.in_proj_weight, std=0.3)

    def forward(self, x, padding=None):
        def attend(x):
            out, weights = self.attention(x, x, x, attn_mask=self.mask, key_padding_mask=padding)
            return out.mul_(2.0), weights  # in place, as a model may

        out, weights = (
            checkpoint(attend, x, use_reentrant=False) if self.checkpointed else attend(x)
        )
        return out + self.uses_weights * weights @ x if self.uses_weights else out


CAUSAL = torch.ones(9, 9, dtype=torch.bool).triu(1)  # True: may not see
PADDING = torch.zeros(2, 9, dtype=torch.bool)
PADDING[1, 6:] = True


@pytest.fixture
def x():
    return torch.randn(2, 9, WIDTH, generator=torch.Generator().manual_seed(1))


def observed(model, *args, tiny):
    calls = []
    with tiny.watched(model, *args, observer=calls.append) as (inst, before):
        site = inst.sites["attention"]
        told = {name: getattr(site, name) for name in ("calls", "record", "launches")}
        return calls, types.SimpleNamespace(**told), before


@pytest.mark.parametrize("checkpointed", [False, True], ids=["plain", "checkpointed"])
@pytest.mark.parametrize(
    ("mask", "padding"),
    [(None, None), (CAUSAL, None), (None, PADDING), (CAUSAL, PADDING)],
    ids=["all", "causal", "padded", "causal and padded"],
)
def test_the_observer_hears_of_the_call_as_it_was(mask, padding, checkpointed, x, tiny):
    model = ReturnsWeights(mask, checkpointed).double().float()
    calls, site, before = observed(model, x, padding, tiny=tiny)
    (call,) = calls
    assert "need_weights=True" in site.calls.refusal and "nothing to correct" in site.calls.refusal
    assert site.calls.unwatched is None
    assert site.record.entry == "F.multi_head_attention_forward"
    assert site.launches == {}

    # By hand, in FP64.
    weight = model.attention.in_proj_weight.detach().double().requires_grad_()
    projected = x.double() @ weight.T
    q, k, v = (y.unflatten(-1, (HEADS, -1)).transpose(1, 2) for y in projected.chunk(3, -1))
    q = q / math.sqrt(WIDTH // HEADS)
    q.retain_grad()
    hidden = torch.zeros(2, 1, 9, 9, dtype=torch.bool)
    hidden = hidden if mask is None else hidden | mask
    hidden = hidden if padding is None else hidden | padding[:, None, None]
    out = attend(q, k, v, AttentionSpec(1.0, mask=~hidden)).out
    out.retain_grad()
    attended = 2.0 * out.transpose(1, 2).flatten(2) @ model.attention.out_proj.weight.double().T
    loss = attended.square().mean()
    loss.backward()
    assert loss.item() == pytest.approx(before["loss"].item(), rel=1e-6)

    def close(seen, expected):
        # FP32 against FP64, of sums of at most 64 terms.
        torch.testing.assert_close(seen.double(), expected, rtol=1e-5, atol=1e-5 * expected.std())

    close(call.q, q.detach())
    close(call.k, k.detach())
    close(call.v, v.detach())
    close(call.d_out, out.grad)
    close(call.dq, q.grad)
    assert call.out is None, "delta comes from P"
    assert call.spec.scale == 1.0
    if mask is None and padding is None:
        assert call.spec.mask is None
    else:
        assert torch.equal((call.spec.mask == -torch.inf).expand(2, HEADS, 9, 9),
                           hidden.expand(2, HEADS, 9, 9))  # fmt: skip


def test_of_weights_that_the_loss_uses_no_gradient_is_compared(x, tiny):
    """A part of dQ then comes from them, which no recomputation from dO knows."""
    (call,), _, _ = observed(ReturnsWeights(uses_weights=0.1), x, tiny=tiny)
    assert call.dq is None


def test_dropout_is_told_and_leaves_the_random_numbers_alone(x, tiny):
    (call,), site, _ = observed(ReturnsWeights(dropout=0.3), x, tiny=tiny)
    assert call.known_heads == ()
    assert site.calls.unwatched is None


def test_nothing_is_around_calls_that_nobody_listens_to(x, monkeypatch):
    model = ReturnsWeights()
    session = MonitorSession(model, every_n_train_steps=10, strict=True)
    with session.step(0):
        model(x).square().mean().backward()
    monkeypatch.setattr(multi_head, "with_globals", None)  # not to be called
    with session.step(1):
        model(x).square().mean().backward()
    session.close()
    assert session.instrumentation.sites == {}


def test_another_pytorch_that_is_not_understood_is_said(x, tiny, monkeypatch, caplog):
    monkeypatch.setattr(multi_head._Products, "_before_bmm", lambda self, *x: None)
    monkeypatch.setattr(multi_head, "_why_misread", None)
    model = ReturnsWeights()
    before = tiny.step(model, x)
    with instrumented(model, lambda _: None) as inst:
        for _ in range(2):
            assert tiny.equal(tiny.step(model, x), before)
        assert "writes attention out in another way" in inst.sites["attention"].calls.unwatched
    assert sum("writes attention out in another way" in line for line in caplog.messages) == 1


def test_what_cannot_be_watched_is_said(x, tiny):
    calls, site, _ = observed(ReturnsWeights().double(), x.double(), tiny=tiny)
    assert calls == []
    assert site.calls.unwatched.endswith("nor is it watched: it computes in torch.float64")
