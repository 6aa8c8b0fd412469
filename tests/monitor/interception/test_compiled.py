"""Compiled models keep their bits and their graphs."""

import sys
import types
from functools import partial
from itertools import cycle

import pytest
import torch
import torch.nn.functional as F
from functorch.compile import make_boxed_func
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.checkpoint import checkpoint

import guardbit
from guardbit import MonitorSession, Policy, private
from guardbit.kernels.runtime import runtime
from guardbit.monitor.interception import installation
from guardbit.monitor.interception.entry_points import sdpa
from tests.toys import Fires, MultiHead, instrumented


@pytest.mark.slow
def test_the_default_compiler(tiny, instrument):
    # Attention alone: the C++ compiler takes seconds for each kernel around it.
    model = nn.Sequential(tiny.Attention())
    x = torch.randn(2, 12, tiny.WIDTH, generator=torch.Generator().manual_seed(0))
    before = tiny.step(model, x, run=torch.compile(model, fullgraph=True))
    torch._dynamo.reset()
    inst = instrument(model)
    counter = CompileCounterWithBackend("inductor")
    compiled = torch.compile(model, backend=counter, fullgraph=True)
    assert tiny.equal(tiny.step(model, x, run=compiled), before)
    site = inst.sites["0"]
    weight = model[0].qkv.weight
    assert torch.equal(site.query_weights(), weight[:64].view(4, 16, 64))
    assert torch.equal(site.key_weights(), weight[64:128].view(4, 16, 64))
    inst.switch("*", "compensated", heads=[0, 3])
    switched = tiny.step(model, x, run=compiled)
    eager = tiny.step(model, x)
    # Eager and compiled differ in the order of sums; head 0 and 3 are compensated in both.
    for name, value in switched.items():
        torch.testing.assert_close(value, eager[name], rtol=1e-4, atol=1e-5)
    assert site.launches["backward", "compensated"] == 2
    inst.switch("*", "none")
    assert tiny.equal(tiny.step(model, x, run=compiled), before)
    assert counter.frame_count == 1


@pytest.mark.slow
def test_checkpointed_blocks_with_dynamic_shapes(tiny, instrument):
    class Blocks(nn.Sequential):
        checkpoint = partial(checkpoint, use_reentrant=False)  # as transformers keeps it

        def forward(self, x):
            for block in self:
                x = self.checkpoint(block, x)
            return x

    class Omits(tiny.Attention):
        # Given as 0.0, PyTorch makes a symbol of it, which two such blocks cannot share.
        def attend(self, q, k, v):
            return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    model = Blocks(Omits(), Omits())
    batches = [torch.randn(2, length, tiny.WIDTH) for length in (12, 9, 17)]
    plain = torch.compile(model, backend="aot_eager", dynamic=True, fullgraph=True)
    before = [tiny.step(model, x, run=plain) for x in batches]
    torch._dynamo.reset()
    inst = instrument(model)
    watched = torch.compile(model, backend="aot_eager", dynamic=True, fullgraph=True)
    for x, expected in zip(batches, before, strict=True):
        assert tiny.equal(tiny.step(model, x, run=watched), expected)
    assert list(inst.sites) == ["0", "1"]


def test_graphs_of_objects_that_are_gone_are_passed_over(monkeypatch):
    torch.compile(lambda x: x + 1, backend="eager")(torch.ones(2))
    gone = types.SimpleNamespace(code=None)  # as PyTorch leaves it
    listed = []
    _, *others = private.graphs_of
    of_gone = lambda code: listed.append(code) or [gone]  # noqa: E731
    monkeypatch.setattr(private, "graphs_of", (of_gone, *others))
    installation._drop_graphs()
    assert listed


def test_blocks_compiled_one_by_one_share_a_graph(tiny, tokens, instrument):
    model = tiny.GPT(layers=12)
    before = tiny.step(model, tokens)
    inst = instrument(model)
    counter = CompileCounterWithBackend("aot_eager")
    for block in model.h:
        block.compile(backend=counter, fullgraph=True)
    assert tiny.equal(tiny.step(model, tokens), before)
    inst.switch("h.7.attn", "compensated", heads=[2])
    tiny.step(model, tokens)
    assert counter.frame_count == 1  # a recompilation for each would pass the limit of 8
    switched = [n for n, s in inst.sites.items() if ("backward", "compensated") in s.launches]
    assert switched == ["h.7.attn"]
    for index in (0, 11):
        weight = model.h[index].attn.qkv.weight
        assert torch.equal(inst.sites[f"h.{index}.attn"].query_weight(2), weight[32:48])


def test_compiled_modules_of_torch_and_their_refusals(tiny, instrument):
    class Three(nn.Module):
        def __init__(self):
            super().__init__()
            self.plain = MultiHead(need_weights=False)
            self.dropout = MultiHead(need_weights=False, dropout=0.1)
            self.weights = MultiHead()

        def forward(self, x):
            return self.weights(self.dropout(self.plain(x)))

    model, x = Three(), torch.randn(2, 9, 64)
    before = tiny.step(model, x, run=torch.compile(model, backend="aot_eager", fullgraph=True))
    torch._dynamo.reset()
    inst = instrument(model)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    assert tiny.equal(tiny.step(model, x, run=compiled), before)
    refusals = {name: site.calls.refusal for name, site in inst.sites.items()}
    assert list(refusals) == ["plain.attention", "dropout.attention", "weights.attention"]
    assert refusals["plain.attention"] is None
    assert refusals["dropout.attention"] is None
    assert "dropout 0.1" in inst.sites["dropout.attention"].limits.errors_unavailable
    assert inst.sites["plain.attention"].limits.errors_unavailable is None
    assert "need_weights=True" in refusals["weights.attention"]
    assert inst.sites["weights.attention"].num_heads == 4
    weight = model.plain.attention.in_proj_weight
    assert torch.equal(inst.sites["plain.attention"].query_weight(1), weight[16:32])


def test_calls_in_the_graph_are_no_calls_of_the_model(tiny, tokens, instrument):
    """The compiler makes them, with tensors that hold nothing, while the outermost module runs."""

    class Wide(tiny.Attention):  # stays with PyTorch where it is compiled; eager it is watched
        def attend(self, q, k, v):
            return super().attend(q, k, torch.cat((v, v), -1))[..., : tiny.HEAD]

    model, calls = tiny.GPT(layers=1, attention=Wide), []
    before = tiny.step(model, tokens, run=torch.compile(model, backend="aot_eager", fullgraph=True))
    torch._dynamo.reset()
    inst = instrument(model)
    inst.observe(calls.append)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    for _ in range(2):
        assert tiny.equal(tiny.step(model, tokens, run=compiled), before)
    assert list(inst.sites) == ["h.0.attn"]
    site = inst.sites["h.0.attn"]
    assert "in eager runs only" in site.calls.refusal
    assert "another head size" in site.calls.unwatched
    assert site.calls.unwatched.endswith("compiled it is not watched either")
    assert not calls


def test_graph_breaks_inside_attention(tiny, tokens, instrument):
    class Broken(tiny.Attention):
        def forward(self, x):
            y = super().forward(x)
            torch._dynamo.graph_break()
            return y + 0 * x

    model = tiny.GPT(attention=Broken)
    before = tiny.step(model, tokens)
    inst = instrument(model)
    compiled = torch.compile(model, backend="eager")
    for _ in range(2):
        assert tiny.equal(tiny.step(model, tokens, run=compiled), before)
        assert not runtime.running
    assert list(inst.sites) == ["h.0.attn", "h.1.attn"]
    weight = model.h[1].attn.qkv.weight
    assert torch.equal(inst.sites["h.1.attn"].query_weight(0), weight[:16])


def test_a_table_of_the_compiler_that_is_made_anew_still_knows_us(tiny, tokens):
    # As `torch.distributed.init_process_group` does, in a process that compiles afterwards.
    model = tiny.GPT()
    expected = tiny.step(model, tokens)
    with instrumented(model) as inst:
        torch._dynamo.trace_rules.clear_lru_cache()
        compiled = torch.compile(model, backend="eager", fullgraph=True)
        inst.observe(lambda _: None)
        assert tiny.equal(tiny.step(model, tokens, run=compiled), expected)
        assert list(inst.sites) == ["h.0.attn", "h.1.attn"]
    rules = torch._dynamo.trace_rules.get_torch_obj_rule_map()
    assert sdpa.scaled_dot_product_attention not in rules
    assert F.scaled_dot_product_attention in rules


def test_libraries_that_are_looked_for_are_not_compiled(tiny, tokens, instrument, monkeypatch):
    model = tiny.GPT(layers=1)
    instrument(model)
    compiled = torch.compile(model, backend="eager")
    for _ in range(2):  # the first one imports much
        tiny.step(model, tokens, run=compiled)
    frames = torch._dynamo.utils.counters["frames"].copy()
    monkeypatch.setitem(sys.modules, "another", types.ModuleType("another"))
    looked = []
    monkeypatch.setattr(installation.ENTRY_POINTS[-1], "find", lambda: looked.append(True))
    tiny.step(model, tokens, run=compiled)
    assert looked
    assert torch._dynamo.utils.counters["frames"] == frames


def strides_of_gradients(model, x):
    """Strides of dq, dk and dv in the graph of the backward."""
    found = []

    def keep(graph, _):
        for node in graph.graph.nodes:
            if "attention" in str(node.target) and isinstance(node.meta["val"], tuple):
                found.extend(dx.stride() for dx in node.meta["val"][:3])
        return make_boxed_func(graph.forward)

    run = aot_autograd(
        fw_compiler=lambda graph, _: make_boxed_func(graph.forward), bw_compiler=keep
    )
    torch.compile(model, backend=run)(x).sum().backward()
    return found


def test_the_graph_has_gradients_as_pytorch_lays_them_out():
    # Else later sums, as of a bias's gradient, come in another order. Here tokens are outermost.
    torch.manual_seed(0)
    x = torch.randn(2, 24, 64)
    plain, watched = (nn.Sequential(MultiHead(need_weights=False)) for _ in "ab")
    expected = strides_of_gradients(plain, x)
    torch._dynamo.reset()
    with instrumented(watched):
        found = strides_of_gradients(watched, x)
    assert len(found) == 3 and found == expected


def op_runs(site):
    return sum(n for (way, _), n in site.launches.items() if way == "forward")


def test_a_session_has_two_graphs_and_runs_the_op_in_sampled_steps_and_when_switched(tiny, tokens):
    model = tiny.GPT(layers=2)
    expected = tiny.step(model, tokens)
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(model, backend=counter, fullgraph=True)
    session = MonitorSession(model, every_n_train_steps=3)
    site, runs = session.instrumentation.candidates["h.1.attn"], []
    for step in range(12):
        if step == 8:
            session.instrumentation.switch("h.0.attn", "exact_delta", heads=[1])
        session.begin_batch(step)
        before = op_runs(site)
        found = tiny.step(model, tokens, run=compiled)
        runs.append(op_runs(site) - before)
        session.end_step()
        assert step >= 8 or tiny.equal(found, expected)
    # Besides sampled steps 1, 5 and 7 are counted.
    assert runs == [1, 1, 0, 1, 0, 1, 1, 1, 1, 1, 1, 1]
    assert counter.frame_count == 2
    session.close()
    assert not runtime.is_at_rest


def train(session, steps, step_of):
    """Trains a model, and returns what each step gave."""
    found = []
    for step in steps:
        session.begin_batch(step)
        found.append(step_of())
        session.end_step()
    return found


@pytest.mark.parametrize(
    ("stance", "begins", "ends", "runs"),
    [("fail_on_recompile", 3, 8, 2), ("eager_on_recompile", 1, 6, 6)],
)
def test_no_graph_is_made_where_the_user_asked_for_none(
    stance, begins, ends, runs, tiny, tokens, caplog
):
    model, counter = tiny.GPT(layers=1), CompileCounterWithBackend("eager")
    compiled = torch.compile(model, backend=counter)
    session = MonitorSession(model, every_n_train_steps=4)
    site = session.instrumentation.candidates["h.0.attn"]

    step_of = partial(tiny.step, model, tokens, run=compiled)
    train(session, range(begins), step_of)
    graphs = counter.frame_count
    with torch.compiler.set_stance(stance):
        train(session, range(begins, ends), step_of)
    assert counter.frame_count == graphs
    assert op_runs(site) == runs
    is_error = stance == "fail_on_recompile"
    assert caplog.text.count("neither sampled nor switched") == is_error
    session.close()


def test_of_two_watched_models_none_rests(tiny, tokens):
    models = [tiny.GPT(layers=1) for _ in range(2)]
    sessions = [MonitorSession(model, every_n_train_steps=3) for model in models]

    def rests_after(sessions):
        for session, model in zip(sessions, models, strict=False):
            train(session, range(3), partial(tiny.step, model, tokens))
            session.begin_batch(2)
        return runtime.is_at_rest

    assert not rests_after(sessions)
    sessions.pop().close()
    runtime.rest(sessions[0].instrumentation._user, True)
    assert runtime.is_at_rest
    sessions.pop().close()


def test_a_network_that_trains_in_no_sampled_step_is_named(tiny, tokens, caplog):
    turns = nn.ModuleList(tiny.GPT(layers=1) for _ in range(2))
    for model in turns:
        model.compile(backend="eager")
    session = MonitorSession(turns, every_n_train_steps=4)
    turn = cycle(turns)
    train(session, range(33), lambda: tiny.step(next(turn), tokens))
    assert "1.h.0.attn: it was called between samples" in caplog.text
    session.close()


def again(block, x):
    return checkpoint(block, x, use_reentrant=False)


def test_a_session_that_begins_or_ends_within_the_step_of_another(tiny, tokens):
    model, other = (tiny.GPT(layers=1) for _ in range(2))
    expected = tiny.step(model, tokens, wrap=again)
    model.h[0].compile(backend="aot_eager")
    session, second = MonitorSession(model, every_n_train_steps=4), None
    for step in range(8):
        session.begin_batch(step)
        model.zero_grad()
        loss = model(tokens, wrap=again)
        if step == 2:  # at rest
            assert runtime.is_at_rest
            second = MonitorSession(other, every_n_train_steps=4)
        elif step == 6:
            second.close()
        loss.backward()
        found = {name: p.grad for name, p in model.named_parameters()}
        assert tiny.equal({"loss": loss.detach(), **found}, expected)
        session.end_step()
        assert runtime.is_at_rest == (step in (1, 6))
    session.close()


@pytest.mark.parametrize("by_hand", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_switch_reaches_a_forward_that_runs_before_its_step_begins(tiny, tokens, by_hand):
    def train(model):
        rules = [] if by_hand else [Fires("h.0.attn", sample=2)]
        policy = Policy(stabilizer="compensated")
        session = MonitorSession(model, every_n_train_steps=3, rules=rules, policy=policy)
        for step in range(5):
            model.zero_grad()
            # In FP32 a policy leaves heads alone.
            with torch.autocast("cpu", torch.bfloat16):
                loss = model(tokens, wrap=again)
            session.begin_batch(step)
            loss.backward()
            session.end_step()
            if by_hand and step == 3:
                session.switch("h.0.attn", "compensated")
        launches = session.instrumentation.candidates["h.0.attn"].launches
        assert launches["backward", "compensated"] == 1
        session.close()
        return {name: p.grad for name, p in model.named_parameters()}

    model = tiny.GPT(layers=1)
    expected = train(model)
    model.h[0].compile(backend="aot_eager")
    assert tiny.equal(train(model), expected)


@torch._dynamo.config.patch(recompile_limit=1, fail_on_recompile_limit_hit=True)
def test_graphs_stay_within_a_limit_that_leaves_room_for_the_models_own(tiny, tokens):
    model = tiny.GPT(layers=1)
    counter = CompileCounterWithBackend("eager")
    model.h[0].compile(backend=counter)
    expected = tiny.step(model, tokens, wrap=again)
    session = MonitorSession(model, every_n_train_steps=4)
    found = train(session, range(5), partial(tiny.step, model, tokens, wrap=again))
    assert len(found) == 5 and all(tiny.equal(each, expected) for each in found)
    session.close()
    assert torch._dynamo.config.recompile_limit == 1
    assert tiny.equal(tiny.step(model, tokens, wrap=again), expected)
    # Its own, two for the forward and two for its recomputation, and its own once more.
    assert counter.frame_count == 6


def test_a_limit_that_the_user_sets_meanwhile_is_kept(tiny):
    config = torch._dynamo.config
    with config.patch(recompile_limit=4):
        inst = guardbit.instrument(tiny.GPT(layers=1))
        raised = int(config.recompile_limit)
        assert raised > 4
    with config.patch(recompile_limit=raised):
        inst.remove()
        assert config.recompile_limit == raised


def test_a_monitor_that_gives_up_needs_no_graph_where_that_is_an_error(tiny, tokens):
    model = tiny.GPT(layers=1)
    expected = tiny.step(model, tokens)
    compiled = torch.compile(model, backend="eager")
    session = MonitorSession(model, every_n_train_steps=4)

    step_of = partial(tiny.step, model, tokens, run=compiled)
    found = train(session, range(3), step_of)
    with torch.compiler.set_stance("fail_on_recompile"):
        session._contain(RuntimeError("a fault"), "end_step")
        found += train(session, range(3, 6), step_of)
    assert len(found) == 6 and all(tiny.equal(each, expected) for each in found)
    assert session.stages_off
    session.close()
    assert not session.instrumentation._installed
