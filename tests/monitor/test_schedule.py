"""Which steps are sampled, and what a loop that begins or ends its steps wrongly is told."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from guardbit import MonitorSession
from guardbit.monitor.schedule import Schedule


def run(schedule, steps):
    """Runs whole steps; returns those that were sampled."""
    sampled = []
    for step in steps:
        schedule.begin(step)
        if schedule.is_sampled:
            sampled.append(step)
        assert schedule.end() == (step, step in sampled)
    return sampled


@given(st.integers(1, 9), st.lists(st.integers(0, 60), min_size=1, unique=True).map(sorted))
def test_the_first_step_at_or_after_each_multiple_is_sampled(cadence, steps):
    # A multiple is passed by a step if it lies after the one before and not after the step itself.
    passed = {
        after: [m for m in range(0, 61, cadence) if before < m <= after]
        for before, after in itertools.pairwise([steps[0] - 1, *steps])
    }
    assert run(Schedule(cadence), steps) == [step for step in steps if passed[step]]


@pytest.mark.parametrize(
    ("cadence", "counted"), [(1, []), (2, [*range(1, 24, 2)]), (4, [1, 6, 11, 13, 18, 23])]
)
def test_between_samples_one_step_is_counted_each_time_a_later_one(cadence, counted):
    assert [step for step in range(24) if Schedule(cadence).is_counted(step)] == counted


def test_of_all_steps_only_the_first_is_sampled_because_it_is_wanted():
    assert run(Schedule(100, wants_first=lambda: True), [7, 8, 9]) == [7]


def test_a_run_that_goes_on_passes_no_multiple_twice():
    schedule = Schedule(10)
    schedule.last_ended = 30
    assert run(schedule, [31, 39, 44]) == [44]


def test_a_step_that_is_abandoned_never_was_and_may_begin_again():
    schedule = Schedule(4)
    schedule.begin(4)
    assert schedule.is_sampled and schedule.is_within_step
    schedule.abandon()
    assert not schedule.is_sampled and not schedule.is_within_step
    assert schedule.end() is None and schedule.last_ended is None
    assert run(schedule, [4]) == [4]
    assert not schedule.is_within_step and schedule.last_ended == 4


@pytest.fixture
def said():
    return []


@pytest.fixture
def schedule(said):
    return Schedule(100, said.append)


def test_steps_that_begin_and_end_need_no_word(schedule, said):
    for step in range(10):
        for _ in range(3):  # micro-batches
            schedule.begin(step)
            schedule.use("loss")
        schedule.end()
    schedule.last_ended = 2  # as `load_state_dict` of an older checkpoint does
    schedule.begin(3)
    schedule.end()
    schedule.close()
    assert said == []


def test_steps_that_an_error_cut_short_are_no_mistake(schedule, said):
    for step in (0, 1, 2):  # the loop caught errors in steps 0 and 1
        schedule.begin(step)
    schedule.end()
    for _ in range(2):  # a step that is done once more
        schedule.begin(3)
        schedule.end()
    for _ in range(5):  # and one that takes several tries
        schedule.begin(4)
        schedule.abandon()
    schedule.begin(4)
    schedule.end()
    schedule.close()
    assert said == []


def test_a_first_step_of_too_many_batches_is_told_and_measured_no_more(schedule, said):
    schedule.begin(0)
    assert schedule.is_sampled
    for _ in range(1500):
        schedule.begin(0)
    (line,) = said
    assert line.startswith("1000 batches have begun and no step has ended: ")
    assert not schedule.is_sampled
    schedule.end()
    schedule.begin(100)
    assert schedule.is_sampled


@pytest.mark.parametrize("steps", [[0], [0, 1], [0] * 20])
def test_a_session_in_which_no_step_ended_says_so_at_its_end(schedule, said, steps):
    for step in steps:
        schedule.begin(step)
    schedule.close()
    (line,) = said
    assert line.startswith(f"steps have begun, up to step {steps[-1]}, and none has ended: they")


@pytest.mark.parametrize(
    ("steps", "ends", "told"),
    [
        (range(10), False, "3 steps in a row have begun and not ended, the last of them step 2: "),
        ([7] * 10, True, "step 7 has begun and ended 2 times, and begins again"),
        ([5, 6, 7] * 5, True, "step 5 begins after step 7 has ended: its samples replace"),
    ],
    ids=["none ends", "one number", "anew with each epoch"],
)
def test_steps_that_do_not_go_on_are_told_once(schedule, said, steps, ends, told):
    for step in steps:
        schedule.begin(step)
        if ends:
            schedule.end()
    schedule.close()
    (line,) = said
    assert line.startswith(told)


@pytest.mark.parametrize("what", ["loss", "end_step"])
def test_what_comes_without_a_step_is_told_once(schedule, said, what):
    for _ in range(3):
        schedule.end() if what == "end_step" else schedule.use(what)
    schedule.close()
    (line,) = said
    assert line.startswith(f"{what}() was called, but no step has begun: put `with session.step")


def test_a_session_without_a_step_says_so_at_its_end(caplog):
    MonitorSession(nn.TransformerEncoderLayer(32, 2, 64, batch_first=True)).close()
    (line,) = caplog.messages
    assert line.startswith("no step was watched, because none has begun")
