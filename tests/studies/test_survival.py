"""Kaplan-Meier estimates, against ones worked out by hand."""

import math

import pandas as pd
import pytest

from studies.rescue.survival import Course, courses_from, failed_within, interval

KEY = (0, 0.0015)
#: Six runs: at 6 three of six fail, at 7 one of the two left does.
SIX = [
    *(Course(KEY, 6, True) for _ in range(3)),
    Course(KEY, 6, False),
    Course(KEY, 7, True),
    Course(KEY, 10, False),
]


@pytest.mark.parametrize(("steps", "share"), [(5.9, 0.0), (6, 0.5), (7, 0.75), (99, 0.75)])
def test_the_share_that_fails(steps, share):
    assert failed_within(SIX, steps) == pytest.approx(share)


def test_an_interval_of_clusters_that_are_alike_has_no_width():
    alike = [one._replace(cluster=(seed, 0.0015)) for seed in range(4) for one in SIX]
    assert interval(alike, 6) == (0.5, 0.5)
    low, high = interval([Course((seed, 0.0015), 6, seed == 0) for seed in range(4)], 6)
    assert low == 0.0 and 0.5 <= high <= 1.0


def test_a_run_enters_before_its_end_or_not_at_all():
    table = {
        "run": ["fails", "ends", "was over"], "seed": [1, 2, 3], "learning_rate": 1e-3,
        "steps": [900, 800, 500], "failed_at": [700, math.nan, math.nan],
    }  # fmt: skip
    found = courses_from(pd.DataFrame(table), lambda name: 500.0)
    assert found == [Course((1, 1e-3), 200, True), Course((2, 1e-3), 300, False)]
