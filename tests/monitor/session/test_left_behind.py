"""A session that Ctrl-C left within a step lets the next one have the model."""

import gc
import logging

import pytest
import torch

from guardbit import MonitorSession, Policy
from guardbit.monitor.presence import _present
from guardbit.store import read_end
from tests.monitor.session.plain_loop import SITES, Loop


def interrupted(loop, steps=3, where="forward"):
    """Trains, and is interrupted within a step, which nobody tells the session."""
    for step in range(steps + 1):
        loop.session.begin_batch(step)
        loop.optimizer.zero_grad()
        if step == steps and where == "before the forward":
            return
        if step == steps and where == "forward":
            hook = loop.model.layers[1].register_forward_pre_hook(interrupt)
            with pytest.raises(KeyboardInterrupt):
                loop.backward(step)
            hook.remove()
            return
        loss = loop.backward(step)
        if step == steps:
            return
        loop.optimizer.step()
        loop.session.loss(loss)
        loop.session.end_step()


def interrupt(*_):
    raise KeyboardInterrupt


def another(loop, **settings):
    """A second loop with the first one's model."""
    second = Loop.__new__(Loop)
    second.model, second.optimizer, second.losses = loop.model, loop.optimizer, {}
    second.session = MonitorSession(loop.model, every_n_train_steps=1, **settings)
    Loop.made.append(second)
    return second


@pytest.mark.parametrize("where", ["before the forward", "forward", "after the backward"])
def test_the_next_session_watches_the_model(where, tmp_path, caplog):
    first = Loop(every_n_train_steps=1, dirpath=tmp_path / "first")
    interrupted(first, where=where)
    with caplog.at_level(logging.WARNING):
        second = another(first, dirpath=tmp_path / "second")
    (line,) = [r.getMessage() for r in caplog.records if "left" in r.getMessage()]
    assert "left within step 3" in line and "closed now" in line
    second.run(range(3))
    assert read_end(tmp_path / "first") == "interrupted"
    assert second.session.sampled_step == 2
    assert second.session.coverage == (len(SITES), len(SITES))


def test_a_session_that_was_closed_within_its_step_waits_for_it_no_longer():
    first = Loop(every_n_train_steps=1)
    interrupted(first)
    first.session.close()
    second = another(first)
    second.run(range(2))
    assert second.session.sampled_step == 1


def test_the_one_that_was_left_does_nothing_more():
    first = Loop(every_n_train_steps=1, policy=Policy("exact_delta"))
    interrupted(first)
    first.session.switch("layers.0", "exact_delta", [0])  # waits for the end of the step
    second = another(first)
    with second.session.step(0):
        second.backward(0)
    first.session.end_step()
    first.session.begin_batch(4)
    first.session.close()
    with second.session.step(1):
        second.backward(1)
    assert second.session.sampled_step == 1
    assert second.session.instrumentation.switched == []
    assert second.session.instrumentation.is_installed


@pytest.mark.parametrize("is_over", [False, True])
def test_a_session_between_its_steps_keeps_its_model(is_over):
    first = Loop(every_n_train_steps=1)
    if is_over:
        with first.session.step(0):
            first.backward(0)
    with pytest.raises(ValueError, match="instrumented already"):
        MonitorSession(first.model)
    with first.session.step(1):
        first.backward(1)
    assert first.session.sampled_step == 1


def test_a_step_of_another_model_goes_on():
    first, other = Loop(every_n_train_steps=1), torch.nn.MultiheadAttention(32, 2)
    first.session.begin_batch(0)
    first.backward(0)
    session = MonitorSession(other)
    first.session.end_step()
    assert first.session.sampled_step == 0
    session.close()


def test_sessions_that_are_gone_are_forgotten():
    gc.collect()
    before = len(_present)
    loop = Loop(every_n_train_steps=1)
    loop.run(range(1))
    Loop.made.pop()
    del loop
    gc.collect()
    assert len(_present) <= before
