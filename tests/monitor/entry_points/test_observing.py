"""Attention that is the user's own, shown by `observe`."""

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import guardbit
from guardbit import MonitorSession, read_events
from guardbit.store import read_metadata
from tests import toys
from tests.toys import instrumented

SEEN = torch.ones(9, 9, dtype=torch.bool).tril()


class Core(nn.Module):
    def forward(self, queries, keys, *, values):
        scores = torch.einsum("bhnd,bhmd->bhnm", queries, keys) / 4
        p = scores.masked_fill(~SEEN, -torch.inf).softmax(-1)
        return torch.einsum("bhnm,bhmd->bhnd", p, values)


class Attention(toys.Attention):
    """`shows` is what is done with q, k and v before attention."""

    def __init__(self, shows, how=None):
        super().__init__(has_out=False)
        self.core, self.shows, self.how = Core(), shows, how

    def attend(self, q, k, v):
        q, k, v = self.shows(q, k, v)
        return self.core(q, k, values=v)

    def forward(self, x):
        if self.how is None:
            return super().forward(x)
        return checkpoint(super().forward, x, use_reentrant=self.how == "reentrant")


def observes(q, k, v):
    return guardbit.observe(q, k, v, causal=True)


def build(shows=observes, how=None):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 32), Attention(shows, how))


@pytest.fixture
def x():
    return torch.randn(2, 9, 32, generator=torch.Generator().manual_seed(1))


CHECKPOINTS = [None, "reentrant", "not reentrant"]


def test_the_first_sample_has_all_modules(x):
    torch.manual_seed(0)
    model = nn.Sequential(Attention(observes), Attention(observes))
    session = MonitorSession(model, every_n_train_steps=1, strict=True)
    with session.step(0):
        model(x).square().mean().backward()
    found = {s.site: s.values for s in session.samples if s.indicator == "max_logit"}
    assert list(found) == ["0", "1"]
    for module, values in zip(model, found.values(), strict=True):
        q, k, _ = module.project(x)
        scores = (q.double() @ k.double().mT / 4).masked_fill(~SEEN, 0).abs()
        assert values == pytest.approx(scores.amax((0, 2, 3)).tolist(), rel=1e-5)  # FP32
        x = module(x)
    session.close()


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")  # in evaluation
@pytest.mark.parametrize("how", CHECKPOINTS)
def test_observe_gives_back_what_it_got_and_is_observed_once(how, x, tiny):
    model, calls = build(how=how), []
    with tiny.watched(model, x, observer=calls.append) as (inst, _):
        (call,) = calls
        site = inst.sites["1"]
        assert site.record.entry == "guardbit.observe"
        assert site.calls.unwatched is site.calls.refusal is None
        weight = model[1].qkv.weight
        assert torch.equal(site.query_weights(), weight[:32].view(2, 16, 32))
        q = model[1].qkv(model[0](x))[..., :32].unflatten(-1, (2, 16)).transpose(1, 2)
        assert torch.equal(call.q, q)
        assert call.spec.causal is True
        assert call.d_out is None
        with torch.no_grad():
            model(x)
        assert len(calls) == 1, "of training only"


@pytest.mark.parametrize("how", CHECKPOINTS)
def test_the_switch_to_centered_keys(how, x, tiny):
    model = build(how=how)
    before = tiny.step(model, x)
    with instrumented(model) as inst:
        tiny.step(model, x)
        inst.switch("*", "centered_keys", heads=[1])
        keys = []
        handle = model[1].core.register_forward_pre_hook(
            lambda _, args: keys.append(args[1].detach())
        )
        after = tiny.step(model, x)
        handle.remove()
        assert inst.stabilizers() == {"1": ["none", "centered_keys"]}
        given = model[1].project(model[0](x))[1].detach()
        assert torch.equal(keys[0][:, 0], given[:, 0])
        # FP32: a few ulps of numbers of size 1.
        expected = given[:, 1] - given[:, 1].double().mean(1, keepdim=True)
        torch.testing.assert_close(keys[0][:, 1].double(), expected, rtol=0, atol=1e-6)
        for parameter, gradient in after.items():
            torch.testing.assert_close(gradient, before[parameter], rtol=1e-4, atol=1e-6)
        inst.switch("*", "none")
        assert tiny.equal(tiny.step(model, x), before)


def test_what_the_tensors_alone_do_not_allow_is_said(x, tmp_path, caplog):
    session = MonitorSession(model := build(), every_n_train_steps=1, dirpath=tmp_path)
    for step in range(3):
        with session.step(step):
            model(x).square().mean().backward()
        if step == 0:
            session.switch("1", "exact_delta")
    assert session.instrumentation.stabilizers() == {"1": ["none", "none"]}
    session.close()
    events = read_events(tmp_path)
    told = [why for why in events.why if "that changes the keys, centered_keys" in why]
    # No kernel of PyTorch's runs in its place: attention is the user's own.
    assert told and all("PyTorch" not in why for why in told)
    assert any(why.startswith("exact_delta does not run: ") for why in told)
    (facts,) = read_metadata(tmp_path)["sites"].values()
    assert "guardbit.observe shows the inputs of attention" in caplog.text
    assert facts["errors_unavailable"] is not None


def test_outside_of_any_model_nothing_happens():
    q, k, v = torch.randn(3, 1, 2, 9, 16)
    assert all(a is b for a, b in zip(guardbit.observe(q, k, v), (q, k, v), strict=True))


def test_bad_input_is_refused_in_a_sentence():
    q = torch.zeros(1, 2, 9, 16)
    with pytest.raises(TypeError, match="k is a NoneType; it must be a tensor"):
        guardbit.observe(q, None, q)
    with pytest.raises(ValueError, match="causal is 'yes'; it must be False"):
        guardbit.observe(q, q, q, causal="yes")
