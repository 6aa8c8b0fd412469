"""`MonitorSession` in plain loops: the steps it samples, what it costs, and what it survives."""

import json
import logging
import textwrap
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import pandas as pd
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from guardbit import MonitorSession, read_events, read_run
from guardbit.catalog import HEAD_INDICATORS, OCCASIONAL, of_probe
from guardbit.kernels import dispatch
from guardbit.kernels.runtime import runtime
from guardbit.monitor import journal
from guardbit.monitor import session as session_module
from guardbit.monitor.detectors import Finding
from guardbit.monitor.measure import measurement, metric, weights
from guardbit.monitor.policy import Policy
from guardbit.monitor.replay import normalised_sites, replay
from guardbit.monitor.transfer import Transfer
from guardbit.records import Event, Role
from guardbit.store import RunWriter, is_run, read_metadata
from tests.callbacks.several_ranks import launch

SITES = ["layers.0", "layers.1"]


class Attention(nn.Module):
    masked: ClassVar = {"is_causal": True}

    def __init__(self, heads=2, kv_heads=2):
        super().__init__()
        self.heads, self.kv_heads = heads, kv_heads
        self.q_proj = nn.Linear(32, 16 * heads, bias=False)
        self.k_proj = nn.Linear(32, 16 * kv_heads, bias=False)
        self.v_proj = nn.Linear(32, 16 * kv_heads, bias=False)
        self.o_proj = nn.Linear(16 * heads, 32, bias=False)

    def forward(self, x):
        split = lambda y, heads: y.unflatten(-1, (heads, 16)).transpose(1, 2)  # noqa: E731
        q = split(self.q_proj(x), self.heads)
        k, v = (split(p(x), self.kv_heads) for p in (self.k_proj, self.v_proj))
        y = F.scaled_dot_product_attention(q, k, v, enable_gqa=True, **self.masked)
        return x + self.o_proj(y.transpose(1, 2).flatten(2))


class Model(nn.Module):
    """Two attention layers, the second with twice the heads and grouped keys."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([Attention(), Attention(4, 2)])

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


@pytest.fixture(autouse=True)
def loops_are_closed():
    yield
    while Loop.made:
        Loop.made.pop().session.instrumentation.remove()


class Loop:
    """A model, an optimizer, and data that depend on the step only."""

    made: ClassVar[list["Loop"]] = []

    def __init__(self, **settings):
        torch.manual_seed(0)
        self.model = Model().bfloat16()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.session = MonitorSession(self.model, **settings)
        self.losses = {}
        self.made.append(self)

    def backward(self, step, scale=1.0):
        x = torch.randn(2, 12, 32, generator=torch.Generator().manual_seed(step)).bfloat16()
        loss = self.model(x).float().square().mean()
        (loss * scale).backward()
        self.losses[step] = loss.item()
        return loss

    def run(self, steps, close=True):
        for step in steps:
            with self.session.step(step) as record:
                self.optimizer.zero_grad()
                loss = self.backward(step)
                self.optimizer.step()
                record.loss(loss)
        if close:
            self.session.close()
        return self


def full_disk(*_):
    raise OSError(28, "No space left on device")


def values(path, indicator, site=""):
    frame = read_run(path)
    rows = frame[(frame.indicator == indicator) & (frame.site == site)]
    return dict(zip(rows.step.tolist(), rows.value.tolist(), strict=True))


def events_of(path, kind):
    events = read_events(path)
    return events[events.kind == kind]


def sampled(path):
    frame = read_run(path)
    return sorted(set(frame[frame.indicator == "max_logit"].step))


# --- steps ---------------------------------------------------------------------------------------


def test_a_plain_loop_records_every_loss_and_the_sampled_steps(tmp_path):
    loop = Loop(every_n_train_steps=3, dirpath=tmp_path, strict=True).run(range(8))
    assert values(tmp_path, "loss") == loop.losses
    assert sampled(tmp_path) == [0, 3, 6]
    frame = read_run(tmp_path)
    for site, layer, heads in ((SITES[0], 0, 2), (SITES[1], 1, 4)):
        rows = frame[(frame.site == site) & (frame.step == 3)]
        assert set(rows.layer) == {layer}
        for indicator in set(HEAD_INDICATORS) - OCCASIONAL - set(of_probe("gradient_audit")):
            assert rows[rows.indicator == indicator]["head"].tolist() == list(range(heads))


@pytest.mark.parametrize(
    "steps, expected",
    [
        (range(7, 16), [10, 15]),  # resumed between two samples
        (range(0, 20, 2), [0, 6, 10, 16]),  # two optimizers count
        ([0, 1, 4, 11, 12, 23], [0, 11, 23]),  # uneven jumps
        ([0, 0, 1, 2, 5], [0, 5]),
    ],
)
def test_the_first_step_at_or_after_each_multiple_is_sampled(tmp_path, steps, expected):
    Loop(every_n_train_steps=5, dirpath=tmp_path, strict=True).run(steps)
    assert sampled(tmp_path) == expected


def test_micro_batches_of_a_step_add_up(tmp_path):
    loop = Loop(every_n_train_steps=2, dirpath=tmp_path / "many", strict=True)
    offsets, losses = [], []
    for part in range(3):
        loop.session.begin_batch(4)
        offsets.append(runtime.random_offset)
        losses.append(loop.backward(part, scale=1 / 3))
        loop.session.loss(losses[-1].detach() / 3, factor=3)
    loop.session.end_step()
    loop.session.close()
    assert len(set(offsets)) == 3, "stochastic rounding must not repeat itself"
    total = 0.0
    for part in range(3):
        alone = Loop(every_n_train_steps=2, dirpath=tmp_path / f"{part}", strict=True)
        with alone.session.step(4):
            alone.backward(part, scale=1 / 3)
        alone.session.close()
        total += values(tmp_path / f"{part}", "delta_bias_abs", SITES[0])[4]
    # By layer 0's head with the highest number: the table keeps one value a step.
    assert values(tmp_path / "many", "delta_bias_abs", SITES[0])[4] == pytest.approx(total)
    expected = sum(loss.item() for loss in losses) / 3
    assert values(tmp_path / "many", "loss")[4] == pytest.approx(expected, rel=1e-6)


def test_random_offsets_depend_on_step_and_micro_batch_only():
    seen = {}
    for _ in range(2):
        loop = Loop(every_n_train_steps=100)
        for step in (3, 4, 2**21 + 5):
            for micro_batch in range(2):
                loop.session.begin_batch(step)
                offset = runtime.random_offset
                assert seen.setdefault((step, micro_batch), offset) == offset
                assert 0 <= offset < 2**63
            loop.session.end_step()
        loop.session.close()
    # The kernels take the offset modulo 2^32.
    assert len({offset % 2**32 for offset in seen.values()}) == len(seen)


def test_an_error_inside_a_step_goes_its_way_and_the_step_can_begin_again(tmp_path):
    loop = Loop(every_n_train_steps=2, dirpath=tmp_path / "retried", strict=True)
    loop.run([0, 1], close=False)
    with pytest.raises(ZeroDivisionError), loop.session.step(2) as record:
        record.loss(loop.backward(99))
        raise ZeroDivisionError
    assert not loop.session.is_sampled
    sites = loop.session.instrumentation.sites.values()
    assert [runtime.site(site.number).observer for site in sites] == [None, None]
    loop.run([2, 3])
    Loop(every_n_train_steps=2, dirpath=tmp_path / "clean", strict=True).run(range(4))
    pd.testing.assert_frame_equal(read_run(tmp_path / "retried"), read_run(tmp_path / "clean"))


def test_closing_twice_and_going_on_without_a_store(tmp_path):
    loop = Loop(every_n_train_steps=1, strict=True).run(range(3))
    loop.session.close()
    assert loop.session.scalars["max_logit"] > 0
    MonitorSession(loop.model).close()


# --- cost of the steps that are not sampled ------------------------------------------------------


class Operations(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.names.append(function.overloadpacket._qualified_op_name)
        return function(*args, **(kwargs or {}))


def test_steps_that_are_not_sampled_run_no_kernel(tmp_path):
    loop = Loop(every_n_train_steps=3, dirpath=tmp_path, strict=True)
    loop.run(range(4), close=False)
    files = sorted(tmp_path.iterdir())
    for step in (4, 5):
        with Operations() as operations:
            loop.session.begin_batch(step)
        assert operations.names == []
        state = runtime.site(next(iter(loop.session.instrumentation.sites.values())).number)
        assert state.observer is None
        loss = loop.backward(step)
        with Operations() as operations:
            loop.session.loss(loss)
            loop.session.loss(loss.detach(), factor=4)
            loop.session.grad_norm(loss)
            assert loop.session.end_step() == []
        # Views launch nothing.
        assert set(operations.names) <= {"aten::detach", "aten::view", "aten::alias"}
    assert sorted(tmp_path.iterdir()) == files, "nothing is written either"
    loop.session.begin_batch(6)
    with Operations() as operations:
        loop.backward(6)
        loop.session.end_step()
    assert "aten::bmm" in operations.names, "the count must see what a sampled step does"


def operations_of_step(loop, step):
    with Operations() as operations:
        loop.backward(step)
    # Reads a number on the host: of a site, and the loss.
    return [name for name in operations.names if name != "aten::_local_scalar_dense"]


def test_steps_that_are_not_sampled_run_what_an_unwatched_model_runs():
    loop = Loop(every_n_train_steps=4, strict=True)
    loop.run([0, 1], close=False)
    instrumentation = loop.session.instrumentation
    with loop.session.step(2):
        unsampled = operations_of_step(loop, 2)
    instrumentation.switch("layers.0", "row_max", heads=[1])
    with loop.session.step(3):
        switched = operations_of_step(loop, 3)
    instrumentation.switch("layers.0", "none")
    with loop.session.step(4):
        sampled = operations_of_step(loop, 4)
    with loop.session.step(5):
        given_back = operations_of_step(loop, 5)
    loop.session.close()
    assert unsampled == given_back == operations_of_step(loop, 6)
    through_the_op = [
        names.count("guardbit::attention") for names in (unsampled, switched, sampled)
    ]
    assert through_the_op == [0, 1, 2]


@pytest.mark.parametrize("settings", [{}, {"indicators": ["w_q_spectral_norm"]}], ids=str)
@pytest.mark.parametrize("first", [0, 1])
def test_a_forward_and_its_recomputation_are_alike(monkeypatch, first, settings):
    def checkpointed(self, x):
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False)  # says if they are not
        return x

    monkeypatch.setattr(Model, "forward", checkpointed)
    unwatched = Loop()
    unwatched.session.close()
    loop = Loop(every_n_train_steps=3, strict=True, **settings)
    for each in (unwatched, loop):
        each.run(range(first, first + 5), close=False)
    assert all(map(torch.equal, loop.model.parameters(), unwatched.model.parameters()))
    loop.session.instrumentation.switch("layers.1", "row_max")
    site = loop.session.instrumentation.sites["layers.1"]
    backwards = site.launches.get(("backward", "FLASH_ATTENTION"), 0)
    loop.run(range(first + 5, first + 9), close=False)
    # Each backward, which is that of PyTorch's kernel for all heads, recomputes its forward.
    assert site.launches["forward", "row_max"] == 8
    assert site.launches["backward", "FLASH_ATTENTION"] - backwards == 4


def test_a_call_with_other_heads_gives_no_switched_head_back():
    loop = Loop(every_n_train_steps=100, strict=True)
    loop.run([0], close=False)
    loop.session.instrumentation.switch("layers.0", "row_max", heads=[1])
    layer, site = loop.model.layers[0], loop.session.instrumentation.sites["layers.0"]
    for step, heads in enumerate([2, 1, 2, 2], start=1):
        layer.o_proj.forward = lambda y: y.new_zeros(*y.shape[:2], 32)
        for projection in (layer.q_proj, layer.k_proj, layer.v_proj):
            projection.forward = lambda x, width=16 * heads: x[..., :width]
        layer.heads = layer.kv_heads = heads
        loop.run([step], close=False)
    assert site.launches["forward", "row_max"] == 3


def test_a_forward_before_its_step_begins_is_seen(tmp_path):
    loop = Loop(every_n_train_steps=3, dirpath=tmp_path, strict=True)
    for step in range(7):
        loss = loop.model(torch.ones(1, 3, 32).bfloat16()).float().square().mean()
        with loop.session.step(step):
            loss.backward()
    loop.session.close()
    assert sampled(tmp_path) == [0, 3, 6]


def test_a_sampled_step_reads_the_device_once(monkeypatch, tmp_path):
    transfers = []
    loop = Loop(every_n_train_steps=3, dirpath=tmp_path, strict=True)
    loop.run(range(3), close=False)  # by now the layouts of the weights are known
    original = torch.Tensor.cpu
    monkeypatch.setattr(
        torch.Tensor, "cpu", lambda self: transfers.append(self.shape) or original(self)
    )
    with loop.session.step(3) as record:
        record.loss(loop.backward(3))
        record.grad_norm(torch.ones(()))
        with Operations() as operations:
            pass
    (shape,) = transfers
    heads = 2 + 4
    # Fourteen columns of every head (the running sums are added on the host), losses of steps
    # 1 to 3, the gradient norm.
    assert shape == (14 * heads + 3 + 1,)
    assert operations.names == []


# --- acting and remembering ----------------------------------------------------------------------


@dataclass(frozen=True)
class Always:
    """Names head 1 of the second layer at every sample, as soon as it has seen `after`."""

    after: int = 0
    name: str = "always"

    def examine(self, frame, state):
        state["seen"] = state.get("seen", 0) + 1
        due = state["seen"] > self.after and SITES[1] in frame.of("max_logit")
        return [Finding(SITES[1], (1,), "it always does")] if due else []


@pytest.mark.parametrize("stabilizer", ["stochastic", "exact_delta", "centered_keys"])
def test_the_state_resumes_the_run_to_the_bit(tmp_path, stabilizer):
    settings = {"every_n_train_steps": 3, "rules": (Always(2),), "strict": True}

    def loop(folder):
        return Loop(dirpath=tmp_path / folder, policy=Policy(stabilizer, scope="head"), **settings)

    # The rule counts calls: every loss is a frame of its own, so it fires within the second sample.
    whole = loop("whole").run(range(11), close=False)
    whole_state = whole.session.state_dict()
    whole.session.close()
    first = loop("parts").run(range(8), close=False)
    state = json.loads(json.dumps(first.session.state_dict()))
    first.session.close()
    second = loop("parts")
    second.model.load_state_dict(first.model.state_dict())
    second.session.load_state_dict(state)
    # Before the first forward, too: a run may be stopped right after it was resumed.
    assert second.session.state_dict()["stabilizers"] == {
        SITES[1]: ["none", stabilizer] + 2 * ["none"]
    }
    second.run(range(8, 11), close=False)
    assert json.dumps(second.session.state_dict()) == json.dumps(whole_state)
    second.session.close()
    for one, other in zip(whole.model.parameters(), second.model.parameters(), strict=True):
        assert torch.equal(one, other)
    pd.testing.assert_frame_equal(read_run(tmp_path / "whole"), read_run(tmp_path / "parts"))
    pd.testing.assert_frame_equal(read_events(tmp_path / "whole"), read_events(tmp_path / "parts"))
    unswitched = Loop(**settings).run(range(11))
    assert not all(map(torch.equal, unswitched.model.parameters(), second.model.parameters()))


@dataclass(frozen=True)
class LossAtStep:
    """Says at every sample from one step on that the loss has departed."""

    role: ClassVar = Role("loss")

    step: int
    name: str = "my_loss"

    def examine(self, frame, state):
        due = frame.step >= self.step and frame.of("loss")
        return [Finding("", (), "the loss has risen")] if due else []


def test_the_verdict_says_once_more_what_became_of_the_loss(tmp_path):
    # Beyond the cool-down of 1,000 steps the alarm repeats itself; the verdict does not.
    rules = (Always(), LossAtStep(1500))
    loop = Loop(every_n_train_steps=500, dirpath=tmp_path, rules=rules, strict=True)
    loop.run(range(0, 4000, 500))
    events = read_events(tmp_path)
    departed = events[events["rule"] == "my_loss"]
    assert departed["step"].tolist() == [1500, 2500, 3500]
    verdicts = events[events["kind"] == "verdict"]
    assert verdicts[["step", "verdict"]].to_numpy().tolist() == [
        [0, "rounding"],
        [1500, "rounding"],
    ]
    assert [why.split("; ")[-1] for why in verdicts["why"]] == [
        "no alarm on the loss", "alarm on the loss at step 1500"
    ]  # fmt: skip


@pytest.mark.parametrize("written", ["now", "as a word", "not at all"])
def test_a_resumed_run_knows_what_its_first_alarms_were_about(written):
    rules = (Always(2500), LossAtStep(500))
    loop = Loop(every_n_train_steps=500, rules=rules).run([0, 500], close=False)
    state = json.loads(json.dumps(loop.session.state_dict()))
    loop.session.close()
    if written == "as a word":  # of an earlier version
        state["first_alarms"] = [[*alarm[:5], "loss"] for alarm in state["first_alarms"]]
    if written == "not at all":  # of a still earlier one
        state["first_alarms"] = [alarm[:5] for alarm in state["first_alarms"]]
    resumed = Loop(every_n_train_steps=500, rules=rules)
    resumed.session.load_state_dict(state)
    assert [alarm.role for alarm in resumed.session._findings.alarms] == [Role("loss")]


def test_a_run_resumed_in_a_new_folder_begins_with_what_it_remembers(tmp_path):
    settings = {"every_n_train_steps": 1, "rules": (Always(),)}
    first = Loop(dirpath=tmp_path / "first", policy=Policy("stochastic", scope="head"), **settings)
    first.run(range(3), close=False)
    state = first.session.state_dict()
    first.session.close()
    for folder in ("first", "second"):
        loop = Loop(
            dirpath=tmp_path / folder, policy=Policy("stochastic", scope="head"), **settings
        )
        loop.session.load_state_dict(state)
        loop.run([3, 4])
    told = read_events(tmp_path / "second")
    assert told[["step", "kind", "site", "heads", "stabilizer"]].to_numpy().tolist() == [
        [0, "alarm", SITES[1], (1,), ""],
        [3, "switch", SITES[1], (1,), "stochastic"],
        [3, "verdict", "", (), ""],
    ]
    assert told["rule"].tolist() == ["always", "", ""]
    assert told["verdict"].tolist() == ["", "", "rounding"]
    assert (read_events(tmp_path / "first")["step"] == 0).all(), "there it is told already"


def test_what_happened_at_the_step_a_run_is_resumed_from_is_told_once(tmp_path):
    settings = {"every_n_train_steps": 1, "dirpath": tmp_path, "rules": (Always(3),)}
    first = Loop(**settings).run(range(3), close=False)
    state = first.session.state_dict()
    first.run([3, 4])
    resumed = Loop(**settings)
    resumed.session.load_state_dict(state)
    resumed.run([3, 4])
    assert events_of(tmp_path, "alarm")["step"].tolist() == [3]


def test_a_run_resumed_after_its_first_step_keeps_that_step(tmp_path):
    settings = {"every_n_train_steps": 1, "dirpath": tmp_path, "rules": (Always(),)}
    first = Loop(**settings).run([0], close=False)
    state = first.session.state_dict()
    first.session.close()
    resumed = Loop(**settings)
    resumed.session.load_state_dict(state)
    resumed.run([1, 2])
    assert sampled(tmp_path) == [0, 1, 2]
    told = read_events(tmp_path)[["step", "kind"]].to_numpy().tolist()
    assert told == [[0, "alarm"], [0, "verdict"]]


def test_a_site_that_is_called_later_is_described_then(tmp_path, caplog):
    loop = Loop(every_n_train_steps=1, dirpath=tmp_path, policy=Policy("compensated", scope="head"))
    second = loop.model.layers[1]
    # The first cannot be switched; one that can be is enough.
    loop.model.layers[0].masked = {"dropout_p": 1.0}
    loop.model.layers = loop.model.layers[:1]
    loop.run([0], close=False)
    assert list(read_metadata(tmp_path)["sites"]) == SITES[:1]
    assert sum("no alarm can switch" in line for line in caplog.messages) == 1
    caplog.clear()
    loop.model.layers.append(second)
    with caplog.at_level(logging.INFO, "guardbit"):
        loop.run([1, 2])
    sites = read_metadata(tmp_path)["sites"]
    assert list(sites) == SITES
    assert [bool(site["not_switchable"]) for site in sites.values()] == [True, False]
    assert not any(SITES[0] in line or "no alarm" in line for line in caplog.messages)


@pytest.mark.parametrize("before", ["nothing but a first try", "another run"])
def test_what_a_used_folder_lacks_of_a_resumed_run_is_told(tmp_path, before):
    settings = {"every_n_train_steps": 1, "rules": (Always(),)}
    first = Loop(policy=Policy("stochastic", scope="head"), **settings).run(range(3), close=False)
    state = first.session.state_dict()
    first.session.close()
    if before == "another run":
        Loop(every_n_train_steps=1, dirpath=tmp_path, rules=()).run(range(2))
    else:
        RunWriter(tmp_path).close()
    loop = Loop(dirpath=tmp_path, policy=Policy("stochastic", scope="head"), **settings)
    loop.session.load_state_dict(state)
    loop.run([3, 4])
    told = read_events(tmp_path)[["step", "kind", "heads", "stabilizer"]].to_numpy().tolist()
    assert told == [
        [0, "alarm", (1,), ""], [3, "switch", (1,), "stochastic"], [3, "verdict", (), ""]
    ]  # fmt: skip


def test_what_a_folder_says_is_switched_and_is_not_is_told_to_be_undone(tmp_path):
    first = Loop(every_n_train_steps=1, dirpath=tmp_path).run([0, 1], close=False)
    state = first.session.state_dict()
    first.session.switch("*", "compensated")  # after the checkpoint
    first.session.close()
    resumed = Loop(every_n_train_steps=1, dirpath=tmp_path)
    resumed.session.load_state_dict(state)
    resumed.run([2, 3])
    events = events_of(tmp_path, "switch")
    undone = events[events["stabilizer"] == "none"]
    assert undone[["step", "site", "heads"]].to_numpy().tolist() == [
        [2, SITES[0], (0, 1)], [2, SITES[1], (0, 1, 2, 3)]
    ]  # fmt: skip


def test_a_verdict_of_another_run_in_the_folder_does_not_stay(tmp_path):
    settings = {"every_n_train_steps": 1}
    own = Loop(**settings).run(range(3), close=False)
    state = own.session.state_dict()
    own.session.close()
    Loop(dirpath=tmp_path, rules=(Always(),), **settings).run(range(3))
    assert events_of(tmp_path, "verdict")["verdict"].tolist() == ["rounding"]
    resumed = Loop(dirpath=tmp_path, **settings)
    resumed.session.load_state_dict(state)
    resumed.run([3, 4])
    assert events_of(tmp_path, "verdict")["verdict"].tolist() == ["rounding", "stable"]


def test_a_broken_journal_in_a_used_folder_stops_nothing(tmp_path):
    settings = {"every_n_train_steps": 1, "rules": (Always(),), "dirpath": tmp_path}
    first = Loop(**settings).run(range(3), close=False)
    state = first.session.state_dict()
    first.session.close()
    (segment,) = tmp_path.glob("events-*")
    segment.write_text("{")
    resumed = Loop(**settings)
    resumed.session.load_state_dict(state)
    resumed.run([3, 4])  # warnings are errors here
    with pytest.warns(UserWarning, match="left out the segment"):
        assert events_of(tmp_path, "alarm")["step"].tolist() == [0], "what is remembered is told"


def test_a_switch_by_hand_is_told(tmp_path):
    loop = Loop(every_n_train_steps=1, dirpath=tmp_path).run([0], close=False)
    loop.session.switch(SITES[1], "compensated", heads=[1, 3])
    loop.session.switch("*", "compensated", why="to be safe")
    loop.session.switch("*", "compensated")  # nothing is left to do, nor to say
    loop.run([1], close=False)
    loop.session.switch(SITES[0], "none", heads=[0])
    with pytest.raises(ValueError, match="nowhere"):
        loop.session.switch("nowhere", "compensated")
    loop.session.close()
    events = events_of(tmp_path, "switch")[["step", "site", "heads", "stabilizer", "why"]]
    assert events.to_numpy().tolist() == [
        [0, SITES[1], (1, 3), "compensated", "by hand"],
        [0, SITES[0], (0, 1), "compensated", "to be safe"],
        [0, SITES[1], (0, 2), "compensated", "to be safe"],
        [1, SITES[0], (0,), "none", "by hand"],
    ]


def test_a_full_disk_costs_no_samples_once_it_has_room(tmp_path, monkeypatch, caplog):
    loop = Loop(every_n_train_steps=1, dirpath=tmp_path, rules=(Always(),))
    loop.session.begin_batch(0)
    with monkeypatch.context() as patch:
        patch.setattr("guardbit.store.writing.publish", full_disk)
        loop.run([0], close=False)
        for head in range(200):
            # More than give up would take, of one step.
            loop.session.record(Event(0, "alarm", SITES[0], (head,), "for a test"))
    assert not is_run(tmp_path) or not list(tmp_path.glob("samples-*"))
    loop.run([1], close=False)
    assert list(read_metadata(tmp_path)["sites"]) == SITES
    assert len(events_of(tmp_path, "alarm")) == 201
    monkeypatch.setattr(loop.session._journal._writer, "_flush_every", 20)  # less than a step's
    with monkeypatch.context() as patch:
        patch.setattr("guardbit.store.writing.publish", full_disk)
        loop.run([2], close=False)
        loop.session.switch(SITES[0], "compensated", heads=[1])
        loop.run([3], close=False)
    loop.run([4])
    frame = read_run(tmp_path)
    counts = frame[frame["site"] != ""].groupby("step")["indicator"].nunique()
    # Nothing is audited at the first step, as no site is known before it.
    assert counts.index.tolist() == [0, 1, 2, 3, 4] and counts[1:].nunique() == 1
    assert events_of(tmp_path, "switch")["step"].tolist() == [2]
    lines = [line for line in caplog.messages if "pending for another try" in line]
    assert len(lines) == 2 and all("No space left" in line for line in lines)
    assert not any("is off" in line for line in caplog.messages)


def test_a_disk_that_stays_full_turns_the_store_off(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(journal, "_PATIENCE", 3)
    loop = Loop(every_n_train_steps=1, dirpath=tmp_path).run([0], close=False)
    with monkeypatch.context() as patch:
        patch.setattr(RunWriter, "flush", full_disk)
        loop.run(range(1, 6), close=False)
    assert sum("pending for another try" in line for line in caplog.messages) == 1
    assert sum("'store' failed and is off" in line for line in caplog.messages) == 1
    assert loop.session.samples[0].step == 5, "the steps are watched all the same"
    loop.session.switch("*", "compensated")
    assert loop.session._journal._events == [], "nothing is kept any more"
    loop.run([6])
    assert sampled(tmp_path) == [0]


def test_an_event_that_cannot_be_written_at_all_keeps_nothing(tmp_path, caplog):
    loop = Loop(every_n_train_steps=1, dirpath=tmp_path).run([0], close=False)
    for _ in range(3):
        loop.session.record(Event(0, "alarm", SITES[0], (0,), b"no text"))
    assert sum("'store' failed and is off" in line for line in caplog.messages) == 1
    assert len(loop.session._journal._events) == 1
    loop.run([1])
    assert sampled(tmp_path) == [0]


def test_a_strict_session_that_cannot_write_lets_go_of_the_model(tmp_path, monkeypatch):
    loop = Loop(every_n_train_steps=1, dirpath=tmp_path, strict=True).run([0], close=False)
    monkeypatch.setattr(RunWriter, "flush", full_disk)
    with pytest.raises(OSError, match="No space left"):
        loop.session.close()
    MonitorSession(loop.model).close()


def test_heads_of_a_rule_may_be_numpys(tmp_path):
    @dataclass(frozen=True)
    class OfNumpy:
        name: str = "of_numpy"

        def examine(self, frame, state):
            return [Finding(SITES[1], tuple(np.flatnonzero([0, 1, 1])), "for a test")]

    loop = Loop(every_n_train_steps=1, dirpath=tmp_path, rules=(OfNumpy(),), strict=True)
    loop.run([0, 1], close=False)
    json.dumps(loop.session.state_dict())
    loop.session.close()
    assert events_of(tmp_path, "alarm")["heads"].tolist() == [(1, 2)]


def test_a_policy_that_fails_leaves_the_verdict(tmp_path):
    rules = (Always(), LossAtStep(0))
    loop = Loop(
        every_n_train_steps=1,
        dirpath=tmp_path,
        rules=rules,
        policy=Policy("compensated", scope="head"),
    )
    loop.session.policy.decide = fail
    loop.run([0])
    events = read_events(tmp_path)
    assert "policy: on purpose" in events[events["kind"] == "monitor_error"]["why"].item()
    assert (events["kind"] == "verdict").sum() == 1


@pytest.mark.parametrize("dirpath", ["", "thesis.txt", 3])
def test_what_is_no_place_for_a_run_is_refused_at_once(tmp_path, monkeypatch, dirpath):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "thesis.txt").write_text("")
    model = Model()
    with pytest.raises(ValueError, match=r"^dirpath is "):
        MonitorSession(model, dirpath=dirpath)
    MonitorSession(model).close()


@pytest.mark.parametrize("policy", [None, Policy("compensated", scope="head")])
def test_a_guard_that_can_switch_nothing_says_so(monkeypatch, caplog, policy):
    monkeypatch.setattr(Attention, "masked", {"dropout_p": 1.0})
    Loop(every_n_train_steps=1, policy=policy).run(range(2))
    told = [line for line in caplog.messages if "no alarm can switch" in line]
    assert len(told) == (policy is not None)
    assert not told or ("any of the 2 attention modules: " in told[0] and "dropout 1.0" in told[0])


def test_a_folder_that_cannot_be_looked_into_turns_the_store_off(tmp_path, monkeypatch, caplog):
    def forbidden(_):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(journal, "is_run", forbidden)
    loop = Loop(every_n_train_steps=1, dirpath=tmp_path).run(range(2))
    assert loop.session.samples, "the steps are watched all the same"
    assert any("Permission denied" in line for line in caplog.messages)


@pytest.mark.parametrize("error", [28, 24], ids=["disk full", "no file handles"])
def test_a_first_step_that_cannot_write_costs_nothing(tmp_path, monkeypatch, caplog, error):
    def refuse(*_):
        raise OSError(error, "for now")

    settings = {"every_n_train_steps": 2, "rules": (Always(),), "strict": False}
    loop = Loop(dirpath=tmp_path, policy=Policy("compensated", scope="head"), **settings)
    with monkeypatch.context() as patch:
        patch.setattr("guardbit.store.writing.publish", refuse)
        if error == 24:
            patch.setattr(journal, "is_run", refuse)
        loop.run(range(4), close=False)
    assert not is_run(tmp_path)
    loop.run(range(4, 7))
    assert sampled(tmp_path) == [0, 2, 4, 6] and len(values(tmp_path, "loss")) == 7
    told = read_events(tmp_path)[["step", "kind"]].to_numpy().tolist()
    assert told == [[0, "alarm"], [0, "switch"], [0, "verdict"]]
    assert sum("pending for another try" in line for line in caplog.messages) == 1
    assert not any("is off" in line for line in caplog.messages)


def test_a_lone_surrogate_in_a_name_costs_nothing(tmp_path, caplog):
    loop = Loop(every_n_train_steps=1, dirpath=tmp_path)
    loop.session.close()
    loop.model.register_module("sur\udc80", loop.model.layers.pop(0))
    loop.model.forward = lambda x: loop.model.layers[0](getattr(loop.model, "sur\udc80")(x))
    loop.session = MonitorSession(loop.model, every_n_train_steps=1, dirpath=tmp_path)
    loop.run([0], close=False)
    loop.session.switch("sur\udc80", "compensated", why="said by \udcff")
    loop.run([1])
    frame, (event,) = read_run(tmp_path), events_of(tmp_path, "switch").itertuples()
    assert sampled(tmp_path) == [0, 1]
    assert set(frame["site"]) == {"", "layers.0", "sur\\udc80"}
    assert (event.site, event.why) == ("sur\\udc80", "said by \\udcff")
    assert set(read_metadata(tmp_path)["sites"]) == {"layers.0", "sur\\udc80"}
    assert not any("is off" in line for line in caplog.messages)


@pytest.mark.parametrize("what", ["switch", "close"])
@pytest.mark.parametrize("ends", ["with the step", "by the next step", "by an error"])
def test_what_comes_between_a_forward_and_its_recomputation_waits(
    monkeypatch, tmp_path, what, ends
):
    def checkpointed(self, x):
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False)  # says if they are not alike
        return x

    monkeypatch.setattr(Model, "forward", checkpointed)
    loop = Loop(every_n_train_steps=100, dirpath=tmp_path, strict=True).run([0], close=False)
    session, stock = loop.session, F.scaled_dot_product_attention
    session.begin_batch(1)
    loss = loop.model(torch.ones(1, 3, 32).bfloat16()).float().square().mean()
    if what == "switch":
        session.switch("layers.1", "row_max", heads=[2])
        with pytest.raises(IndexError):
            session.switch("layers.1", "row_max", heads=[9])
    else:
        session.close()
    loss.backward()
    assert session.instrumentation.stabilizers()[SITES[1]] == ["none"] * 4
    if ends == "with the step":
        session.end_step()
    elif ends == "by an error":
        session.abandon_step()
    else:
        session.begin_batch(2)
    if what == "switch":
        expected = ["none", "none", "row_max", "none"]
        assert session.instrumentation.stabilizers()[SITES[1]] == expected
        assert events_of(tmp_path, "switch")["heads"].tolist() == [(2,)]
        session.abandon_step()
        session.close()
    assert F.scaled_dot_product_attention is not stock
    assert not any(module._forward_hooks for module in loop.model.modules())


def test_a_run_that_begins_anew_in_a_used_folder_says_so(tmp_path, caplog):
    first = Loop(every_n_train_steps=1, dirpath=tmp_path).run(range(3), close=False)
    state = first.session.state_dict()
    first.session.close()
    resumed = Loop(every_n_train_steps=1, dirpath=tmp_path)
    resumed.session.load_state_dict(state)
    resumed.run([3])
    assert not [line for line in caplog.messages if "holds a run already" in line]
    Loop(every_n_train_steps=1, dirpath=tmp_path).run([0])
    (told,) = [line for line in caplog.messages if "holds a run already" in line]
    assert f"{tmp_path} holds" in told and "from step 0 on" in told


@pytest.mark.parametrize("quiet_steps, warned", [(1000, True), (1001, False), (None, False)])
def test_a_quiet_period_that_a_lasting_alarm_fits_into_is_warned_of(caplog, quiet_steps, warned):
    Loop(every_n_train_steps=1, policy=Policy("compensated", quiet_steps=quiet_steps, scope="head"))
    assert any("still diverge will be switched back" in line for line in caplog.messages) == warned


def test_indicators_that_leave_rules_nothing_to_read_are_warned_of(caplog):
    Loop()
    assert not caplog.messages
    Loop(indicators=["w_q_spectral_norm", "loss", "delta_bias"])
    (line,) = caplog.messages
    assert "model_logits lacks max_logit" in line
    assert "gradient_error lacks dq_coherent_error" in line
    assert "head_growth" not in line and "loss_departure" not in line


def test_an_alarm_says_of_switched_heads_that_they_are(tmp_path):
    settings = {"every_n_train_steps": 1, "rules": (Always(),)}
    loop = Loop(dirpath=tmp_path, policy=Policy("stochastic", scope="head"), **settings)
    # A rule keeps silent about a head for 1,000 steps after it has fired.
    loop.run([0, 1, 1000, 1001])
    first, second = events_of(tmp_path, "alarm")["why"]
    assert "already" not in first
    assert second.endswith("; head 1 runs stochastic already")


def test_a_closed_session_watches_nothing_and_still_knows_the_switch(tmp_path, caplog):
    loop = Loop(every_n_train_steps=1, dirpath=tmp_path, strict=True).run([0], close=False)
    loop.session.instrumentation.switch(SITES[0], "compensated", heads=[1])
    before = loop.session.state_dict()
    loop.session.close()
    assert loop.session.state_dict() == before
    assert before["stabilizers"] == {SITES[0]: ["none", "compensated"]}
    loop.run([1, 2])  # and closes it again
    assert sampled(tmp_path) == [0]
    assert caplog.messages == ["the session is closed: step 1 and later ones are not watched"]


def test_what_is_treated_at_once_does_not_show(tmp_path, monkeypatch):
    # Two sites of 2 and 4 heads; two micro-batches, so that a site comes back in one step.
    def numbers(path):
        loop = Loop(every_n_train_steps=2, dirpath=path, strict=True)
        for step in range(6):
            with loop.session.step(step) as record:
                for micro_batch in (step, 100 + step):
                    record.loss(loop.backward(micro_batch))
                loop.optimizer.step()
                loop.optimizer.zero_grad()
        loop.session.close()
        frame = read_run(path).sort_values(["step", "site", "head", "indicator"])
        return frame.reset_index(drop=True)

    together = numbers(tmp_path / "together")
    monkeypatch.setattr(weights, "_LARGEST_BATCH", 1)
    monkeypatch.setattr(metric, "_MOST_HELD", 1)
    singly = numbers(tmp_path / "singly")
    assert together["value"].notna().any()
    # Only the order of FP64 sums may differ.
    pd.testing.assert_frame_equal(together, singly, rtol=1e-12, atol=0)


def test_numbers_of_any_dtype_come_to_the_host_in_their_order():
    values = [
        torch.tensor([1.5, 2.5]), 3.0, torch.tensor(4.25, dtype=torch.bfloat16),
        torch.tensor([1 / 3], dtype=torch.float64), torch.tensor(7.0), torch.tensor([]),
        torch.tensor(0.5, dtype=torch.float16), torch.tensor(2.0**-149), 5,
    ]  # fmt: skip
    expected = [(1.5, 2.5), (3.0,), (4.25,), (1 / 3,), (7.0,), (), (0.5,), (2.0**-149,), (5.0,)]
    assert Transfer(values).read() == expected
    assert Transfer([]).read() == []


def test_of_a_state_of_another_version_the_switch_is_kept(caplog):
    loop = Loop(every_n_train_steps=1, strict=True)
    old = {"stabilizers": {SITES[0]: ["none", "compensated"]}, "unknown": 1}
    loop.session.load_state_dict(old)
    assert len(caplog.messages) == 1 and f"stay switched ({SITES[0]})" in caplog.messages[0]
    loop.run([0, 1], close=False)
    assert loop.session.instrumentation.stabilizers()[SITES[0]] == ["none", "compensated"]
    loop.session.close()


def test_of_a_pipeline_s_state_of_another_version_other_stages_modules_are_no_error(caplog):
    loop = Loop(every_n_train_steps=1, strict=True)
    own, elsewhere = {SITES[0]: ["none", "compensated"]}, {"other_stage.attention": ["row_max"]}
    loop.session.load_state_dict(
        {"format": 2, "stabilizers": {**own, **elsewhere}, "is_of_parts": True}
    )
    loop.run([0, 1], close=False)
    assert loop.session.instrumentation.stabilizers()[SITES[0]] == own[SITES[0]]
    assert loop.session.state_dict()["stabilizers"] == {**own, **elsewhere}, "for later stages"
    loop.session.close()


def test_a_state_of_another_version_and_another_model_is_refused():
    loop = Loop(every_n_train_steps=1, strict=True)
    with pytest.raises(ValueError, match=r"no module 'other\.attention' to switch"):
        loop.session.load_state_dict({"format": 2, "stabilizers": {"other.attention": ["row_max"]}})
    loop.session.close()


@pytest.mark.parametrize("step", [1.5, "1", None, -1])
def test_what_is_no_step_is_refused(step):
    loop = Loop()
    with pytest.raises(ValueError, match=rf"step is {step!r}; it must be a whole number, 0 or"):
        loop.session.begin_batch(step)
    loop.session.close()


@pytest.mark.parametrize("loss", [torch.ones(3), torch.tensor(1j), "x"])
def test_what_is_no_loss_turns_off_the_losses_alone(tmp_path, caplog, loss):
    loop = Loop(every_n_train_steps=1, dirpath=tmp_path)
    with loop.session.step(0) as record:
        loop.backward(0)
        record.loss(loss)
    loop.run([1])
    assert sampled(tmp_path) == [0, 1] and values(tmp_path, "loss") == {}
    assert sum("the stage 'loss' failed" in message for message in caplog.messages) == 1


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"policy": "compensated"}, "policy is 'compensated'; it must be a guardbit.Policy"),
        ({"policy": Policy}, "it must be a guardbit.Policy, or None"),
        ({"dirpath": 3}, "dirpath is 3; it must be a path, or None"),
        ({"indicators": []}, "indicators is empty"),
        ({"sites": []}, "sites is empty"),
    ],
)
def test_bad_settings_are_named_and_leave_the_model_alone(settings, message):
    model = Model()
    with pytest.raises(ValueError, match=message):
        MonitorSession(model, **settings)
    MonitorSession(model).close()


def test_of_the_scope_model_a_site_called_later_is_switched_too_and_goes_back(tmp_path):
    class Once:
        name = "once"

        def examine(self, frame, state):
            due = frame.step == 2 and SITES[1] in frame.of("max_logit")
            return [Finding(SITES[1], (1,), "at step 2")] if due else []

    loop = Loop(
        every_n_train_steps=2, rules=(Once(),), dirpath=tmp_path, strict=True,
        policy=Policy("stochastic", scope="model", quiet_steps=6),
    )  # fmt: skip
    layers = loop.model.layers
    loop.model.layers = nn.ModuleList([nn.Identity(), layers[1]])
    loop.run(range(4), close=False)
    loop.model.layers = layers
    loop.run(range(4, 10))
    events = read_events(tmp_path).query("kind == 'switch'")
    assert list(zip(events.step, events.site, events.heads, events.stabilizer, strict=True)) == [
        (2, SITES[1], (0, 1, 2, 3), "stochastic"),
        (4, SITES[0], (0, 1), "stochastic"),
        (8, SITES[0], (0, 1), "none"),
        (8, SITES[1], (0, 1, 2, 3), "none"),
    ]


ALL_HEADS = [(SITES[0], (0, 1)), (SITES[1], (0, 1, 2, 3))]


def switches(path, kind="switch"):
    events = events_of(path, kind)
    columns = (events[name] for name in ("step", "site", "heads", "stabilizer", "why"))
    return list(zip(*columns, strict=True))


@pytest.mark.parametrize("first", [0, 7])
def test_always_corrects_all_heads_from_the_first_step_on_without_an_alarm(tmp_path, first):
    policy = Policy("exact_delta", always=True)
    loop = Loop(every_n_train_steps=5, rules=(), dirpath=tmp_path, strict=True, policy=policy)
    loop.run([first, first + 1], close=False)
    assert loop.session.instrumentation.stabilizers() == {
        SITES[0]: ["exact_delta"] * 2, SITES[1]: ["exact_delta"] * 4
    }  # fmt: skip
    for name in SITES:
        launches = loop.session.instrumentation.sites[name].launches
        assert launches["backward", "exact_delta"] == 1, "from the second step on"
    loop.run(range(first + 2, first + 12))
    why = "from the start (always=True)"
    assert switches(tmp_path) == [(first, *which, "exact_delta", why) for which in ALL_HEADS]
    assert read_metadata(tmp_path)["settings"]["always"] is True
    cadence = [step for step in range(first + 1, first + 12) if step % 5 == 0]
    assert sampled(tmp_path) == [first, *cadence]


def test_always_corrects_what_is_called_later_and_what_is_resumed(tmp_path):
    settings = {"every_n_train_steps": 2, "rules": (), "strict": True}
    policy = Policy("exact_delta", always=True)
    loop = Loop(dirpath=tmp_path / "run", policy=policy, **settings)
    layers = loop.model.layers
    loop.model.layers = nn.ModuleList([nn.Identity(), layers[1]])
    loop.run(range(2), close=False)
    loop.model.layers = layers
    loop.run(range(2, 4), close=False)
    told = [(0, *ALL_HEADS[1]), (2, *ALL_HEADS[0])]
    assert [event[:3] for event in switches(tmp_path / "run")] == told
    again = Loop(dirpath=tmp_path / "again", policy=policy, **settings)
    again.session.load_state_dict(loop.session.state_dict())
    loop.session.close()
    again.run(range(4, 7), close=False)
    ran = again.session.instrumentation.stabilizers().values()
    assert all({*names} == {"exact_delta"} for names in ran)
    assert [event[:3] for event in switches(tmp_path / "again")] == [
        (4, *which) for which in ALL_HEADS
    ]
    again.session.close()
    # A checkpoint of a run without it, resumed between two samples.
    plain = Loop(dirpath=tmp_path / "plain", **settings).run(range(5))
    later = Loop(dirpath=tmp_path / "later", policy=policy, **settings)
    later.session.load_state_dict(plain.session.state_dict())
    later.run([5, 6])
    assert [event[:3] for event in switches(tmp_path / "later")] == [
        (5, *which) for which in ALL_HEADS
    ]


def test_always_in_a_dry_run_switches_nothing(tmp_path):
    policy = Policy("compensated", always=True)
    loop = Loop(every_n_train_steps=2, rules=(), dirpath=tmp_path, policy=policy, dry_run=True)
    loop.run(range(5))
    why = "not switched to compensated: dry run (from the start (always=True))"
    assert switches(tmp_path) == []
    refused = [(0, *which, "compensated", why) for which in ALL_HEADS]
    assert switches(tmp_path, "refusal") == refused
    running = loop.session.state_dict()["running"].values()
    assert running and all({*names} == {"none"} for names in running)


def test_of_the_scope_layer_an_alarm_switches_all_heads_of_its_site(tmp_path):
    loop = Loop(
        every_n_train_steps=1, rules=(Always(),), dirpath=tmp_path, strict=True,
        policy=Policy("exact_delta", scope="layer"),
    )  # fmt: skip
    loop.run(range(3))
    told = [event[:4] for event in switches(tmp_path)]
    assert told == [(0, *ALL_HEADS[1], "exact_delta")]


@pytest.mark.parametrize("scope", ["head", "model"])
def test_what_somebody_switches_after_the_policy_is_not_taken_back(tmp_path, scope):
    @dataclass(frozen=True)
    class Once(Always):
        def examine(self, frame, state):
            return super().examine(frame, state) if frame.step == 0 else []

    loop = Loop(
        every_n_train_steps=2, rules=(Once(),), dirpath=tmp_path, strict=True,
        policy=Policy("compensated", scope=scope, quiet_steps=6),
    )  # fmt: skip
    loop.run(range(3), close=False)
    loop.session.instrumentation.switch(SITES[1], "stochastic", heads=[1])
    loop.run(range(3, 8), close=False)
    left = loop.session.instrumentation.stabilizers()
    loop.session.close()
    assert left == {SITES[0]: ["none"] * 2, SITES[1]: ["none", "stochastic", "none", "none"]}
    undone = [heads for step, heads in zip(
        events_of(tmp_path, "switch").step, events_of(tmp_path, "switch").heads, strict=True
    ) if step == 6]  # fmt: skip
    assert undone == ([(0, 1), (0, 2, 3)] if scope == "model" else [])


def test_one_policy_serves_several_runs(tmp_path):
    policy, settings = (
        Policy("compensated", scope="head"),
        {"every_n_train_steps": 1, "rules": (Always(),), "strict": True},
    )
    for name in ("first", "second"):
        Loop(dirpath=tmp_path / name, policy=policy, **settings).run([0])
        assert len(events_of(tmp_path / name, "switch")) == 1


def test_what_a_dry_run_decided_is_decided_again_when_it_gets_serious(tmp_path):
    settings = {"every_n_train_steps": 2, "rules": (Always(),), "strict": True}
    dry = Loop(
        dirpath=tmp_path, policy=Policy("compensated", scope="head"), dry_run=True, **settings
    ).run([0, 1], close=False)
    state = dry.session.state_dict()
    dry.session.close()
    serious = Loop(dirpath=tmp_path, policy=Policy("compensated", scope="head"), **settings)
    serious.session.load_state_dict(state)
    # A rule keeps silent about a head for 1,000 steps after it has fired.
    serious.run([2, 998, 1000])
    refused, made = events_of(tmp_path, "refusal"), events_of(tmp_path, "switch")
    assert refused[["step", "stabilizer"]].to_numpy().tolist() == [[0, "compensated"]]
    assert made[["step", "stabilizer"]].to_numpy().tolist() == [[1000, "compensated"]]


def test_suspects_are_audited_besides_those_in_turn(tmp_path):
    Loop(
        every_n_train_steps=1, rules=(Always(),), dirpath=tmp_path, num_audited_heads=1, strict=True
    ).run(range(4))
    frame = read_run(tmp_path)
    rows = frame[(frame.indicator == "dq_relative_error") & (frame.site == SITES[1])]
    audited = {step: group["head"].tolist() for step, group in rows.groupby("step")}
    assert audited == {1: [1], 2: [1, 2], 3: [1, 3]}


def test_one_value_that_is_not_finite_does_not_stay_in_the_running_sum(tmp_path, monkeypatch):
    original = dispatch.delta_bias
    bad = {2: torch.inf, 4: torch.nan}
    loop = Loop(every_n_train_steps=2, dirpath=tmp_path, strict=True)

    def delta_bias(*tensors, **which):
        bias, bias_abs = original(*tensors, **which)
        return bias + bad.get(loop.session._schedule.step, 0.0), bias_abs

    monkeypatch.setattr(dispatch, "delta_bias", delta_bias)
    loop.run(range(7))
    frame = read_run(tmp_path)
    head = frame[(frame.site == SITES[0]) & (frame["head"] == 0)].set_index(["indicator", "step"])
    sums = [head.value["delta_bias_cumulative", step] for step in (0, 2, 4, 6)]
    assert head.value["delta_bias", 2] == torch.inf and ("delta_bias", 4) not in head.index
    assert sums[0] == sums[1] == sums[2] == head.value["delta_bias", 0]
    assert sums[3] == sums[0] + head.value["delta_bias", 6]


def test_the_loss_scale_is_taken_out_of_the_delta_bias(tmp_path):
    for name, scale in (("one", 1.0), ("many", 4096.0)):
        loop = Loop(every_n_train_steps=1, dirpath=tmp_path / name, strict=True)
        with loop.session.step(0):
            loop.session.loss_scale = scale
            loop.backward(0, scale)
        loop.session.close()
    frames = [read_run(tmp_path / name) for name in ("one", "many")]
    # Powers of two scale all roundings alike.
    pd.testing.assert_frame_equal(*frames)
    biases = frames[0][frames[0].indicator == "delta_bias"].value
    assert len(biases) == 6 and (biases != 0).all()


# --- surviving -----------------------------------------------------------------------------------


def fail(*args, **kwargs):
    raise ArithmeticError("on purpose")


class FailingRule:
    name = "failing"

    def examine(self, frame, state):
        raise ArithmeticError("on purpose")


class FailingPolicy(Policy):
    def decide(self, alarms, step, stabilizers, restless):
        raise ArithmeticError("on purpose")


HEADS = set(HEAD_INDICATORS) - OCCASIONAL
NORMS = {"w_q_spectral_norm", "w_k_spectral_norm", "qk_spectral_norm"}
#: Stage -> what breaks it, settings, indicators that are recorded all the same after the first step
BROKEN = {
    "capture": (dispatch, "delta_bias", {}, NORMS),
    "metrics": (weights, "spectral_norms", {}, set()),
    "detectors": (None, "", {"rules": (FailingRule(),)}, HEADS),
    "policy": (None, "", {"policy": FailingPolicy()}, HEADS),
}


@pytest.mark.parametrize("stage", BROKEN)
def test_a_stage_that_fails_is_turned_off_and_the_others_go_on(
    tmp_path, monkeypatch, caplog, stage
):
    module, function, settings, recorded = BROKEN[stage]
    if module is not None:
        monkeypatch.setattr(module, function, fail)
    loop = Loop(every_n_train_steps=1, dirpath=tmp_path / "run", **settings).run(range(4))
    frame = read_run(tmp_path / "run")
    assert set(frame[frame.step >= 1].indicator) == {"loss"} | recorded
    assert values(tmp_path / "run", "loss") == loop.losses
    assert sum(f"the stage '{stage}' failed" in message for message in caplog.messages) == 1
    (error,) = events_of(tmp_path / "run", "monitor_error").itertuples()
    assert (error.step, error.why) == (0, f"{stage}: on purpose")
    with pytest.raises(ArithmeticError, match="on purpose"):
        Loop(every_n_train_steps=1, strict=True, **settings).run(range(2))


def test_losses_do_not_pile_up_when_they_cannot_be_read(monkeypatch, caplog):
    loop = Loop(every_n_train_steps=2).run([0], close=False)
    with monkeypatch.context() as broken:
        broken.setattr(measurement, "Transfer", fail)
        loop.run([1, 2], close=False)
    assert sum("the stage 'samples' failed" in message for message in caplog.messages) == 1
    loop.run([3, 4, 5], close=False)
    assert loop.session.state_dict()["measurement"] is None
    loop.session.close()


def test_nothing_stale_or_partial_is_recorded_after_the_capture_has_failed(tmp_path, monkeypatch):
    loop = Loop(every_n_train_steps=1, dirpath=tmp_path).run(range(2), close=False)
    original, calls = dispatch.delta_bias, []

    def fails_at_the_second_site(*tensors, **which):
        calls.append(tensors)
        return original(*tensors, **which) if len(calls) == 1 else fail()

    monkeypatch.setattr(dispatch, "delta_bias", fails_at_the_second_site)
    loop.run(range(2, 5))
    assert len(calls) == 2, "the first of the two sites was measured, the second was not"
    assert sampled(tmp_path) == [0, 1]
    assert sorted(values(tmp_path, "loss")) == [0, 1, 2, 3, 4]
    assert sorted(values(tmp_path, "w_q_spectral_norm", SITES[0])) == [0, 1, 2, 3, 4]


def test_training_is_the_same_with_every_stage_failing(monkeypatch):
    torch.manual_seed(0)
    alone = Loop(every_n_train_steps=100)
    alone.session.close()
    for step in range(4):
        alone.optimizer.zero_grad()
        alone.backward(step)
        alone.optimizer.step()
    monkeypatch.setattr(dispatch, "delta_bias", fail)
    monkeypatch.setattr(weights, "spectral_norms", fail)
    loop = Loop(every_n_train_steps=1, rules=(FailingRule(),), policy=FailingPolicy())
    loop.run(range(4))
    for one, other in zip(alone.model.parameters(), loop.model.parameters(), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("where", ["a file in the way", "disk full later"])
def test_a_store_that_cannot_be_written_to(tmp_path, monkeypatch, caplog, where):
    folder = tmp_path / "run"
    if where == "a file in the way":
        tmp_path.joinpath("run").write_text("")
        folder = folder / "inside"
    loop = Loop(
        every_n_train_steps=1,
        rules=(Always(3),),
        dirpath=folder,
        policy=Policy("compensated", scope="head"),
    )

    if where == "disk full later":
        loop.run([0], close=False)
        monkeypatch.setattr("guardbit.store.writing.publish", full_disk)
    loop.run(range(1, 5), close=False)
    assert "compensated" in loop.session.instrumentation.stabilizers()[SITES[1]], "it still acts"
    loop.session.close()
    assert sum("the stage 'store' failed" in message for message in caplog.messages) == 1
    if where == "disk full later":
        assert sampled(folder) == [0]
    strict = Loop(every_n_train_steps=1, dirpath=tmp_path / "another", strict=True)
    with pytest.raises(OSError, match="No space left"):
        monkeypatch.setattr("guardbit.store.writing.publish", full_disk)
        strict.run([0])


def test_a_loss_that_is_no_number_turns_the_losses_off_only(tmp_path, caplog):
    loop = Loop(every_n_train_steps=1, dirpath=tmp_path)
    loop.session.begin_batch(0)
    loop.backward(0)
    loop.session.loss(torch.ones(3))
    loop.session.end_step()
    loop.session.close()
    assert sum("the stage 'loss' failed" in message for message in caplog.messages) == 1
    assert sampled(tmp_path) == [0]


def test_a_site_whose_number_of_heads_changes_is_left_out_until_it_is_counted_again(tmp_path):
    loop = Loop(every_n_train_steps=1, dirpath=tmp_path, strict=True)
    loop.run([0], close=False)
    layer = loop.model.layers[1]
    layer.heads, layer.kv_heads = 2, 2
    for name in ("q_proj", "o_proj"):
        weight = getattr(layer, name).weight
        weight.data = weight.data[:32] if name == "q_proj" else weight.data[:, :32]
        weight.grad = None
    loop.run([1, 2])
    logits = read_run(tmp_path).query("indicator == 'max_logit'")
    counts = logits.groupby(["step", "site"]).size().to_dict()
    assert counts == {
        (0, SITES[0]): 2, (0, SITES[1]): 4, (1, SITES[0]): 2, (2, SITES[0]): 2, (2, SITES[1]): 2,
    }  # fmt: skip


def test_events_are_logged_where_nobody_has_set_up_logging(caplog):
    loop = Loop(every_n_train_steps=1)
    with caplog.at_level(logging.INFO, "guardbit"):
        loop.session.record(Event(3, "switch", SITES[1], (1,), "for a test", stabilizer="row_max"))
        loop.session.record(Event(4, "alarm", SITES[1], (1,), "for a test", rule="a_rule"))
        loop.session.record(Event(4, "verdict", "", (), "for a test", verdict="rounding"))
    loop.session.close()
    levels = [record.levelname for record in caplog.records if "for a test" in record.message]
    assert levels == ["WARNING", "WARNING", "WARNING"]
    assert "step 4: verdict rounding: for a test" in caplog.messages
    assert "step 4: alarm layers.1 heads [1]: for a test" in caplog.messages
    assert "step 3: switch layers.1 heads [1] to row_max: for a test" in caplog.messages


# --- several ranks -------------------------------------------------------------------------------

WORKER = textwrap.dedent(
    """
    import importlib.util, json, os, sys
    import torch

    rank, (folder, path, module, function) = int(os.environ["RANK"]), sys.argv[1:]
    torch.set_num_threads(1)
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=2
    )
    specification = importlib.util.spec_from_file_location("test_session", path)
    test_session = importlib.util.module_from_spec(specification)
    sys.modules["test_session"] = test_session
    specification.loader.exec_module(test_session)
    loop = test_session.Loop(
        every_n_train_steps=1,
        rules=(test_session.LoudRow(),),
        policy=test_session.Policy("compensated", scope="head"),
        dirpath=f"{folder}/run" if rank == 0 else None,
    )
    for step in range(5):
        if rank == 1 and step == 2:
            setattr(getattr(test_session, module), function, test_session.fail)
        if rank == 1 and step == 3:
            test_session.weights.spectral_norms = test_session.fail
        with loop.session.step(step) as record:
            # Only rank 1 sees the loud rows.
            x = torch.full((1 + rank, 12, 32), 0.1) * (1 + 9 * rank)
            x = x + 0.01 * torch.arange(12)[:, None]
            loss = loop.model(x.bfloat16()).float().square().mean()
            loss.backward()
            record.loss(float(rank))
    stabilizers = loop.session.instrumentation.stabilizers()
    detectors = loop.session.state_dict()["detectors"]
    loop.session.close()
    with open(f"{folder}/{rank}.json", "w") as file:
        json.dump([stabilizers, sorted(loop.session._stages.off), detectors], file)
    torch.distributed.destroy_process_group()
    """
)


LOUD = 0.2


@dataclass(frozen=True)
class LoudRow:
    """Names the second layer's head 0 when the largest logit of the first layer is loud."""

    name: str = "loud_row"

    def examine(self, frame, state):
        logits = frame.of("max_logit").get(SITES[0])
        loud = logits is not None and logits.max() > LOUD
        return [Finding(SITES[1], (0,), "a row is loud")] if loud else []


@pytest.mark.parametrize(
    "broken",
    [("dispatch", "delta_bias"), ("metric", "_stacked")],
    ids=["in a call", "between calls and exchange"],
)
def test_two_ranks_judge_the_same_samples_and_survive_an_error_of_one(tmp_path, broken):
    (tmp_path / "worker.py").write_text(WORKER)
    launch(tmp_path / "worker.py", 2, tmp_path, __file__, *broken)
    zero, one = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2))
    assert zero[0] == one[0] == {SITES[0]: ["none"] * 2, SITES[1]: ["compensated"] + ["none"] * 3}
    assert zero[1] == one[1] == ["capture", "metrics"]
    errors = events_of(tmp_path / "run", "monitor_error")[["step", "why"]].to_numpy().tolist()
    elsewhere = "the stage failed on another rank"
    assert errors == [[2, f"capture: {elsewhere}"], [4, f"metrics: {elsewhere}"]]
    assert zero[2] == one[2], "the losses too, of which each rank has its own"
    assert values(tmp_path / "run", "loss") == dict.fromkeys(range(5), 0.0), "rank 0's"
    # Where one rank cannot measure, as at step 2, none does, and nobody waits for it for ever.
    assert sampled(tmp_path / "run") == [0, 1]
    assert sorted(values(tmp_path / "run", "w_q_spectral_norm", SITES[0])) == [0, 1, 2, 3]
    # Rank 0 alone would have seen nothing loud.
    with torch.no_grad():
        x = 0.1 + 0.01 * torch.arange(12)[:, None].expand(1, 12, 32)
        torch.manual_seed(0)
        layer = Model().bfloat16().layers[0]
        q, k = (
            p(x.bfloat16()).float().unflatten(-1, (2, 16)) for p in (layer.q_proj, layer.k_proj)
        )
        largest = (torch.einsum("bnhd,bmhd->bhnm", q, k) / 4).max().item()
    assert largest < LOUD / 10
    assert events_of(tmp_path / "run", "switch").step.tolist() == [0]


def test_the_first_lines_of_the_module_run(tmp_path, monkeypatch):
    """The loop in the module's docstring, with a model and batches."""
    example = session_module.__doc__.split("plain loop:\n\n")[1]
    monkeypatch.chdir(tmp_path)
    loop = Loop()
    loop.session.close()
    body = textwrap.dedent(example).replace("...  ", "loss = loop.backward(step)  ")
    import guardbit

    names = {"guardbit": guardbit, "model": loop.model, "batches": range(3), "loop": loop}
    exec(body, names)
    assert values(tmp_path / "runs" / "mine", "loss") == loop.losses


@pytest.mark.parametrize("normed", [True, False])
def test_weights_that_qk_norm_makes_harmless_raise_no_alarm(tmp_path, normed):
    """The logits are not known: they are not measured."""
    loop = Loop(every_n_train_steps=50, dirpath=tmp_path)
    loop.session.close()
    loop.model.layers.extend([Attention(), Attention()]).bfloat16()
    for layer in loop.model.layers:
        norm = nn.RMSNorm(16) if normed else nn.Identity()
        layer.q_proj = nn.Sequential(
            layer.q_proj, nn.Unflatten(-1, (layer.heads, 16)), norm, nn.Flatten(2)
        )
    loop.model.bfloat16()
    loop.session = MonitorSession(
        loop.model, every_n_train_steps=50, dirpath=tmp_path, indicators=[*NORMS, "loss"]
    )
    for step in range(0, 1500, 50):
        with loop.session.step(step), torch.no_grad():
            loop.model.layers[1].q_proj[0].weight[16:32] *= 1.08
            with torch.enable_grad():
                loop.backward(step)
    loop.session.close()
    assert bool(len(events_of(tmp_path, "alarm"))) is not normed
    assert (loop.session.state_dict()["verdict"] == "stable") is normed
    sites = read_metadata(tmp_path)["sites"].values()
    assert {site["normalises_queries"] for site in sites} == {normed}
    replayed = replay(read_run(tmp_path), normalised=normalised_sites(read_metadata(tmp_path)))
    assert (replayed.verdict == "stable") is normed
