"""Errors below every call from training: the run keeps its bits, reports it once, and ends."""

import logging

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from guardbit import MonitorSession, flash_attention, read_events
from guardbit.kernels.runtime import runtime
from guardbit.monitor import journal, policy, ranks, sampled, sites
from guardbit.monitor.interception import hooks, installation, references, seen, watching
from guardbit.monitor.interception.entry_points import base, multi_head, sdpa
from guardbit.monitor.interception.frames import frame_stack
from guardbit.monitor.measure import Measurement
from guardbit.monitor.measure.measurement import AttentionMetric, RunProbe
from guardbit.monitor.policy import Policy
from tests import toys
from tests.faults.running import leftovers

ERRORS = [
    MemoryError(),
    RecursionError("maximum recursion depth exceeded"),
    OverflowError("int too large"),
    torch.OutOfMemoryError("out of memory"),
    KeyError("on purpose"),
]


class Attention(toys.Attention):
    """Calls attention in each way that GuardBit stands in for."""

    def __init__(self):
        super().__init__(bias=False, has_out=False, is_residual=False)
        self.multi_head = nn.MultiheadAttention(32, 2, batch_first=True)

    def attend(self, q, k, v):
        y = checkpoint(super().attend, q, k, v, use_reentrant=False)
        return y + flash_attention(q, k, v, causal=True)

    def forward(self, x):
        y = super().forward(x)
        return x + y + self.multi_head(y, y, y)[0]


def train(session_of=None, steps=2):
    torch.manual_seed(0)
    model = nn.Sequential(Attention())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    session = session_of and session_of(model)
    for step in range(steps):
        if session:
            session.begin_batch(step)
        loss = model(torch.randn(1, 4, 32)).square().mean()
        loss.backward()
        if session:
            session.loss(loss)
            session.grad_norm(1.0)
            session.end_step()
            session.state_dict()
        optimizer.step()
        optimizer.zero_grad()
    if session:
        session.close()
    return model


@pytest.fixture(scope="module")
def unwatched():
    return [p.detach().clone() for p in train().parameters()]


def left_in(model):
    # And in what `from ... import` made, as in this file.
    return leftovers(model) + [checkpoint] * (checkpoint is installation.checkpoint)


#: Entry -> what lies below it, and is made to fail; of the runtime, which all files share, one
#: method as one file sees it.
BELOW = {
    "begin_batch: sampling": (sites.Instrumentation, "rest"),
    "begin_batch: measuring": (Measurement, "begin"),
    "begin_batch: listening": (sites.Instrumentation, "observe"),
    "begin_batch: opening the journal": (journal, "is_run"),
    "begin_batch: the folder": (journal, "RunWriter"),
    "begin_batch: what is remembered": (journal.Findings, "events"),
    "begin_batch: the journal so far": (journal, "read_events"),
    "loss": (RunProbe, "take"),
    "end_step: exchanging": (ranks, "exchanged"),
    "end_step: metrics": (Measurement, "of_weights"),
    "end_step: samples": (Measurement, "receive"),
    "end_step: sums": (Measurement, "add"),
    "end_step: sending": (Measurement, "send"),
    "end_step: largest": (sampled, "largest"),
    "end_step: writing": (journal.Journal, "add"),
    "end_step: detectors": (sampled.Detectors, "update"),
    "end_step: policy": (policy.Policy, "decide"),
    "end_step: verdict": (journal, "verdict_of"),
    "end_step: sites": (journal.Journal, "describe"),
    "state_dict: detectors": (sampled.Detectors, "state_dict"),
    "state_dict: measurement": (Measurement, "state_dict"),
    "state_dict: stabilizers": (sites.Instrumentation, "asked"),
    "close: dropping calls": (Measurement, "discard"),
    "close: the journal": (journal.Journal, "close"),
    "hook: entering": (hooks, "frames", "push"),
    "hook: leaving": (hooks, "frames", "pop"),
    "hook: threads": (hooks, "runtime", "is_other_thread"),
    "call: its site": (base, "runtime", "is_inside_site"),
    "call: its refusal": (sdpa.SDPA, "bind"),
    "call: noting it": (base, "seen", "note_call"),
    "call: noting it first": (seen, "describe"),
    "call: its state": (base, "runtime", "site"),
    "call: recomputing": (installation, "push"),
    "call in backward": (AttentionMetric, "update"),
    "watched call: its refusal": (multi_head, "base", "why_kind"),
    "watched call: its output": (watching, "autocast_tensors"),
    "watched call in backward": (watching, "AttentionCall"),
}


def fails_with(error):
    def fail(*_, **__):
        raise error

    return fail


class FailingIn:
    """An object, one method of which fails."""

    def __init__(self, whole, method, error):
        self._whole = whole
        setattr(self, method, fails_with(error))

    def __getattr__(self, name):
        return getattr(self._whole, name)


#: Each entry with an error, in turn, as the guard treats all alike; one with every error.
FAULTS = {(entry, n % len(ERRORS)) for n, entry in enumerate(BELOW)} | {
    ("call: noting it", n) for n in range(len(ERRORS))
}


@pytest.mark.parametrize(("entry", "error"), sorted(FAULTS))
def test_a_fault_changes_no_bit_is_told_once_and_leaves_nothing(
    entry, error, unwatched, tmp_path, monkeypatch, caplog
):
    # Of a type of its own: outside of sessions the first error of a type is told.
    error = type("Injected", (type(ERRORS[error]),), {})(*ERRORS[error].args)

    def session_of(model):
        session = MonitorSession(
            model,
            every_n_train_steps=1,
            policy=Policy("compensated", scope="head"),
            dirpath=tmp_path,
            num_rows=1,
        )
        owner, name, *method = BELOW[entry]
        failing = FailingIn(getattr(owner, name), *method, error) if method else fails_with(error)
        monkeypatch.setattr(owner, name, failing)
        return session

    model = train(session_of)
    monkeypatch.undo()
    assert all(map(torch.equal, model.parameters(), unwatched))
    assert left_in(model) == []
    failed = [line for line in caplog.messages if line.startswith("the stage '")]
    # A function that many call may fail in three stages, in each once.
    assert failed and len({line.split("'")[1] for line in failed}) == len(failed) <= 3
    assert all(str(error) in line for line in failed)


@pytest.mark.parametrize(
    ("below", "error"),
    [((seen, "forget"), ERRORS[0]), ((hooks, "_dicts"), ERRORS[1]),
     ((references, "setattr"), ERRORS[4])],
    ids=str,
)  # fmt: skip
def test_what_close_could_not_take_out_a_second_close_does(error, below, monkeypatch, caplog):
    model = nn.Sequential(Attention(), Attention())
    session = MonitorSession(model)
    with monkeypatch.context() as broken:
        broken.setattr(*below, fails_with(error), raising=False)
        session.close()
    assert sum("the stage 'close' failed" in line for line in caplog.messages) == 1
    if below[0] is not references:
        assert F.scaled_dot_product_attention is not sdpa.scaled_dot_product_attention
    session.close()
    assert left_in(model) == []
    MonitorSession(model).close()


def test_a_logging_handler_that_raises_costs_nothing(unwatched, tmp_path):
    class Raising(logging.Handler):
        def emit(self, record):
            raise MemoryError

    logger, handler = logging.getLogger("guardbit"), Raising()
    logger.addHandler(handler)

    try:
        model = train(
            lambda model: MonitorSession(
                model, every_n_train_steps=1, dirpath=tmp_path, rules=(toys.Fires("0"),)
            )
        )
    finally:
        logger.removeHandler(handler)
    assert all(map(torch.equal, model.parameters(), unwatched))
    assert read_events(tmp_path)["kind"].tolist() == ["alarm", "verdict"]


class Interrupted(toys.Attention):
    """Attention that is interrupted after its call, while `on` holds."""

    def __init__(self, interrupt):
        super().__init__(has_out=False)
        self.interrupt, self.on = interrupt, False

    def attend(self, q, k, v):
        y = super().attend(q, k, v)
        if self.on:
            raise self.interrupt
        return y


def others_attention(x):
    return F.scaled_dot_product_attention(x, x, x)


@pytest.mark.parametrize(
    ("interrupt", "compiled"), [(SystemExit, False), (KeyboardInterrupt, True)]
)
def test_after_an_interruption_others_do_not_run_the_modules_kernel(interrupt, compiled):
    model = nn.Sequential(Interrupted(interrupt))
    x = torch.randn(1, 8, 32, generator=torch.Generator().manual_seed(0)).bfloat16()
    model.bfloat16()
    session = MonitorSession(model, every_n_train_steps=1)
    with session.step(0):
        model(x).float().square().mean().backward()
    session.switch("0", "row_max")
    site = session.instrumentation.sites["0"]
    model[0].on = True
    with pytest.raises(interrupt), session.step(1):
        model(x)
    launches = site.launches
    function = others_attention
    if compiled:
        function = torch.compile(others_attention, backend="eager", fullgraph=True)
    q = torch.randn(1, 2, 8, 16).bfloat16()
    assert torch.equal(function(q), sdpa.original(q, q, q))
    assert site.launches == launches
    # The model itself goes on as if nothing had been.
    model[0].on = False
    with session.step(1):
        model(x).float().square().mean().backward()
    assert site.launches["forward", "row_max"] == launches["forward", "row_max"] + 1
    assert not runtime.running and not frame_stack
    session.close()


def test_an_interruption_costs_no_recompilation():
    model = nn.Sequential(Interrupted(KeyboardInterrupt)).bfloat16()
    session = MonitorSession(model, every_n_train_steps=100)
    run = torch.compile(model, backend="eager", fullgraph=True)
    x = torch.randn(1, 8, 32).bfloat16()
    run(x)
    counted = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    hook = model.register_forward_pre_hook(fails_with(KeyboardInterrupt()))
    try:
        with pytest.raises(KeyboardInterrupt):
            model(x)  # eagerly
    finally:
        hook.remove()
    run(x)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == counted
    session.close()
