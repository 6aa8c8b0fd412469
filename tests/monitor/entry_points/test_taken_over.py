"""Calls that a tensor's class or a mode intercepts: the run keeps its bits and is watched."""

from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention.bias import causal_lower_right, causal_upper_left
from torch.overrides import TorchFunctionMode

import guardbit
from guardbit.monitor.interception.entry_points.base import is_taken_over
from tests.callbacks.several_ranks import launch
from tests.toys import instrumented

TOKENS = 16


class Attention(nn.Module):
    def __init__(self, mask):
        super().__init__()
        self.qkv, self.mask = nn.Linear(64, 192), mask

    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (3, 4, 16)).permute(2, 0, 3, 1, 4)
        mask = None if self.mask is None else self.mask(TOKENS, TOKENS)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(1, 2).flatten(2)


class Halved(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        return out * 0.5 if func is F.scaled_dot_product_attention else out


class Loud(torch.Tensor):
    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        out = super().__torch_function__(func, types, args, kwargs)
        return out * 2 if func is F.scaled_dot_product_attention else out


def trained(mask, watch, backend=None, before=lambda x: x):
    """Losses and weights of four steps; the largest logit, if it is watched."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = nn.Sequential(Attention(mask), Attention(mask))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    runs = model if backend is None else torch.compile(model, backend=backend)
    session = guardbit.MonitorSession(model, every_n_train_steps=2) if watch else None
    losses = []
    for step in range(4):
        x = torch.randn(2, TOKENS, 64, generator=torch.Generator().manual_seed(step))
        with session.step(step) if session else nullcontext():
            # What a mask that is never filled would read.
            torch.full((TOKENS, TOKENS), 7.0)
            loss = (runs(before(x)) - x).as_subclass(torch.Tensor).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    samples = session.samples if session else []
    logits = [value for s in samples if s.indicator == "max_logit" for value in s.values]
    num_norms = sum(s.indicator == "w_q_spectral_norm" for s in samples)
    if session:
        assert (session.coverage, session.stages_off) == ((2, 2), frozenset())
        session.close()
    return losses, [p.detach().clone() for p in model.parameters()], logits, num_norms


def same(one, other):
    assert one[0] == other[0]
    assert all(torch.equal(a, b) for a, b in zip(one[1], other[1], strict=True))


def check(mask, backend=None):
    plain, watched = (trained(mask, watch, backend) for watch in (False, True))
    same(plain, watched)
    *_, logits, num_norms = watched
    assert len(logits) == 8 and num_norms == 2
    # Without weights that are read as a mask, logits are of a size with the losses' inputs.
    assert max(logits) < 10


@pytest.mark.parametrize("mask", [causal_upper_left, causal_lower_right])
def test_a_causal_bias_is_what_it_says(mask):
    check(mask)


def check_compiled():
    check(causal_upper_left, "aot_eager")
    check(causal_lower_right, "eager")


@pytest.mark.slow
def test_a_causal_bias_is_what_it_says_in_compiled_code():
    # A process of its own: the compiler knows PyTorch's functions by what they were called when it
    # was first used, and in this one that may have been within another test's session.
    launch(check_compiled, 1)


@pytest.mark.parametrize(
    ("mode", "kind"), [(Halved, torch.Tensor), (nullcontext, Loud)], ids=["a mode", "a class"]
)
def test_what_takes_calls_over_keeps_its_word(mode, kind):
    def run(watch):
        with mode():
            return trained(None, watch, before=lambda x: x.as_subclass(kind))

    plain, watched = run(False), run(True)
    same(plain, watched)
    assert plain[0] != trained(None, False)[0]
    assert len(watched[2]) == 8


def test_what_takes_nothing_over():
    class Plain(torch.Tensor):
        pass

    x = torch.ones(2)
    with torch.device("cpu"):
        assert not is_taken_over([x, nn.Parameter(x), x.as_subclass(Plain)])
    assert is_taken_over([x, x.as_subclass(Loud)])


class Nested(nn.Module):
    def forward(self, x, starts):
        jagged = torch.nested.nested_tensor_from_jagged(x, starts, min_seqlen=3, max_seqlen=5)
        return F.scaled_dot_product_attention(*[jagged.transpose(1, 2)] * 3).values()


def check_nested():
    # Their class takes a call over, and does not call again.
    x, starts = torch.randn(8, 4, 16, requires_grad=True), torch.tensor([0, 3, 8])
    for run in (Nested(), torch.compile(Nested(), backend="aot_eager")):
        expected = Nested()(x, starts)
        with instrumented(run) as inst:
            assert torch.equal(run(x, starts), expected)
            (site,) = inst.sites.values()
            assert "its inputs are jagged tensors, and a switch needs" in site.calls.refusal


@pytest.mark.slow
def test_jagged_tensors_keep_their_kernel():
    launch(check_nested, 1)
