"""Reports say what switched heads really run, step by step, and what a call cannot run."""

import logging
from unittest import mock

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from guardbit import MonitorSession, read_events
from guardbit.kernels import dispatch, heads
from guardbit.kernels.engines import proof
from guardbit.kernels.runtime import runtime
from guardbit.monitor import actions
from guardbit.monitor.interception import StepCalls
from guardbit.monitor.interception.seen import CAPTURED
from guardbit.monitor.policy import Policy
from guardbit.records import Alarm
from guardbit.store import read_metadata
from tests import toys

SITE = "layers.1"
MASK = torch.ones(12, 12, dtype=torch.bool).tril()
DOUBTED = proof.Proof("FLASH_ATTENTION", "here", 0.0, 0.0, "it lies")
#: A batch that attention computes in FP64, which no stabilizer takes.
WIDE = True


class Attention(toys.Attention):
    def attend(self, q, k, v, wide=None):
        inputs = (x.double() if wide else x for x in (q, k, v))
        return super().attend(*inputs).to(q.dtype)


class Run:
    """A watched model in BF16 whose heads a test switches."""

    def __init__(self, path, **settings):
        torch.manual_seed(0)
        self.path, self.model = path, toys.Model(Attention(), Attention())
        settings = {"every_n_train_steps": 1000, "dirpath": path, "strict": True, **settings}
        self.session = MonitorSession(self.model, **settings)
        self.run, self.step = self.model, 0

    def steps(self, *kinds, math=False, doubted=False, rows=12):
        """A step for each kind of batch; for a tuple one with as many micro-batches."""
        kernels = [SDPBackend.MATH] if math else [*SDPBackend.__members__.values()]
        proof_of = (lambda *_: DOUBTED) if doubted else heads.proof_of
        for step, batches in enumerate(kinds, self.step):
            with self.session.step(step) as session:
                for i, kind in enumerate(batches if isinstance(batches, tuple) else (batches,)):
                    if i:
                        session.begin_batch(step)
                    with (
                        sdpa_kernel(kernels),
                        mock.patch.object(heads, "proof_of", proof_of),
                        torch.autocast("cpu", torch.bfloat16),
                    ):
                        self.run(torch.randn(2, rows, 32), kind).square().mean().backward()
        self.step += len(kinds)
        return self

    def switched(self, name="compensated", heads=None):
        """A step, and a switch by hand."""
        self.steps(None).session.switch(SITE, name, heads=heads)
        return self

    def attention(self, **attributes):
        for name, value in attributes.items():
            setattr(self.model.layers[1], name, value)
        return self

    def switched_launches(self):
        return self.session.instrumentation.sites[SITE].launches.get(("forward", "compensated"), 0)

    def stabilizers(self):
        return self.session.instrumentation.stabilizers()[SITE]

    def events(self, kind="switch"):
        return toys.recorded(self.path, kind, "step", "heads", "stabilizer")

    def ran(self):
        """The stabilizers that were told, one after the other."""
        return [name for *_, name in self.events()]

    def reason(self, kind="switch"):
        return toys.recorded(self.path, kind, "why")[-1][0]


@pytest.fixture
def run(tmp_path):
    # Of this policy, compiled graphs have room for `compensated`.
    run = Run(tmp_path / "run", policy=Policy("compensated", scope="head"))
    yield run
    run.session.close()


CASES = {
    "flash": ({}, {}, "exact_delta", ""),
    "masked": ({"mask": MASK}, {}, "exact_delta", ""),
    "math": ({}, {"math": True}, "none", "exact_delta would correct nothing: PyTorch's MATH"),
    # Which on CPUs only the math kernel knows.
    "dropout": ({"dropout_p": 0.5}, {}, "none", "takes delta from P itself"),
    "doubted": ({}, {"doubted": True}, "compensated", "(here): it lies"),
    "both": ({"mask": MASK}, {"doubted": True}, "none", "it lies; GuardBit's kernels take no mask"),
    "in FP64": (
        {},
        {"kind": WIDE},
        "none",
        "exact_delta does not run: it computes in torch.float64; the heads are not stabilized",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_what_exact_delta_becomes_is_told_once_and_so_is_its_return(run, case, caplog):
    attributes, how, ran, why = CASES[case]
    run.switched("exact_delta", [1])
    how = dict(how)
    run.attention(**attributes).steps(*[how.pop("kind", None)] * 3, **how)
    assert run.stabilizers() == ["none", ran]
    assert run.session.instrumentation.asked()[SITE] == ["none", "exact_delta"]
    assert run.session.state_dict()["stabilizers"][SITE] == ["none", "exact_delta"]
    expected = [(0, (1,), "exact_delta"), (1, (1,), ran)][: 1 if ran == "exact_delta" else 2]
    assert run.events() == expected
    assert why in run.reason() and why in caplog.text
    run.attention(mask=None, dropout_p=0.0).steps(None)
    assert run.stabilizers() == ["none", "exact_delta"]
    assert run.events() == expected + [(4, (1,), "exact_delta")] * (len(expected) - 1)
    assert run.events("monitor_error") == []


def test_each_head_is_told_what_takes_its_stabilizer_s_place(run):
    run.switched("compensated", [0]).session.switch(SITE, "row_max", heads=[1])
    run.attention(mask=MASK).steps(None)
    assert run.stabilizers() == ["exact_delta", "none"]
    events = read_events(run.path).iloc[-2:]
    assert list(events.heads) == [(0,), (1,)]
    assert list(events.stabilizer) == ["exact_delta", "none"]
    assert "exact_delta runs instead of compensated" in events.why.iloc[0]
    assert "GuardBit's kernels take no mask; exact_delta would work" in events.why.iloc[1]


def test_where_nothing_works_it_is_not_said_that_another_would(run):
    run.switched().attention(mask=MASK, dropout_p=0.1).steps(None)
    assert run.stabilizers() == ["none"] * 2
    assert "kernels take no mask; nor is exact_delta: " in run.reason()
    assert "dropout 0.1" in run.reason()
    assert "would work" not in run.reason()


@pytest.mark.parametrize(
    "dropout_p, mask, is_told", [(0.1, MASK, 1), (0.1, None, 0), (0.0, MASK, 0)]
)
def test_calls_in_which_no_stabilizer_works_are_told_before_any_alarm(
    tmp_path, caplog, dropout_p, mask, is_told
):
    run = Run(tmp_path, every_n_train_steps=1, policy=Policy("compensated", scope="head"))
    run.attention(mask=mask, dropout_p=dropout_p).steps(None, None).session.close()
    told = [r for r in caplog.messages if f"no stabilizer works at {SITE}" in r]
    assert len(told) == is_told
    if told:
        assert "a mask and dropout (0.1)" in told[0]


def test_a_switch_is_asked_for_until_it_has_run(run):
    run.switched("exact_delta")
    assert run.stabilizers() == ["exact_delta"] * 2
    run.steps(None, doubted=True)
    assert run.stabilizers() == ["compensated"] * 2
    # An evaluation has no backward, and says nothing about the heads' one.
    with torch.no_grad():
        run.model(torch.randn(2, 12, 32))
    assert run.stabilizers() == ["compensated"] * 2
    run.session.switch(SITE, "none")
    run.steps(None)
    assert run.stabilizers() == ["none"] * 2
    assert run.ran() == ["exact_delta", "compensated", "none"]


def test_a_journal_ends_with_what_the_heads_ran_last(run):
    run.switched("exact_delta")
    for step in range(7):
        run.steps(None, doubted=step % 2 == 0)
    assert run.stabilizers() == ["compensated"] * 2
    run.session.close()
    assert run.events()[-1] == (7, (0, 1), "compensated")
    told = run.events()
    run.session.close()
    assert run.events() == told


def test_an_earlier_micro_batch_that_ran_otherwise_is_told(run):
    run.switched("exact_delta")
    attention = run.model.layers[1]
    forward, masks = attention.forward, [MASK, None]

    def of_micro_batch(*inputs):
        attention.mask = masks[0]
        masks.reverse()
        return forward(*inputs)

    attention.forward = of_micro_batch
    run.steps((None, None), doubted=True)
    assert run.stabilizers() == ["compensated"] * 2
    assert run.ran() == ["exact_delta", "compensated"]
    run.session.switch(SITE, "compensated")
    run.steps((None, None), math=True)
    assert "in some calls only: compensated is not possible" in run.reason("monitor_error")


@pytest.mark.parametrize(
    "name, function",
    [
        ("compensated", "launcher"),
        ("compensated", "carry_compensated_delta"),
        ("exact_delta", "carry_exact_delta"),
    ],
)
def test_kernels_that_fail_are_reported(run, monkeypatch, name, function):
    def fail(*_, **__):
        raise RuntimeError("no such instruction")

    run.switched(name, [1])
    with monkeypatch.context() as patched:
        patched.setattr(dispatch, function, fail)
        run.steps(None, None)
        assert run.stabilizers() == ["none", "none"]
        assert run.events() == [(0, (1,), name), (1, (1,), "none")]
        assert "failed (RuntimeError: no such instruction)" in run.reason()
    run.steps(None)
    assert run.stabilizers() == ["none", "none"], "it is not tried again"
    run.session.switch(SITE, name, heads=[1])
    run.steps(None)
    assert run.stabilizers() == ["none", name]
    assert run.ran() == [name, "none", name]


def test_a_kernel_that_gets_no_exact_delta_is_told_of_once(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(proof, "_proofs", {})
    run = Run(tmp_path).steps(None)
    run.session.switch(SITE, "exact_delta")
    with caplog.at_level(logging.WARNING, "guardbit"):
        run.steps(None, None)
        assert "cannot be given an exact delta" not in caplog.text
        run.steps(None, None, math=True).steps(None, math=True, rows=16)
    assert len(proof.proofs()) == 3, "of another length"
    (warned,) = [text for text in caplog.messages if "cannot be given an exact delta" in text]
    assert "MATH (" in warned and "its backward takes delta" in warned
    run.session.close()


@pytest.mark.parametrize(
    # With dropout `compensated` takes the place of `exact_delta`.
    "name, dropout_p, layers_with_room",
    [("exact_delta", 0.0, 0), ("compensated", 0.0, 2), ("exact_delta", 0.1, 1)],
)
def test_compiled_graphs_keep_room_for_what_may_be_asked_for(
    tmp_path, name, dropout_p, layers_with_room
):
    kept = []  # bytes of INT8 that the graph keeps for its backward

    def pack(x):
        kept.append(x.numel() if x.dtype == torch.int8 else 0)
        return x

    run = Run(tmp_path, policy=Policy(name, scope="head")).attention(dropout_p=dropout_p)
    run.run = torch.compile(run.model, backend="aot_eager", fullgraph=True)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        run.steps(None)
    assert sum(kept) == layers_with_room * 2 * 2 * 12 * 16
    with torch._dynamo.config.patch(error_on_recompile=True):
        run.session.switch(SITE, name, heads=[0])
        run.steps(None)
        # The math kernel, the only one with dropout on CPUs, does not round delta.
        assert run.stabilizers() == ["none" if dropout_p else name, "none"]
        run.session.switch(SITE, "compensated")
        run.steps(None, None)
    without_room = layers_with_room == 0
    assert run.stabilizers() == [name if without_room else "compensated"] * 2
    assert ("the compiled graph has no room" in run.reason()) is without_room
    run.session.close()
    assert runtime.keeps_residuals, "again, as nobody says otherwise"


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
    assert run.ran() == ["compensated", "none", "compensated"]
    assert len(run.events("monitor_error")) == 1
    assert "in some calls only" in run.reason("monitor_error")
    assert SITE in run.reason("monitor_error")
    run.steps(*[WIDE] * 5)
    assert run.ran()[-1] == "none", "a turn that lasts is told"


@pytest.mark.parametrize("how", ["whole", "blocks"])
def test_compiled_calls_that_keep_the_native_kernel(run, how):
    if how == "whole":
        run.run = torch.compile(run.model, backend="aot_eager", fullgraph=True)
    else:
        for layer in run.model.layers:
            layer.compile(backend="aot_eager", fullgraph=True)
    run.switched(heads=[1]).steps(None)
    assert run.events("monitor_error") == []
    run.steps(WIDE)  # traced now
    assert run.stabilizers() == ["none"] * 2
    assert run.events()[-1] == (2, (1,), "none")
    launches = run.switched_launches()
    run.steps(None)
    assert run.switched_launches() == launches + 1
    assert run.stabilizers() == ["none", "compensated"]
    assert "in some calls only" in run.reason("monitor_error")
    run.steps(WIDE)
    assert run.stabilizers() == ["none"] * 2


def test_a_switch_that_does_not_fit_the_heads_is_reported_and_kept(run):
    run.switched()
    run.model.layers[1].head_dim = 32
    run.steps(None)
    assert run.switched_launches() == 0
    assert run.stabilizers() == ["none"]
    assert run.events()[-1] == (1, (0, 1), "none")
    assert "it has 1 heads now, and the switch was made for 2" in run.reason()
    assert run.session.state_dict()["stabilizers"] == {SITE: ["compensated"] * 2}
    run.model.layers[1].head_dim = 16
    run.steps(None)
    assert run.switched_launches() == 1
    assert run.events()[-1] == (2, (0, 1), "compensated")


def test_a_replaced_module_is_no_longer_reported(run):
    run.switched()
    run.model.layers[1] = Attention()
    run.steps(None)
    assert SITE not in run.session.instrumentation.stabilizers()
    assert run.events()[-1] == (1, (0, 1), "none")
    assert "no longer in the model" in run.reason()
    assert "layers.0" in run.session.instrumentation.stabilizers()


def test_a_policy_switches_at_a_refused_batch_what_earlier_batches_could(tmp_path):
    run = Run(tmp_path, every_n_train_steps=1, policy=Policy("compensated", scope="head"))
    run.steps(None)
    alarm = Alarm(1, SITE, (0,), "w_q_growth", "made up")
    run.session._sampled.detectors.update = lambda _: [alarm] if run.step == 1 else []
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
