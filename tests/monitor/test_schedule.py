import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from guardbit.monitor.schedule import Schedule, checked_step


def run(schedule, steps, is_wanted=False):
    """Runs whole steps; returns those that were sampled."""
    sampled = []
    for step in steps:
        schedule.begin(step, is_wanted)
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


def test_of_all_steps_only_the_first_is_sampled_because_it_is_wanted():
    assert run(Schedule(100), [7, 8, 9], is_wanted=True) == [7]


def test_a_run_that_goes_on_passes_no_multiple_twice():
    schedule = Schedule(10)
    schedule.last_ended = 30
    assert run(schedule, [31, 39, 44]) == [44]


def test_a_step_that_is_abandoned_never_was_and_may_begin_again():
    schedule = Schedule(4)
    schedule.begin(4, False)
    assert schedule.is_sampled and schedule.is_within_step
    schedule.abandon()
    assert not schedule.is_sampled and not schedule.is_within_step
    assert schedule.end() is None and schedule.last_ended is None
    assert run(schedule, [4]) == [4]
    assert not schedule.is_within_step and schedule.last_ended == 4


@pytest.mark.parametrize("step", [-1, 1.5, "3", None])
def test_a_step_that_is_no_whole_number_is_refused(step):
    with pytest.raises(ValueError, match="it must be a whole number, 0 or more"):
        checked_step(step)
