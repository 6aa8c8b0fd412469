"""Reports say what switched heads really run, step by step."""

import logging

import pytest
import torch
from torch import nn

from guardbit import MonitorSession
from guardbit.monitor import actions
from guardbit.monitor.interception import StepCalls
from guardbit.monitor.interception.seen import CAPTURED
from guardbit.monitor.policy import Policy
from guardbit.records import Alarm
from guardbit.store import read_metadata
from tests import toys
from tests.monitor.session.plain_loop import switches

#: A batch that attention computes in FP64, which no stabilizer takes.
WIDE = True
SITE = "layers.1"


class Attention(toys.Attention):
    def attend(self, q, k, v, wide=None):
        inputs = (x.double() if wide else x for x in (q, k, v))
        return super().attend(*inputs).to(q.dtype)


class Run:
    """A watched model whose heads a test switches; counts which kernels ran."""

    def __init__(self, path, **settings):
        torch.manual_seed(0)
        self.path, self.model = path, toys.Model(Attention(), Attention())
        settings = {"every_n_train_steps": 1000, "dirpath": path, "strict": True, **settings}
        self.session = MonitorSession(self.model, **settings)
        self.run, self.step = self.model, 0

    def steps(self, *kinds):
        """A step for each kind of batch; for a tuple one with as many micro-batches."""
        for step, batches in enumerate(kinds, self.step):
            with self.session.step(step) as session:
                for i, kind in enumerate(batches if isinstance(batches, tuple) else (batches,)):
                    if i:
                        session.begin_batch(step)
                    self.run(torch.randn(2, 12, 32), kind).square().mean().backward()
        self.step += len(kinds)
        return self

    def switched(self, heads=None):
        """A step, and a switch by hand."""
        self.steps(None).session.switch(SITE, "compensated", heads=heads)
        return self

    def switched_launches(self):
        return self.session.instrumentation.sites[SITE].launches.get(("forward", "compensated"), 0)

    def stabilizers(self):
        return self.session.instrumentation.stabilizers()[SITE]

    def events(self, kind):
        return [event[:4] for event in switches(self.path, kind)]

    def reasons(self, kind):
        return [event[4] for event in switches(self.path, kind)]


@pytest.fixture
def run(tmp_path):
    # Of this policy, compiled graphs have room for `compensated`.
    run = Run(tmp_path / "run", policy=Policy("compensated", scope="head"))
    yield run
    run.session.close()


def test_a_refused_batch_after_the_switch_is_told_at_once_and_so_is_the_next_without(run, caplog):
    run.switched([1]).steps(None)
    assert run.switched_launches() == 1
    with caplog.at_level(logging.WARNING, "guardbit"):
        run.steps(WIDE)
    assert run.switched_launches() == 1, "PyTorch's kernel ran"
    assert run.stabilizers() == ["none", "none"]
    assert run.events("switch")[1:] == [(2, SITE, (1,), "none")]
    assert run.reasons("switch")[-1].startswith(
        "compensated does not run: it computes in torch.float64; the heads are not stabilized"
    )
    assert SITE in caplog.text
    assert "it computes in torch.float64" in caplog.text
    state = run.session.state_dict()
    assert state["stabilizers"] == {SITE: ["none", "compensated"]}, "what is asked for"
    assert state["all"][0]["running"][SITE] == ["none", "none"], "what ran"
    run.steps(WIDE, None)
    assert run.switched_launches() == 2
    assert run.stabilizers() == ["none", "compensated"]
    assert run.events("switch")[2:] == [(4, SITE, (1,), "compensated")]
    assert run.events("monitor_error") == []


def test_a_head_that_is_switched_while_calls_are_refused_is_reported_too(run):
    run.switched([1]).steps(WIDE)
    run.session.instrumentation.ask(SITE, "compensated", [0])  # as a policy does
    run.steps(WIDE, WIDE)
    assert run.events("switch")[1:] == [(1, SITE, (1,), "none"), (2, SITE, (0,), "none")]


def test_one_refused_batch_refuses_no_later_switch(run):
    run.steps(WIDE)
    with pytest.raises(ValueError, match=r"it computes in torch\.float64"):
        run.session.switch(SITE, "compensated")
    run.switched().steps(None)
    assert run.switched_launches() == 1
    assert run.stabilizers() == ["compensated"] * 2


def test_the_metadata_say_that_later_batches_could_be_switched(tmp_path):
    run = Run(tmp_path, every_n_train_steps=1)
    run.steps(WIDE)
    assert "float64" in read_metadata(tmp_path)["sites"][SITE]["not_switchable"]
    run.steps(None, WIDE)
    assert read_metadata(tmp_path)["sites"][SITE]["not_switchable"] is None
    run.session.close()


def test_calls_that_alternate_do_not_fill_the_journal(run, monkeypatch):
    monkeypatch.setattr(actions, "TURN_STEPS", 5)
    run.switched()
    for _ in range(5):
        run.steps(WIDE)
        assert run.stabilizers() == ["none"] * 2
        run.steps(None)
        assert run.stabilizers() == ["compensated"] * 2
    assert [event[3] for event in run.events("switch")] == ["compensated", "none", "compensated"]
    (reason,) = run.reasons("monitor_error")
    assert "in some calls only" in reason
    assert SITE in reason
    run.steps(*[WIDE] * 5)
    assert run.events("switch")[-1][3] == "none", "a turn that lasts is told"


def test_micro_batches_of_one_step_refused_and_not(run):
    run.switched().steps((None, WIDE), (WIDE, None))
    assert run.stabilizers() == ["compensated"] * 2
    assert len(run.events("switch")) == 1
    (reason,) = run.reasons("monitor_error")
    assert "in some calls only" in reason


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # read by the compiler
@pytest.mark.parametrize("how", ["whole", "blocks"])
def test_compiled_calls_that_keep_the_native_kernel(run, how):
    if how == "whole":
        run.run = torch.compile(run.model, backend="aot_eager", fullgraph=True)
    else:
        for layer in run.model.layers:
            layer.compile(backend="aot_eager", fullgraph=True)
    run.switched([1]).steps(None)
    assert run.reasons("monitor_error") == []
    run.steps(WIDE)  # traced now
    assert run.stabilizers() == ["none"] * 2
    assert run.events("switch")[-1] == (2, SITE, (1,), "none")
    launches = run.switched_launches()
    run.steps(None)
    assert run.switched_launches() == launches + 1
    assert run.stabilizers() == ["none", "compensated"]
    assert "in some calls only" in run.reasons("monitor_error")[0]
    run.steps(WIDE)
    assert run.stabilizers() == ["none"] * 2


def test_a_switch_that_does_not_fit_the_heads_is_reported_and_kept(run):
    run.switched()
    run.model.layers[1].head_dim = 32
    run.steps(None)
    assert run.switched_launches() == 0
    assert run.stabilizers() == ["none"]
    assert run.events("switch")[-1] == (1, SITE, (0, 1), "none")
    assert "it has 1 heads now, and the switch was made for 2" in run.reasons("switch")[-1]
    assert run.session.state_dict()["stabilizers"] == {SITE: ["compensated"] * 2}
    run.model.layers[1].head_dim = 16
    run.steps(None)
    assert run.switched_launches() == 1
    assert run.events("switch")[-1] == (2, SITE, (0, 1), "compensated")


def test_a_forward_before_its_step_begins_counts(run):
    run.switched([1])
    for step, wide in ((1, None), (2, WIDE)):
        loss = run.model(torch.randn(2, 12, 32), wide).square().mean()
        with run.session.step(step):
            loss.backward()
    assert run.stabilizers() == ["none"] * 2
    assert run.events("switch")[-1] == (2, SITE, (1,), "none")


def test_a_replaced_module_is_no_longer_reported(run):
    run.switched()
    run.model.layers[1] = Attention()
    run.steps(None)
    assert SITE not in run.session.instrumentation.stabilizers()
    assert run.events("switch")[-1] == (1, SITE, (0, 1), "none")
    assert "no longer in the model" in run.reasons("switch")[-1]
    assert "layers.0" in run.session.instrumentation.stabilizers()


def test_norms_of_a_removed_module_are_not_reported(tmp_path):
    run = Run(tmp_path, every_n_train_steps=1)
    run.steps(None)
    assert {s.site for s in run.session.samples if s.site} == {"layers.0", SITE}
    run.model.layers[1] = nn.Identity()
    run.model.forward = lambda x, _: run.model.layers[1](run.model.layers[0](x))
    run.steps(None, None)
    assert {s.site for s in run.session.samples if s.site} == {"layers.0"}
    run.session.close()


def test_a_policy_switches_at_a_refused_batch_what_earlier_batches_could(tmp_path):
    run = Run(tmp_path, every_n_train_steps=1, policy=Policy("compensated", scope="head"))
    run.steps(None)
    alarm = Alarm(1, SITE, (0,), "w_q_growth", "made up")
    run.session.detectors.update = lambda _: [alarm] if run.step == 1 else []
    run.steps(WIDE)
    run.steps(None)
    assert run.stabilizers() == ["compensated", "none"]
    assert run.switched_launches() == 1
    run.session.close()


def test_a_captured_call_speaks_for_all_that_follow():
    calls = StepCalls()
    calls.note(0, (2, 2, 16), None)
    assert calls.refusal is None
    calls.note(0, (2, 2, 16), CAPTURED)  # replays, which nobody sees, follow
    assert calls.refusal == CAPTURED
    assert not calls.was_switchable
