"""The audit of modules in a session: what it says, and that it leaves a run as it was."""

import copy
import gc
from collections import Counter
from contextlib import nullcontext
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import guardbit
from guardbit import MonitorSession
from guardbit.layers import audit, call
from guardbit.layers.findings import Findings, Found
from guardbit.monitor import modules
from tests.layers.nets import Net, batch
from tests.toys import Attention

pytestmark = pytest.mark.filterwarnings("ignore:Using `torch.compile")

BF16 = torch.bfloat16


def told(folder):
    """The modules that audits spoke of, and what they said."""
    events = guardbit.read_events(folder)
    found = events[events["rule"] == "module"]
    return list(zip(found["site"], found["why"], strict=True))


def trained(model, steps=6, run=None, lr=1e-2, watch=True, autocast=True, before=None, **how):
    session = None
    if watch:
        session = MonitorSession(model, every_n_train_steps=2, audit_modules=True, **how)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr)
    losses = []
    for step in range(steps):
        with session.step(step) if session else nullcontext():
            with torch.autocast("cpu", BF16, enabled=autocast):
                tokens = batch(step)
                out = (model if run is None else run)(tokens[:, :-1])
            loss = F.cross_entropy(out.float().flatten(0, 1), tokens[:, 1:].flatten())
            loss.backward()
            if before:
                before(step)
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    if session:
        session.close()
    return session, losses


def compiled_in_place(model):
    model.compile(backend="aot_eager", fullgraph=True)
    return model


def compiled_around(model):
    return torch.compile(model, backend="aot_eager", fullgraph=True)


def compiled_as_function(model):
    return torch.compile(lambda tokens: model(tokens), backend="aot_eager", fullgraph=True)


WAYS = {
    "eager": lambda model: model,
    "in place": compiled_in_place,
    "around": compiled_around,
    "function": compiled_as_function,
}


@pytest.mark.parametrize("way", WAYS)
def test_a_run_keeps_its_bits_and_compiles_nothing_more(way):
    def run(watch):
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        torch.manual_seed(0)
        model = Net()
        session, losses = trained(model, run=WAYS[way](model), watch=watch)
        graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
        return session, losses, [*model.state_dict().values(), torch.rand(3)], graphs

    session, losses, weights, graphs = run(watch=True)
    _, plain_losses, plain_weights, plain_graphs = run(watch=False)
    assert losses == plain_losses
    assert all(map(torch.equal, weights, plain_weights))
    assert graphs == plain_graphs
    audited = {row.module for row in session.modules}
    # What is compiled with code around the model is not looked into.
    assert bool(audited) == (way != "function")
    assert ("" in session._modules.findings.unmeasured) == (way == "function")


@pytest.mark.parametrize("way", ["eager", "in place", "around"])
def test_what_is_too_large_beside_the_activations_is_audited_before_the_update(monkeypatch, way):
    """The numbers are the same then, and the run keeps its bits."""

    def run(most, **how):
        torch._dynamo.reset()
        torch.manual_seed(0)
        model = Net()
        # So many bytes hold the smallest modules only; blocks and the model have to wait.
        monkeypatch.setattr(call, "MOST_BYTES", most)
        session, _ = trained(model, steps=3, run=WAYS[way](model), **how)
        return session, [*model.state_dict().values()]

    session, weights = run(1 << 28)
    late, late_weights = run(40_000)
    _, plain_weights = run(40_000, watch=False)
    assert {row.module for row in late.modules} == {row.module for row in session.modules}
    assert sorted(late.modules) == sorted(session.modules)
    assert all(map(torch.equal, late_weights, plain_weights))
    assert all(map(torch.equal, weights, plain_weights))


def test_what_waits_is_not_run_with_weights_that_have_changed(monkeypatch):
    """An update of one's own, which no hook announces."""
    monkeypatch.setattr(call, "MOST_BYTES", 0)
    model = Net()
    session = MonitorSession(model, every_n_train_steps=1, audit_modules=True)
    for step in range(3):
        with session.step(step):
            model(batch(step)).float().square().mean().backward()
            with torch.no_grad():
                for weight in model.parameters():
                    weight.sub_(weight.grad)
    session.close()
    assert {row.module for row in session.modules} == {"blocks.0.act", "blocks.1.act"}
    assert "takes over" in session._modules.findings.unmeasured["head"]


@pytest.mark.parametrize("way", ["in place", "around"])
def test_modules_inside_compiled_ones_are_audited(way):
    torch._dynamo.reset()
    model = Net()
    session, _ = trained(model, steps=3, run=WAYS[way](model))
    assert {row.module for row in session.modules} >= {"", "embed", "blocks.0", "blocks.1.up"}


def test_the_first_sample_audits_all_modules_and_later_ones_some_in_turn(monkeypatch):
    monkeypatch.setattr(modules, "A_TURN", 2)
    model = Net()
    session = MonitorSession(model, every_n_train_steps=1, audit_modules=True)
    audited = []
    for step in range(4):
        with session.step(step):
            model(batch(step)).float().square().mean().backward()
        audited.append({row.module for row in session.modules})
    named = [name for name, part in model.named_modules() if not isinstance(part, nn.ModuleList)]
    assert not audited[0]  # the first step is left alone
    assert audited[1] == set(named)
    assert audited[2:] == [set(named[:2]), set(named[2:4])]
    session.close()


@pytest.mark.parametrize("way", [lambda model: model, compiled_around])
def test_turns_take_a_small_share_of_the_time(way, monkeypatch):
    torch._dynamo.reset()
    clock, turns, one_audit = 0.0, {}, audit.audit

    def slow(call, *args):
        nonlocal clock
        turns.setdefault(step, []).append(clock)
        clock += 1.0
        return one_audit(call, *args)

    monkeypatch.setattr(audit, "audit", slow)
    monkeypatch.setattr(modules, "time", SimpleNamespace(perf_counter=lambda: clock))
    monkeypatch.setattr(modules, "SHARE", 0.01)
    monkeypatch.setattr(modules, "A_TURN", 4)
    model = Net()
    run = way(model)
    session = MonitorSession(model, every_n_train_steps=1, audit_modules=True)
    for step in range(40):
        clock += 100.0
        with session.step(step):
            run(batch(step)).float().square().mean().backward()
    session.close()
    assert [len(times) for times in turns.values()][:4] == [13, 4, 4, 4]
    for before, after in pairwise(turns.values()):
        # As soon as 4 s are a hundredth; steps are 100 s apart.
        assert 400 <= after[0] - before[0] < 520


@pytest.mark.parametrize("is_on", [True, False])
@pytest.mark.parametrize("is_compiled", [False, True])
def test_audits_leave_attributes_and_the_collector_as_they_were(is_compiled, is_on):
    torch._dynamo.reset()
    model, collects = Net(), []
    head = model.head.forward

    def forward(x):
        if not torch.compiler.is_compiling():  # then only audits come here
            collects.append(gc.isenabled())
            model.head.calls = getattr(model.head, "calls", 0) + 1
        return head(x)

    model.head.forward = forward
    try:
        (gc.enable if is_on else gc.disable)()
        trained(model, steps=9, run=compiled_around(model) if is_compiled else None)
        assert gc.isenabled() == is_on
    finally:
        gc.enable()
    own = 0 if is_compiled else 9
    assert getattr(model.head, "calls", 0) == own < len(collects)
    assert collects.count(True) == own * is_on


def test_modules_inside_a_compiled_one_are_audited_once_a_turn(monkeypatch):
    """Not in every repetition around them."""
    audits, one_audit = Counter(), audit.audit
    monkeypatch.setattr(
        audit, "audit", lambda call, *args: audits.update([call.module]) or one_audit(call, *args)
    )
    torch._dynamo.reset()
    model = Net()
    run, audited = compiled_around(model), {}
    session = MonitorSession(model, every_n_train_steps=1, audit_modules=True)
    for step in range(4):
        with session.step(step):
            run(batch(step)).float().square().mean().backward()
        audited[step] = {row.module for row in session.modules if row.step == step}
    session.close()
    assert audited[0] == set() and audited[1] == audited[2] == audited[3]
    assert {*audits.values()} == {3}
    assert {"", "embed", "blocks.1.up"} < audited[1]


def test_audit_asks_for_all_modules_at_the_next_step_only(monkeypatch):
    monkeypatch.setattr(modules, "SHARE", 0.0)  # it may take any time
    model = Net()
    session = MonitorSession(model, every_n_train_steps=100)
    audited = []
    for step in range(4):
        if step == 2:
            session.audit()
        with session.step(step):
            model(batch(step)).float().square().mean().backward()
        audited.append({row.step for row in session.modules})
    assert audited == [set(), set(), {2}, {2}]
    excess = [row.excess for row in session.modules]
    assert excess == sorted(excess, reverse=True)
    session.close()


class Shrunk(torch.autograd.Function):
    """x, whose gradient is taken times .8."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return 0.8 * gradient


class ShrunkLinear(nn.Linear):
    def forward(self, x):
        return Shrunk.apply(super().forward(x))


class ShrunkGELU(nn.Module):
    def forward(self, x):
        return Shrunk.apply(F.gelu(x))


def test_a_wrong_backward_is_named_once_in_the_innermost_module(tmp_path):
    torch.manual_seed(0)
    model = Net()
    model.blocks[1].act = ShrunkGELU()
    trained(model, steps=12, dirpath=tmp_path)
    ((module, why),) = told(tmp_path)
    assert module == "blocks.1.act"
    assert why.startswith(
        "the backward does not fit its forward: the gradient of the input is -20.0%"
    )


def test_gradients_off_at_one_step_are_told_as_the_backward_comes_to_them():
    events = []
    findings = Findings(nn.Sequential(*(nn.Linear(4, 4) for _ in range(4))), events.append)
    tensors = ["input", "output", "weight", "input"]
    off = torch.tensor(0.5)
    found = [Found(str(i), "linear", tensors[i], "relative_error", off) for i in range(4)]
    for step in range(2):
        findings.add(step, found, [0.5] * 4)
    assert [event.site for event in events] == ["1", "3", "2", "0"]


def test_weights_neither_take_a_suspicion_off_nor_have_modules_audited():
    events, number = [], torch.tensor(0.0)
    findings = Findings(nn.Sequential(nn.Linear(4, 4)), events.append)
    off = Found("0", "linear", "output", "gain", number)
    lost = Found("0", "optimizer", "weight", "gain", number)
    findings.add(0, [lost], [-0.9])
    assert findings.doubts == {True}
    for step, found, value in ((1, off, 0.5), (2, lost, 0.0), (3, off, 0.5)):
        findings.add(step, [found], [value])
    assert findings.doubts == {True, False} and [event.step for event in events] == [3]


def test_a_class_derived_from_pytorchs_is_compared_with_that(tmp_path):
    torch.manual_seed(0)
    model = Net()
    model.blocks[1].up = ShrunkLinear(32, 64)
    trained(model, steps=12, dirpath=tmp_path)
    ((module, why),) = told(tmp_path)
    assert module == "blocks.1.up"
    assert why.startswith("the gradient of ") and "20.0" in why


def test_one_finding_is_not_told(tmp_path):
    torch.manual_seed(0)
    model = Net()
    model.blocks[1].up = ShrunkLinear(32, 64)
    session, _ = trained(model, steps=3, dirpath=tmp_path)  # of which one is audited
    assert told(tmp_path) == []
    assert max(row.excess for row in session.modules) > 5


@pytest.mark.parametrize(("lr", "low", "high"), [(1e-6, 0.9, 1.0), (3e-2, -0.1, 0.1)])
def test_rounding_takes_small_updates_of_bf16_weights(lr, low, high):
    torch.manual_seed(0)
    model = Net().to(BF16)
    weight, changes = model.blocks[0].up.weight, []
    exact = None

    def before(step):
        # AdamW's first step by hand: lr times the sign, and the decay.
        nonlocal exact
        if step == 0:
            exact = -lr * (weight.grad.double().sign() + 0.01 * weight.detach().double())
            changes.append(weight.detach().double())

    session = MonitorSession(model, every_n_train_steps=1, audit_modules=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr)
    with session.step(0):  # the first step is never audited
        pass
    with session.step(1):
        model(batch(0)).float().square().mean().backward()
        before(0)
        optimizer.step()
    real = weight.detach().double() - changes[0]
    share = 1 - (real * exact).sum() / exact.square().sum()
    (row,) = [
        row for row in session.modules
        if (row.tensor, row.statistic) == ("blocks.0.up.weight", "gain")
    ]  # fmt: skip
    # Adam's eps, in FP32, and elements whose gradient is 0 make the difference.
    assert -row.value == pytest.approx(share.item(), abs=0.02)
    assert low <= share <= high
    session.close()


def test_fp32_weights_lose_nothing():
    session, _ = trained(Net(), steps=3)
    assert not [row for row in session.modules if row.kind == "optimizer"]


def test_a_layer_that_begins_or_is_trained_unlike_the_others_is_named(tmp_path):
    model = Net(layers=5)
    with torch.no_grad():
        model.blocks[3].up.weight.mul_(30)
    model.blocks[1].down.weight.requires_grad_(False)
    trained(model, steps=3, dirpath=tmp_path)
    assert sorted([module for module, _ in told(tmp_path)]) == ["blocks.1.down", "blocks.3.up"]


@pytest.mark.parametrize("stabilizer", ["none", "exact_delta"])
def test_attention_of_one_kernel_alone_is_audited_and_still_watched(stabilizer):
    torch.manual_seed(0)
    model = nn.Sequential(Attention(), Attention()).to(BF16)
    policy = None if stabilizer == "none" else guardbit.Policy(stabilizer, always=True)
    session = MonitorSession(
        model, every_n_train_steps=1, audit_modules=True, policy=policy, strict=True
    )
    for step in range(3):
        # No kernel of FlashAttention's takes FP32.
        with session.step(step), sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            x = torch.randn(2, 8, 32, generator=torch.Generator().manual_seed(step)).to(BF16)
            model(x).float().square().mean().backward()
        if step == 1:
            assert {row.module for row in session.modules} >= {"0", "1", "0.qkv"}
            assert {sample.indicator for sample in session.samples} >= {"delta_bias", "max_logit"}
    assert not session.stages_off
    session.close()


def test_dropout_and_evaluation_are_not_measured():
    model = Net()
    model.blocks[0].act = nn.Sequential(nn.GELU(), nn.Dropout(0.5))
    session, _ = trained(model, steps=3)
    assert "does not repeat itself" in session._modules.findings.unmeasured["blocks.0"]
    assert "blocks.1" in {row.module for row in session.modules}


def test_a_copy_within_a_step_has_no_hooks_of_ours():
    model = Net()
    session = MonitorSession(model, every_n_train_steps=1, audit_modules=True)
    for step in range(2):
        with session.step(step):
            model(batch(step)).float().square().mean().backward()
            made = copy.deepcopy(model)
    with torch.no_grad():
        assert torch.equal(made(batch(3)), model(batch(3)))
    assert all(
        "modules" not in str(getattr(hook, "_function", ""))
        for part in made.modules()
        for hook in (*part._forward_hooks.values(), *part._forward_pre_hooks.values())
    )
    session.close()
    assert [hook for part in model.modules() for hook in part._forward_hooks.values()] == []


class Reaching(nn.Module):
    """Reaches a tensor of the run's own graph, and a weight, past its arguments."""

    def __init__(self):
        super().__init__()
        self.line, self.context, self.held = nn.Linear(32, 32), None, []

    def forward(self, x):
        return self.line(x) + self.context + x * self.held[0].sum()


class Outer(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.inner = nn.Linear(32, 32), Reaching()
        self.inner.held.append(self.first.weight)
        self.inner.compile(backend="aot_eager")

    def forward(self, x):
        self.inner.context = self.first(x).sin()
        return self.inner(x)


def test_the_runs_own_graph_and_gradients_are_left_alone():
    def run(watch):
        torch._dynamo.reset()
        torch.manual_seed(0)
        model = Outer()
        session = MonitorSession(model, every_n_train_steps=1, audit_modules=watch)
        for step in range(3):
            with session.step(step):
                model(torch.randn(4, 32)).square().mean().backward()
        session.close()
        return [parameter.grad for parameter in model.parameters()]

    assert all(map(torch.equal, run(True), run(False)))


class Noisy(torch.optim.SGD):
    """Draws random numbers in its step."""

    def step(self, closure=None):
        super().step(closure)
        for group in self.param_groups:
            for weight in group["params"]:
                weight.data.add_(torch.randn_like(weight) * 1e-3)


def test_an_optimizer_of_ones_own_is_left_alone():
    def run(watch):
        torch.manual_seed(0)
        model = Net().to(BF16)
        session = MonitorSession(model, every_n_train_steps=1, audit_modules=watch)
        optimizer = Noisy(model.parameters(), 1e-3)
        for step in range(3):
            with session.step(step):
                model(batch(step)).float().square().mean().backward()
                optimizer.step()
        session.close()
        return [*model.parameters(), torch.rand(2)]

    assert all(map(torch.equal, run(True), run(False)))


class Wrapped(nn.Module):
    """A module of the name that wrappers' names leave: as of activation checkpointing."""

    def __init__(self, inner):
        super().__init__()
        self._checkpoint_wrapped_module = inner

    def forward(self, x):
        return self._checkpoint_wrapped_module(x)


def test_a_compiled_module_in_a_wrapper_is_audited():
    torch._dynamo.reset()
    model = Net()
    model.blocks[1] = Wrapped(model.blocks[1])
    model.blocks[1]._checkpoint_wrapped_module.compile(backend="aot_eager")
    session, _ = trained(model, steps=3)
    assert {row.module for row in session.modules} >= {"blocks.1", "blocks.1.up"}


def test_what_does_not_repeat_itself_does_not_count_as_audited(caplog):
    model = Net()
    model.blocks[0].act = nn.Sequential(nn.GELU(), nn.Dropout(0.5))
    with caplog.at_level("INFO", "guardbit"):
        session, _ = trained(model, steps=3)
    (said,) = [line for line in caplog.messages if line.startswith("GuardBit audits")]
    audited = {row.module for row in session.modules if row.kind != "optimizer"}
    assert said.startswith(f"GuardBit audits {len(audited)} modules")
    assert "does not repeat itself" in said


@pytest.mark.parametrize("backwards", [1, 2, 32])
def test_sums_of_gradients_in_bf16_are_compared_with_fp32(tmp_path, backwards):
    torch.manual_seed(0)
    model = Net().to(BF16)
    weight, given = model.blocks[0].up.weight, []
    handle = weight.register_hook(lambda gradient: given.append(gradient.double()))
    session = MonitorSession(model, every_n_train_steps=1, audit_modules=True, dirpath=tmp_path)
    for step in range(20):
        given.clear()
        with session.step(step):
            for micro in range(backwards):
                model(batch(100 * step + micro)).float().square().mean().backward()
            grad = weight.grad.double()
            model.zero_grad()
        rows = [row for row in session.modules if row.kind == "accumulation"]
        for row in rows:
            if row.tensor == "blocks.0.up.weight":
                exact = sum(given)
                error = ((grad - exact).norm() / exact.norm()).item()
                assert row.value == pytest.approx(error, rel=1e-3)  # FP32 sums of FP64's
        assert bool(rows) == (backwards > 1 and step > 0)
    handle.remove()
    session.close()
    said = [why for _, why in told(tmp_path) if why.startswith("adding up gradients")]
    assert len(said) == (backwards > 2)


class Forgotten(nn.GELU):
    def forward(self, x):
        return F.dropout(super().forward(x))


@pytest.mark.parametrize("where", [[2], [1, 2], [0, 1, 2, 3]])
def test_dropout_in_one_of_several_like_modules_is_named(tmp_path, where):
    torch.manual_seed(0)
    model = Net(layers=4)
    for index in range(4):
        model.blocks[index].act = Forgotten() if index in where else nn.GELU()
    trained(model, steps=8, dirpath=tmp_path)
    assert [module for module, _ in told(tmp_path)] == (["blocks.2.act"] if where == [2] else [])


def test_a_model_without_attention_is_refused_by_guards_alone():
    transformers = pytest.importorskip("transformers")
    sizes = {"num_channels": 3, "depths": [1], "hidden_sizes": [8], "num_stages": 1}
    model = transformers.ConvNextModel(transformers.ConvNextConfig(**sizes))
    for how in ({}, {"audit_modules": True, "policy": guardbit.Policy("exact_delta")}):
        with pytest.raises(ValueError, match="attention"):
            MonitorSession(model, **how)
    session = MonitorSession(model, every_n_train_steps=1, audit_modules=True)
    for step in range(2):
        with session.step(step):
            model(torch.randn(2, 3, 32, 32)).last_hidden_state.square().mean().backward()
    assert "encoder.stages.0.layers.0" in {row.module for row in session.modules}
    session.close()


def test_weights_that_are_not_finite_have_no_peers(tmp_path):
    model = Net(layers=5)
    with torch.no_grad():
        for block in model.blocks:
            block.up.weight.fill_(torch.nan)
    trained(model, steps=3, dirpath=tmp_path)
    assert not [why for _, why in told(tmp_path) if "others like it" in why]


def test_the_headline_says_what_audits_of_modules_found(tmp_path):
    torch.manual_seed(0)
    model = Net()
    model.blocks[1].act = ShrunkGELU()
    session, _ = trained(model, steps=12, dirpath=tmp_path)
    ((module, why),) = told(tmp_path)
    judgement = session.judgement
    assert judgement.headline.startswith(f"Warning: {module}: {why}")
    assert judgement.advice.startswith("Look at the module that is named.")


class Cut(nn.Linear):
    def forward(self, x):
        return super().forward(x).detach()


def test_a_layer_that_gets_no_gradient_is_named(tmp_path):
    model = Net(layers=5)
    model.blocks[2].down.__class__ = Cut
    model.blocks[4].up.weight.requires_grad_(False)
    trained(model, steps=3, dirpath=tmp_path)
    assert sorted(told(tmp_path)) == [
        ("blocks.2.down", "blocks.2.down.weight gets no gradient; the others like it do"),
        ("blocks.2.up", "blocks.2.up.weight gets no gradient; the others like it do"),
        ("blocks.4.up", "blocks.4.up.weight is not trained; the others like it are"),
    ]
