"""A loop that tells its steps wrongly is told so once, and one that tells them well is not."""

import logging

import pytest
import torch
from torch import nn

from guardbit import MonitorSession
from guardbit.monitor.schedule import Stepping


@pytest.fixture
def said():
    return []


@pytest.fixture
def stepping(said):
    return Stepping(said.append)


def test_steps_that_begin_and_end_need_no_word(stepping, said):
    for step in range(10):
        for _ in range(3):  # micro-batches
            stepping.begin(step)
            stepping.use("loss")
        stepping.use("end_step")
        stepping.end()
    stepping.begin(3)  # back to an older checkpoint
    stepping.end()
    stepping.close()
    assert said == []


def test_steps_that_an_error_cut_short_are_no_mistake(stepping, said):
    for step in (0, 1, 2):  # the loop caught errors in steps 0 and 1
        stepping.begin(step)
    stepping.end()
    for _ in range(2):  # a step that is done once more
        stepping.begin(3)
        stepping.end()
    for _ in range(5):  # and one that takes several tries
        stepping.begin(4)
        stepping.abandon()
    stepping.begin(4)
    stepping.end()
    stepping.close()
    assert said == []


def test_steps_that_never_end_are_told_once(stepping, said):
    for step in range(10):
        stepping.begin(step)
    stepping.close()
    (line,) = said
    assert line.startswith("3 steps in a row have begun and not ended, the last of them step 2: ")


@pytest.mark.parametrize("steps", [[0], [0, 1], [0] * 20])
def test_a_session_in_which_no_step_ended_says_so_at_its_end(stepping, said, steps):
    for step in steps:
        stepping.begin(step)
    stepping.close()
    (line,) = said
    assert line.startswith(f"steps have begun, up to step {steps[-1]}, and none has ended: nothing")


def test_more_micro_batches_than_anybody_has_are_told_while_the_run_goes_on(stepping, said):
    for _ in range(1024):
        stepping.begin(0)
    assert said == []
    stepping.begin(0)
    (line,) = said
    assert line.startswith("step 0 has begun 1024 times and not ended")


def test_a_number_that_does_not_move_is_told_once(stepping, said):
    for _ in range(10):
        stepping.begin(7)
        stepping.end()
    (line,) = said
    assert line.startswith("step 7 has begun and ended 2 times, and begins again")


@pytest.mark.parametrize("what", ["loss", "end_step"])
def test_what_comes_without_a_step_is_told_once(stepping, said, what):
    for _ in range(3):
        stepping.use(what)
    stepping.close()
    (line,) = said
    assert line.startswith(
        f"{what}() was called, but no step has begun: call begin_batch(step) before"
    )


def test_a_session_without_a_step_says_so_at_its_end(stepping, said):
    stepping.close()
    (line,) = said
    assert line.startswith("no step was watched, because none has begun")


def run(begin, end):
    model = nn.TransformerEncoderLayer(32, 2, 64, dropout=0.0, batch_first=True)
    session = MonitorSession(model, every_n_train_steps=2)
    for step in range(6):
        if begin:
            session.begin_batch(step)
        loss = model(torch.ones(2, 4, 32)).square().mean()
        loss.backward()
        session.loss(loss)
        if end:
            session.end_step()
    session.close()
    session.end_step()  # only then a step that goes on lets the model go


@pytest.mark.parametrize(
    ("begin", "end", "said"),
    [
        (False, True, "loss() was called, but no step has begun"),
        (True, False, "3 steps in a row have begun and not ended"),
        (False, False, "loss() was called, but no step has begun"),
    ],
)
def test_a_session_that_sees_no_step_is_not_silent(begin, end, said, caplog):
    with caplog.at_level(logging.WARNING, "guardbit"):
        run(begin, end)
    assert [record.message for record in caplog.records if said in record.message] != []


def test_a_good_loop_hears_nothing(caplog):
    with caplog.at_level(logging.WARNING, "guardbit"):
        run(begin=True, end=True)
    assert "step" not in caplog.text
