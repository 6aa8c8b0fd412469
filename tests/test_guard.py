"""The guard between training and GuardBit: every entry has it, and what it lets pass."""

import inspect
import sys
from contextlib import nullcontext

import lightning.pytorch as pl
import pytest
import torch
from torch import nn
from transformers import TrainerCallback

import guardbit
from guardbit import MonitorSession, guard
from guardbit.guard import Guarded
from guardbit.kernels import flex, op
from guardbit.monitor.interception import installation, seen, watching
from guardbit.monitor.interception.entry_points import ENTRY_POINTS
from guardbit.monitor.session import Session
from tests.toys import instrumented

#: The first raises on purpose: it says that there is no second derivative. The second is PyTorch's
#: own code, in which calls of GuardBit's are guarded.
NO_DOORS = {
    "guardbit.kernels.op._NotDifferentiable",
    "guardbit.kernels.flex.FlexAttentionAutogradOp",
}


def unguarded(functions):
    return [function for function in functions if not hasattr(function, guard._GUARDED)]


def entries_of(kind):
    """What others call of a class: its own public methods and properties, and the constructor."""
    special = {"__init__", "__enter__", "__exit__"}
    for name, found in vars(kind).items():
        if name.startswith("_") and name not in special:
            continue
        if isinstance(found, property):
            yield found.fget
        elif inspect.isfunction(found):
            yield found


@pytest.mark.parametrize(
    "kind",
    [
        Session,
        MonitorSession,
        guardbit.AttentionMonitor,
        guardbit.AutoStabilizer,
        guardbit.HuggingFaceMonitor,
    ],
)
def test_every_method_that_training_calls_is_guarded(kind):
    assert issubclass(kind, Guarded)
    found = list(entries_of(kind))
    assert found and unguarded(found) == []


def test_single_entries_are_guarded():
    of_ops = [installation.checkpoint, op._differentiable, op.run_forward, op.run_backward]
    of_ops += [op._call_of_forward, op._call_of_backward]
    of_ops += [flex._begin, flex._lse_gradient, flex._observe]
    while_compilers_trace = [seen._drop_stale, seen._read_inputs, seen._read_call]
    assert unguarded([*of_ops, *while_compilers_trace]) == []


@pytest.mark.parametrize("base", [pl.Callback, TrainerCallback])
def test_every_callback_of_a_framework_is_guarded(base):
    ours = [kind for kind in base.__subclasses__() if kind.__module__.startswith("guardbit.")]
    assert ours
    assert all(issubclass(kind, Guarded) for kind in ours)


def test_every_hook_and_stand_in_is_guarded():
    model = nn.Sequential(nn.MultiheadAttention(16, 2), nn.Linear(4, 4))
    with instrumented(model):
        hooks = [
            hook
            for module in model.modules()
            for hook in (*module._forward_hooks.values(), *module._forward_pre_hooks.values())
        ]
    assert hooks
    assert unguarded([*hooks, *(entry.stand_in for entry in ENTRY_POINTS)]) == []


def test_every_backward_is_guarded():
    ours = {
        f"{kind.__module__}.{kind.__qualname__}": kind
        for kind in torch.autograd.Function.__subclasses__()
        if kind.__module__.startswith("guardbit.")
    }
    assert {f"{op.__name__}._Attention", f"{watching.__name__}._Output"} <= ours.keys()
    assert unguarded(kind.backward for name, kind in ours.items() if name not in NO_DOORS) == []


class Entered(Guarded):
    def __init__(self, strict=False):
        self.told, self.strict = [], strict

    def _contain(self, error, where):
        if self.strict:
            raise error
        self.told.append((error, where))

    @guard.method(lambda self: "otherwise")
    def enter(self, error):
        if error is not None:
            raise error
        return "inside"

    @guard.method(lambda self: "otherwise")
    def refuse(self):
        with guard.refusing():
            raise ValueError("cadence is 0")


@pytest.mark.parametrize("kind", [MemoryError, RecursionError, torch.OutOfMemoryError, KeyError])
def test_an_error_ends_in_the_guard(kind):
    made, error = Entered(), kind("on purpose")
    assert made.enter(None) == "inside"
    assert made.enter(error) == "otherwise"
    assert made.told == [(error, "enter")]


@pytest.mark.parametrize(
    ("error", "is_strict"),
    [(KeyboardInterrupt(), False), (SystemExit(), False), (KeyError("on purpose"), True)],
)
def test_what_belongs_to_the_user_passes_and_a_strict_guard_raises(error, is_strict):
    made = Entered(is_strict)
    with pytest.raises(type(error)) as raised:
        made.enter(error)
    assert raised.value is error and made.told == []


def test_an_answer_to_the_caller_passes():
    made = Entered()
    with pytest.raises(ValueError, match="cadence is 0"):
        made.refuse()
    assert made.told == []


def test_a_checkpoint_ends_its_recomputation_though_an_error_comes_in_the_way():
    ended, told = (
        type("_StopRecomputationError", (Exception,), {"__module__": "torch.utils.checkpoint"})(),
        [],
    )

    def recompute():
        try:
            raise ended
        finally:
            raise MemoryError("on purpose")

    with pytest.raises(type(ended)) as raised:
        guard.function(told.append)(recompute)()
    assert raised.value is ended and told == []


def test_an_error_of_who_is_told_stays_inside_and_a_void_object_does_nothing():
    made, void = Entered(), Entered()
    made._contain = lambda error, where: 1 / 0
    void._is_void = True
    assert made.enter(KeyError()) == void.enter(KeyError()) == "otherwise"
    assert void.told == []


@pytest.mark.parametrize("is_needed", [True, False])
def test_a_second_try_has_the_same_frames_above_it(is_needed):
    told, callers, errors = [], [], []

    @guard.again(told.append, is_needed)
    def look():
        callers.append(sys._getframe(3))
        if errors:
            raise errors.pop()
        return "found"

    errors[:] = [KeyError("once")]
    assert look() == "found"
    assert callers == [sys._getframe()] * 2 and len(told) == 1
    errors[:] = [KeyError("twice"), KeyError("once")]
    if is_needed:
        with pytest.raises(KeyError, match="twice"):
            look()
        assert len(told) == 2  # the last is for the caller to tell
    else:
        assert look() is None
        assert len(told) == 3


@pytest.mark.parametrize(
    ("failures", "result", "told", "given_up"),
    [
        ({"before": 1, "after": 1}, 20, ["before", "after"], []),
        ({"before": 2}, 2, ["before"], ["before"]),  # the original's
        ({"after": 2}, 2, ["after"], ["after"]),
    ],
)
def test_a_stand_in_is_tried_twice_and_then_gives_up(failures, result, told, given_up):
    left, errors, last = dict(failures), [], []

    class Place:
        original = staticmethod(lambda x: x + 1)

    def fail(name):
        if left.get(name):
            left[name] -= 1
            raise OSError(name)

    def after(found):
        fail("after")
        return 10 * found

    def before(args, kwargs):
        fail("before")
        return guard.Around(args, kwargs, after)

    assert guard.stand_in(Place, before, None, errors.append, last.append)(1) == result
    assert ([str(error) for error in errors], [str(error) for error in last]) == (told, given_up)


@pytest.mark.parametrize("error", [MemoryError, KeyboardInterrupt])
@pytest.mark.parametrize("times", [1, 2])
def test_what_fails_to_be_undone_is_tried_a_second_time_and_all_else_is_undone(error, times):
    done, tried = [], []

    def fails():
        tried.append(len(tried))
        if len(tried) <= times:
            raise error

    to_undo = [lambda: done.append(1), fails, lambda: done.append(3)]
    with pytest.raises(error):
        guard.undo_all(to_undo)
    assert (done, tried) == ([3, 1], [0, 1])


def test_what_is_to_be_undone_after_a_call_is_undone_if_the_call_raises():
    done = []

    def breaks():
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        guard.then_undo(breaks, lambda: done.append("undone"))
    assert guard.then_undo(lambda: "result", lambda: done.append("again")) == "result"
    assert done == ["undone", "again"]


class Ending(Entered):
    error, error_at_last, has_ended = None, None, False

    def _end(self):
        self.has_ended = True
        if self.error_at_last:
            raise self.error_at_last

    @guard.method(lambda self: "otherwise", at_last=_end)
    def end(self):
        if self.error:
            raise self.error
        return "inside"


@pytest.mark.parametrize("error", [None, MemoryError, KeyboardInterrupt])
def test_a_method_that_ends_something_ends_it_whatever_it_raises(error):
    made = Ending()
    made.error = error
    with pytest.raises(error) if error is KeyboardInterrupt else nullcontext():
        assert made.end() == ("otherwise" if error else "inside")
    assert made.has_ended


@pytest.mark.parametrize("strict", [False, True])
def test_an_error_of_the_end_itself_comes_to_the_guard(strict):
    made = Ending(strict)
    made.error_at_last = OSError("at last")
    with pytest.raises(OSError, match="at last") if strict else nullcontext():
        assert made.end() == "inside"
    assert made.told == ([] if strict else [(made.error_at_last, "_end")])


def test_a_session_that_cannot_be_built_is_off_and_says_so(tmp_path, monkeypatch, caplog):
    def fails(*_, **__):
        raise MemoryError

    monkeypatch.setattr("guardbit.monitor.session.Measurement", fails)
    model = nn.TransformerEncoderLayer(16, 2, 16, dropout=0.0, batch_first=True)
    session = MonitorSession(model, dirpath=tmp_path)
    with session.step(0) as record:
        model(torch.ones(1, 4, 16)).sum().backward()
        record.loss(1.0)
    assert session.alarms == session.end_step() == []
    assert session.state_dict() == {}
    assert not session.is_sampled
    session.close()
    assert "UNWATCHED and unguarded: MemoryError" in caplog.text
    (why,) = guardbit.read_events(tmp_path)["why"]
    assert why == "the monitor is off, training goes on: MemoryError"
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def test_a_type_error_of_its_own_stays_with_the_guard(monkeypatch, caplog):
    def fails(*_, **__):
        raise TypeError("of GuardBit's own")

    monkeypatch.setattr("guardbit.callbacks.monitoring.Policy", fails)
    monkeypatch.setattr("guardbit.callbacks.monitoring.refusing", nullcontext)
    guardbit.AutoStabilizer()
    assert "UNWATCHED and unguarded: of GuardBit's own" in caplog.text


def test_other_arguments_of_a_framework_do_not_end_the_run(caplog):
    guardbit.AttentionMonitor().on_train_start("trainer", "module", "of a later version")
    assert "on_train_start" in caplog.text
