"""Attention that is the user's own: `observe` and `watch_attention`."""

import io
from typing import NamedTuple

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import guardbit
from guardbit import MonitorSession, read_events, read_run
from guardbit.kernels.spec import AttentionSpec
from guardbit.store import read_metadata
from tests import toys
from tests.oracle import attend
from tests.toys import instrumented

SEEN = torch.ones(9, 9, dtype=torch.bool).tril()


def einsum_attention(q, k, v):
    scores = torch.einsum("bhnd,bhmd->bhnm", q, k) / 4
    p = scores.masked_fill(~SEEN, -torch.inf).softmax(-1)
    return torch.einsum("bhnm,bhmd->bhnd", p, v)


class Core(nn.Module):
    def forward(self, queries, keys, *, values):
        return einsum_attention(queries, keys, values), "more"


class Attention(toys.Attention):
    """`shows` is what is done with q, k and v before attention."""

    def __init__(self, shows=lambda q, k, v: (q, k, v), how=None):
        super().__init__(has_out=False)
        self.core, self.shows, self.how = Core(), shows, how

    def attend(self, q, k, v):
        q, k, v = self.shows(q, k, v)
        return self.core(q, k, values=v)[0]

    def forward(self, x):
        if self.how is None:
            return super().forward(x)
        return checkpoint(super().forward, x, use_reentrant=self.how == "reentrant")


def observes(q, k, v):
    return guardbit.observe(q, k, v, causal=True)


def build(shows=observes, how=None):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 32), Attention(shows, how))


def unseen(q, k, v):
    return q, k, v


def shown(how=None, **options):
    """A model whose core is watched, and how that is taken back."""
    model = build(unseen, how)
    names = {"q": "queries", "k": "keys", "v": "values", "out": 0, "causal": True}
    return model, guardbit.watch_attention(model[1].core, **{**names, **options})


@pytest.fixture
def x():
    return torch.randn(2, 9, 32, generator=torch.Generator().manual_seed(1))


CHECKPOINTS = [None, "reentrant", "not reentrant"]


def test_the_first_sample_has_all_modules(x):
    torch.manual_seed(0)
    model = nn.Sequential(Attention(observes), Attention(unseen), Attention(observes))
    names = {"q": "queries", "k": "keys", "v": "values", "out": 0, "causal": True}
    guardbit.watch_attention(model[1].core, **names)
    session = MonitorSession(model, every_n_train_steps=1, strict=True)
    with session.step(0):
        model(x).square().mean().backward()
    found = {s.site: s.values for s in session.samples if s.indicator == "max_logit"}
    assert list(found) == ["0", "1.core", "2"]
    for module, values in zip(model, found.values(), strict=True):
        q, k, _ = module.project(x)
        scores = (q.double() @ k.double().mT / 4).masked_fill(~SEEN, 0).abs()
        assert values == pytest.approx(scores.amax((0, 2, 3)).tolist(), rel=1e-5)  # FP32
        x = module(x)
    session.close()


class Twice(toys.Attention):
    """Attends twice in one forward, by modules without weights of their own."""

    def __init__(self):
        super().__init__(has_out=False)
        self.cores = nn.ModuleList([Core(), Core()])

    def attend(self, q, k, v):
        return self.cores[1](k, q, values=self.cores[0](q, k, values=v)[0])[0]


@pytest.mark.parametrize("is_first", [True, False], ids=["before", "after"])
def test_watch_attention_comes_before_the_monitor_or_after_it(is_first, x):
    torch.manual_seed(0)
    model = nn.Sequential(Twice())

    def watch():
        for core in model[0].cores:
            guardbit.watch_attention(core, q="queries", k="keys", v="values", out=0, causal=True)

    if is_first:
        watch()
    session = MonitorSession(model, every_n_train_steps=1, strict=True)
    if not is_first:
        watch()
    with session.step(0):
        model(x).square().mean().backward()
    found = {s.site: s.values for s in session.samples if s.indicator == "max_logit"}
    q, k, _ = (y.double() for y in model[0].project(x))
    for site, scores in (("0.cores.0", q @ k.mT), ("0.cores.1", k @ q.mT)):
        largest = (scores / 4).masked_fill(~SEEN, 0).abs().amax((0, 2, 3))
        assert found[site] == pytest.approx(largest.tolist(), rel=1e-5)  # FP32
    session.close()


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")  # in evaluation
@pytest.mark.parametrize("how", CHECKPOINTS)
def test_observe_gives_back_what_it_got_and_is_observed_once(how, x, tiny):
    model, calls = build(how=how), []
    before = tiny.step(model, x)
    with instrumented(model, calls.append) as inst:
        assert tiny.equal(tiny.step(model, x), before)
        (call,) = calls
        site = inst.sites["1"]
        assert (site.entry, site.unwatched, site.refusal) == ("guardbit.observe", None, None)
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
@pytest.mark.parametrize("by", ["observe", "watch_attention"])
def test_the_switch_to_centered_keys(by, how, x, tiny):
    model = build(how=how) if by == "observe" else shown(how)[0]
    before = tiny.step(model, x)
    with instrumented(model) as inst:
        tiny.step(model, x)
        (name,) = inst.sites
        inst.switch("*", "centered_keys", heads=[1])
        keys = []
        handle = model[1].core.register_forward_pre_hook(
            lambda _, args: keys.append(args[1].detach())
        )
        after = tiny.step(model, x)
        handle.remove()
        assert inst.stabilizers() == {name: ["none", "centered_keys"]}
        given = model[1].project(model[0](x))[1].detach()
        assert torch.equal(keys[0][:, 0], given[:, 0])
        # FP32: a few ulps of numbers of size 1.
        expected = given[:, 1] - given[:, 1].double().mean(1, keepdim=True)
        torch.testing.assert_close(keys[0][:, 1].double(), expected, rtol=0, atol=1e-6)
        for parameter, gradient in after.items():
            torch.testing.assert_close(gradient, before[parameter], rtol=1e-4, atol=1e-6)
        inst.switch("*", "none")
        assert tiny.equal(tiny.step(model, x), before)


def test_other_stabilizers_are_said_not_to_run(x, tmp_path):
    session = MonitorSession(model := build(), every_n_train_steps=1, dirpath=tmp_path)
    for step in range(3):
        with session.step(step):
            model(x).square().mean().backward()
        if step == 0:
            session.switch("1", "exact_delta")
    assert session.instrumentation.stabilizers() == {"1": ["none", "none"]}
    session.close()
    events = read_events(tmp_path)
    told = [why for why in events.why if "that change the keys: centered_keys" in why]
    # No kernel of PyTorch's runs in its place: attention is the user's own.
    assert told and all("PyTorch" not in why for why in told)
    assert any(why.startswith("exact_delta does not run, and the heads are not") for why in told)


def by_hand(model, x):
    """Attention in FP64: q, k, v, their output and dQ for the loss of `tiny.step`."""
    x = model[0].double()(x.double())
    q, k, v = model[1].double().project(x)
    q.retain_grad()
    out = attend(q, k, v, AttentionSpec(0.25, "top-left")).out
    out.retain_grad()
    (x + out.transpose(1, 2).flatten(2)).square().mean().backward()
    return q, k, v, out


@pytest.mark.parametrize("fused", [False, True], ids=["written out", "fused"])
@pytest.mark.parametrize("how", CHECKPOINTS)
def test_watch_attention_hears_of_gradients(how, fused, x, tiny):
    (model, take_back), calls = shown(how, fused=fused), []
    before = tiny.step(model, x)
    with instrumented(model, calls.append) as inst:
        assert tiny.equal(tiny.step(model, x), before)
        (call,) = calls
        (site,) = inst.sites.values()
        assert (site.name, site.entry) == ("1.core", "guardbit.watch_attention")
        weight = model[1].qkv.weight
        assert torch.equal(site.query_weights(), weight[:32].view(2, 16, 32))
        take_back()
        tiny.step(model, x)
        assert len(calls) == 1
    q, k, v, out = by_hand(model, x)
    seen = {"q": q, "k": k, "v": v, "d_out": out.grad, "dq": q.grad}
    for name, expected in (seen | ({"out": out} if fused else {})).items():
        # FP32 against FP64, of sums of 32 terms.
        torch.testing.assert_close(
            getattr(call, name).double(), expected.detach(), rtol=1e-4, atol=1e-6
        )
    assert fused or call.out is None


def test_outside_of_any_model_nothing_happens():
    q, k, v = torch.randn(3, 1, 2, 9, 16)
    assert all(a is b for a, b in zip(guardbit.observe(q, k, v), (q, k, v), strict=True))


def test_a_module_may_be_named(x, tiny):
    model = build(lambda q, k, v: guardbit.observe(q, k, v, causal=True, module=model[1].core))
    with instrumented(model) as inst:
        tiny.step(model, x)
        assert list(inst.sites) == ["1.core"]


def test_a_forward_that_fails_leaves_nothing(x, tiny):
    model, _ = shown()
    hooks = model[1].core._forward_pre_hooks.values()
    with instrumented(model, lambda _: None):
        with pytest.raises(RuntimeError):
            model[1].core(torch.zeros(2, 2, 9, 16, requires_grad=True), torch.zeros(2, 2, 9, 16),
                          values=torch.zeros(2, 2, 3, 16))  # fmt: skip
        stacks = [hook.__self__.running for hook in hooks if hasattr(hook.__self__, "running")]
        assert stacks == [[]]
        torch.save(model, io.BytesIO())


def test_bad_input_is_refused_in_a_sentence():
    q = torch.zeros(1, 2, 9, 16)
    with pytest.raises(TypeError, match="k is a NoneType; expected a tensor"):
        guardbit.observe(q, None, q)
    with pytest.raises(ValueError, match="`causal` takes"):
        guardbit.observe(q, q, q, causal="yes")
    with pytest.raises(ValueError, match=r"Core\.forward has no argument 'q'; there are queries"):
        guardbit.watch_attention(Core())
    with pytest.raises(TypeError, match="module is a list"):
        guardbit.watch_attention([])
    with pytest.raises(ValueError, match="layout is 'HNBD'"):
        guardbit.watch_attention(Core(), q="queries", k="keys", v="values", layout="HNBD")


class Pair(NamedTuple):
    out: torch.Tensor
    p: str


class Bare(Core):
    def forward(self, queries, keys, *, values):
        return super().forward(queries, keys, values=values)[0]


class Named(Core):
    def forward(self, queries, keys, *, values):
        return Pair(*super().forward(queries, keys, values=values))


class Merged(Core):
    def forward(self, queries, keys, *, values):
        return einsum_attention(queries, keys, values).transpose(1, 2).flatten(2)


class Half(Core):
    def forward(self, queries, keys=None, *, values):
        return einsum_attention(queries, queries if keys is None else keys, values)


class Other(Attention):
    """Attention whose core returns what `kind` does."""

    def __init__(self, kind):
        super().__init__()
        self.core = kind()

    def attend(self, q, k, v):
        given = (q,) if isinstance(self.core, Half) else (q, k)
        out = self.core(*given, values=v)
        if isinstance(self.core, Named):
            out = out.out
        elif isinstance(out, tuple):
            out, _ = out
        return out if out.dim() == 4 else out.unflatten(-1, (2, 16)).transpose(1, 2)


MISTAKEN = {
    "out is missing": (Core, None, "Core returns 2 values: pass out=0, or the place of"),
    "no tuple": (Bare, 0, "Bare returns one tensor: pass no `out` to watch_attention"),
    "too far": (Core, 2, "Core returns 2 values, and out=2 is none of them"),
    "no tensor": (Core, 1, "Core returns a str at out=1, not attention's output"),
    "other shape": (Merged, None, r"shape (2, 9, 32); attention's output has (2, 2, 9, 16)"),
    "no keys": (Half, None, "Half got a NoneType as keys, not a tensor"),
}


@pytest.mark.parametrize("every", [1, 2], ids=["sampled", "not sampled"])
@pytest.mark.parametrize("case", MISTAKEN)
def test_a_module_unlike_what_was_said_is_refused_alone(case, every, x, tmp_path, caplog, tiny):
    kind, out, why = MISTAKEN[case]
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 32), Attention(), Other(kind))
    before = tiny.step(model, x)
    names = {"q": "queries", "k": "keys", "v": "values", "causal": True}
    guardbit.watch_attention(model[1].core, out=0, **names)
    guardbit.watch_attention(model[2].core, out=out, **names)
    session = MonitorSession(model, every_n_train_steps=every, dirpath=tmp_path, strict=True)
    for step in range(1, 4):
        with session.step(step):
            assert tiny.equal(tiny.step(model, x), before)
    sites = session.instrumentation.sites
    assert sites["1.core"].unwatched is None
    assert why in sites["2.core"].unwatched
    with pytest.raises(ValueError, match=r"2\.core"):
        session.switch("2.core", "centered_keys")
    assert not session.stages_off
    session.close()
    run = read_run(tmp_path)
    assert set(run[run.indicator == "max_logit"].site) == {"1.core"}
    assert why in caplog.text


@pytest.mark.parametrize("kind, out", [(Named, 0), (Core, -2)])
def test_an_output_keeps_its_type_and_may_be_counted_from_the_end(kind, out, x, tiny):
    model, calls = nn.Sequential(nn.Linear(32, 32), Other(kind)), []
    before = tiny.step(model, x)
    guardbit.watch_attention(model[1].core, q="queries", k="keys", v="values", causal=True, out=out)
    with instrumented(model, calls.append):
        assert tiny.equal(tiny.step(model, x), before)
        (call,) = calls
        assert call.d_out is not None


@pytest.mark.parametrize("shown", ["tensors", "module"])
def test_it_is_said_that_errors_cannot_be_seen_from_the_tensors_alone(shown, tmp_path, caplog):
    model = build(observes if shown == "tensors" else unseen)
    if shown == "module":
        guardbit.watch_attention(
            model[1].core, q="queries", k="keys", v="values", out=0, causal=True, scale=0.25
        )
    session = MonitorSession(model, every_n_train_steps=1, dirpath=tmp_path, strict=True)
    for step in range(2):
        with session.step(step):
            model(torch.randn(2, 9, 32)).square().sum().backward()
    session.close()
    (facts,) = read_metadata(tmp_path)["sites"].values()
    told = "guardbit.observe shows the inputs of attention" in caplog.text
    assert told == (facts["errors_unavailable"] is not None) == (shown == "tensors")


def test_nan_that_written_out_attention_makes_is_found_in_its_output(x, tmp_path):
    model = build(unseen)
    guardbit.watch_attention(model[1].core, q="queries", k="keys", v="values", out=0, causal=True)
    with torch.no_grad():
        model[1].qkv.weight.mul_(1e20)  # scores have no room in FP32
    session = MonitorSession(model, every_n_train_steps=1, dirpath=tmp_path)
    with session.step(0):
        model(x).sum().backward()
    session.close()
    (detail,) = read_events(tmp_path).query("kind == 'advisory'").why
    assert "first in O: attention made it" in detail
