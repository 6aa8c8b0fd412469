"""When the steps of a run were: few times, which survive a resumption."""

from __future__ import annotations

import itertools
import json

import pytest

from guardbit.records import Sample
from guardbit.store import RunFollower, RunWriter


def sample(step):
    return Sample(step, "", -1, "loss", (1.0,))


def clock_of(folder):
    follower = RunFollower(folder)
    follower.look()
    return follower.clock


def test_times_come_back_and_a_resumption_hides_those_of_the_steps_it_repeats(tmp_path):
    with RunWriter(tmp_path) as writer:
        for step in (0, 50, 100, 150):
            writer.add([sample(step)])
            writer.tick(step, 1000.0 + step)
    with RunWriter(tmp_path, start_step=100) as writer:
        writer.add([sample(150)])
        writer.tick(150, 5000.0)
    expected = [(0, 1000.0), (50, 1050.0), (100, 1100.0), (150, 5000.0)]
    assert clock_of(tmp_path) == expected


def test_a_long_run_keeps_few_of_its_times_yet_one_in_each_hundredth(tmp_path):
    with RunWriter(tmp_path) as writer:
        writer.add([sample(0)])
        for step in range(0, 100_000, 50):
            writer.tick(step, float(step))
    steps = [step for step, _ in clock_of(tmp_path)]
    assert len(steps) < 500
    gaps = [after - before for before, after in itertools.pairwise(steps)]
    # A hundredth of the later step, and the cadence that it is rounded up to.
    assert all(gap <= 0.01 * after + 50 for gap, after in zip(gaps, steps[1:], strict=True))


@pytest.mark.parametrize(
    "clock",
    [None, "x", [1], [[1, 2, 3]], [[2, 0.0], [1, 0]], [[1, "x"]], [[-1, 0.0]], [[1, 1e999]]],
)
def test_times_that_no_writer_writes_are_none(tmp_path, clock):
    with RunWriter(tmp_path) as writer:
        writer.add([sample(0)])
    (path,) = tmp_path.glob("session-*.json")
    path.write_text(json.dumps({**json.loads(path.read_text()), "clock": clock}))
    assert clock_of(tmp_path) == []
