"""What runs instead of a stabilizer that a call cannot run is reported to the user."""

import logging
from unittest import mock

import pytest
import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from guardbit import MonitorSession, instrument, read_events
from guardbit.kernels import dispatch, heads
from guardbit.kernels.engines import proof
from guardbit.kernels.runtime import runtime
from guardbit.monitor.policy import Policy
from guardbit.store import read_metadata
from tests.toys import Attention, Model, recorded

SITE = "layers.0"
MASK = torch.ones(12, 12, dtype=torch.bool).tril()
DOUBTED = proof.Proof("FLASH_ATTENTION", "here", 0.0, 0.0, "it lies")


class Run:
    """A watched model in BF16, switched by hand."""

    def __init__(self, path, **settings):
        torch.manual_seed(0)
        self.path, self.model, self.step = path, Model(Attention()), 0
        settings = {"every_n_train_steps": 1000, "dirpath": path, "strict": True, **settings}
        self.session = MonitorSession(self.model, **settings)
        self.run = self.model

    def one(self, math=False, batches=1, rows=12, doubted=False):
        kernels = [SDPBackend.MATH] if math else [*SDPBackend.__members__.values()]
        proof_of = (lambda *_: DOUBTED) if doubted else heads.proof_of
        with self.session.step(self.step):
            for batch in range(batches):
                if batch:
                    self.session.begin_batch(self.step)
                with (
                    sdpa_kernel(kernels),
                    mock.patch.object(heads, "proof_of", proof_of),
                    torch.autocast("cpu", torch.bfloat16),
                ):
                    self.run(torch.randn(2, rows, 32)).square().mean().backward()
        self.step += 1
        return self

    def attention(self, **attributes):
        for name, value in attributes.items():
            setattr(self.model.layers[0], name, value)
        return self

    def stabilizers(self):
        return self.session.instrumentation.stabilizers()[SITE]

    def events(self, kind="switch"):
        return recorded(self.path, kind, "step", "heads", "stabilizer")

    def reason(self, kind="switch"):
        return recorded(self.path, kind, "why")[-1][0]


@pytest.fixture
def run(tmp_path):
    run = Run(tmp_path / "run")
    yield run
    run.session.close()


CASES = {
    "flash": ({}, {}, "exact_delta", ""),
    "masked": ({"mask": MASK}, {}, "exact_delta", ""),
    "math": ({}, {"math": True}, "none", "exact_delta would correct nothing: PyTorch's MATH"),
    # Which on CPUs only the math kernel knows.
    "dropout": ({"dropout_p": 0.5}, {}, "none", "takes delta from P itself"),
    "doubted": ({}, {"doubted": True}, "compensated", "(here): it lies"),
    "both": ({"mask": MASK}, {"doubted": True}, "none", "no kernel can replace it"),
}


@pytest.mark.parametrize("case", CASES)
def test_what_exact_delta_becomes_is_told_once_and_so_is_its_return(run, case):
    attributes, how, ran, why = CASES[case]
    run.one()
    run.session.switch(SITE, "exact_delta", heads=[1])
    run.attention(**attributes).one(**how).one(**how).one(**how)
    assert run.stabilizers() == ["none", ran]
    assert run.session.instrumentation.asked()[SITE] == ["none", "exact_delta"]
    state = run.session.state_dict()
    assert state["all"][0]["running"][SITE] == ["none", ran]
    assert state["stabilizers"][SITE] == ["none", "exact_delta"]
    expected = [(0, (1,), "exact_delta"), (1, (1,), ran)][: 1 if ran == "exact_delta" else 2]
    assert run.events() == expected
    assert why in run.reason()
    run.attention(mask=None, dropout_p=0.0).one()
    assert run.stabilizers() == ["none", "exact_delta"]
    assert run.events() == expected + [(4, (1,), "exact_delta")] * (len(expected) - 1)
    assert run.events("monitor_error") == []


def test_each_head_is_told_what_takes_its_stabilizer_s_place(run):
    run.one()
    run.session.switch(SITE, "compensated", heads=[0])
    run.session.switch(SITE, "row_max", heads=[1])
    run.attention(mask=MASK).one()
    assert run.stabilizers() == ["exact_delta", "none"]
    events = read_events(run.path).iloc[-2:]
    assert list(events.heads) == [(0,), (1,)]
    assert list(events.stabilizer) == ["exact_delta", "none"]
    assert "exact_delta runs instead of compensated" in events.why.iloc[0]
    assert "row_max takes no mask: exact_delta would work" in events.why.iloc[1]


def test_where_nothing_works_it_is_not_said_that_another_would(run):
    run.one()
    run.session.switch(SITE, "compensated")
    run.attention(mask=MASK, dropout_p=0.1).one()
    assert run.stabilizers() == ["none"] * 2
    assert "compensated takes no mask, and exact_delta is not possible: " in run.reason()
    assert "dropout 0.1" in run.reason()
    assert "would work" not in run.reason()


@pytest.mark.parametrize(
    "dropout_p, mask, is_told", [(0.1, MASK, 1), (0.1, None, 0), (0.0, MASK, 0)]
)
def test_calls_in_which_no_stabilizer_works_are_told_before_any_alarm(
    tmp_path, caplog, dropout_p, mask, is_told
):
    run = Run(tmp_path, every_n_train_steps=1, policy=Policy("compensated", scope="head"))
    run.attention(mask=mask, dropout_p=dropout_p).one()
    run.one()
    run.session.close()
    told = [r for r in caplog.messages if "no stabilizer works at layers.0" in r]
    assert len(told) == is_told
    if told:
        assert "a mask and dropout (0.1)" in told[0]


def test_a_switch_is_asked_for_until_it_has_run(run):
    run.one()
    run.session.switch(SITE, "exact_delta")
    assert run.stabilizers() == ["exact_delta"] * 2
    run.one(doubted=True)
    assert run.stabilizers() == ["compensated"] * 2
    # An evaluation has no backward, and says nothing about the heads' one.
    with torch.no_grad():
        run.model(torch.randn(2, 12, 32))
    assert run.stabilizers() == ["compensated"] * 2
    run.session.switch(SITE, "none")
    run.one()
    assert run.stabilizers() == ["none"] * 2
    assert [event[2] for event in run.events()] == ["exact_delta", "compensated", "none"]


def test_a_journal_ends_with_what_the_heads_ran_last(run):
    run.one()
    run.session.switch(SITE, "exact_delta")
    for step in range(7):
        run.one(doubted=step % 2 == 0)
    assert run.stabilizers() == ["compensated"] * 2
    run.session.close()
    assert run.events()[-1] == (7, (0, 1), "compensated")
    told = run.events()
    run.session.close()
    assert run.events() == told


def test_an_earlier_micro_batch_that_ran_otherwise_is_told(run):
    run.one()
    run.session.switch(SITE, "exact_delta")
    attention = run.model.layers[0]
    forward, masks = attention.forward, [MASK, None]

    def of_micro_batch(x):
        attention.mask = masks[0]
        masks.reverse()
        return forward(x)

    attention.forward = of_micro_batch
    run.one(batches=2, doubted=True)
    assert run.stabilizers() == ["compensated"] * 2
    assert [event[2] for event in run.events()] == ["exact_delta", "compensated"]
    run.session.switch(SITE, "compensated")
    run.one(math=True, batches=2)
    assert "in some calls only: compensated takes no mask" in run.reason("monitor_error")


@pytest.mark.parametrize(
    "name, direction",
    [("compensated", "forward"), ("compensated", "backward"), ("exact_delta", "backward")],
)
def test_kernels_that_fail_are_reported(run, monkeypatch, name, direction):
    def fail(*_, **__):
        raise RuntimeError("no such instruction")

    run.one()
    run.session.switch(SITE, name, heads=[1])
    with monkeypatch.context() as patched:
        for function in ("launcher", "carry_exact_delta", "carry_compensated_delta"):
            if direction == "backward" and function == "launcher":
                continue
            patched.setattr(dispatch, function, fail)
        run.one().one()
        assert run.stabilizers() == ["none", "none"]
        assert run.events() == [(0, (1,), name), (1, (1,), "none")]
        assert "failed (RuntimeError: no such instruction)" in run.reason()
    run.one()
    assert run.stabilizers() == ["none", "none"], "it is not tried again"
    run.session.switch(SITE, name, heads=[1])
    run.one()
    assert run.stabilizers() == ["none", name]
    assert [event[2] for event in run.events()] == [name, "none", name]


def test_proofs_are_told_in_the_step_that_made_them(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(proof, "_proofs", {})
    run = Run(tmp_path).one()
    assert "proofs" not in read_metadata(run.path)
    run.session.switch(SITE, "exact_delta")
    with caplog.at_level(logging.WARNING, "guardbit"):
        run.one().one()
        (told,) = read_metadata(run.path)["proofs"]
        assert told.startswith("FLASH_ATTENTION (bfloat16, head size 16, no mask, causal, cpu")
        assert told.endswith("trusted with an exact delta")
        assert "cannot be given an exact delta" not in caplog.text
        run.one(math=True).one(math=True).one(math=True, rows=16)
    assert len(proof.proofs()) == 3, "of another length"
    _, failed = read_metadata(run.path)["proofs"]
    assert failed.startswith("MATH (") and "not trusted: its backward takes delta" in failed
    assert "gradients that differ" not in failed, "nothing was measured"
    warned = [text for text in caplog.messages if "cannot be given an exact delta" in text]
    assert len(warned) == 1 and failed in warned[0]
    run.session.close()


def test_a_later_run_of_the_process_tells_what_it_relies_on(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(proof, "_proofs", {})
    for name in ("first", "second"):
        caplog.clear()
        run = Run(tmp_path / name).one()
        run.session.switch(SITE, "exact_delta")
        run.one(math=True).session.close()
        assert len(read_metadata(tmp_path / name)["proofs"]) == 1
        warned = [text for text in caplog.messages if "cannot be given an exact delta" in text]
        assert len(warned) == (name == "first"), "found out once"


def test_room_is_kept_where_a_policy_or_nobody_may_ask_for_compensated():
    assert runtime.keeps_residuals
    plain = instrument(Model(Attention()))
    assert runtime.keeps_residuals
    plain.remove()
    expected = [("exact_delta", False), (None, False), ("compensated", True), ("row_max", True)]
    sessions = []
    for name, kept in expected:
        sessions.append(
            MonitorSession(Model(Attention()), policy=Policy(name, scope="head") if name else None)
        )
        assert runtime.keeps_residuals == kept
    for session, kept in zip(reversed(sessions), (True, False, False, True), strict=True):
        session.close()
        session.close()
        assert runtime.keeps_residuals == kept


@pytest.mark.parametrize("refused", ["model", "setting"])
def test_a_session_that_is_refused_leaves_the_room_alone(refused):
    model = nn.ReLU() if refused == "model" else Model(Attention())
    settings = {} if refused == "model" else {"every_n_train_steps": 0}
    with pytest.raises(ValueError):
        MonitorSession(model, **settings)
    assert runtime.keeps_residuals


@pytest.mark.parametrize(
    # With dropout `compensated` takes the place of `exact_delta`.
    "name, dropout_p",
    [("exact_delta", 0.0), ("compensated", 0.0), ("exact_delta", 0.1)],
)
@pytest.mark.filterwarnings("ignore:The .grad attribute")  # read by the compiler
def test_compiled_graphs_keep_room_for_what_may_be_asked_for(tmp_path, name, dropout_p):
    kept = []  # bytes of INT8 that the graph keeps for its backward

    def pack(x):
        kept.append(x.numel() if x.dtype == torch.int8 else 0)
        return x

    run = Run(tmp_path, policy=Policy(name, scope="head")).attention(dropout_p=dropout_p)
    run.run = torch.compile(run.model, backend="aot_eager", fullgraph=True)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        run.one()
    without_room = name == "exact_delta" and not dropout_p
    assert sum(kept) == (0 if without_room else 2 * 2 * 12 * 16)
    with torch._dynamo.config.patch(error_on_recompile=True):
        run.session.switch(SITE, name, heads=[0])
        run.one()
        # The math kernel, the only one with dropout on CPUs, does not round delta.
        assert run.stabilizers() == ["none" if dropout_p else name, "none"]
        run.session.switch(SITE, "compensated")
        run.one().one()
    assert run.stabilizers() == [name if without_room else "compensated"] * 2
    assert ("the compiled graph has no room" in run.reason()) is without_room
    run.session.close()
