"""The experiment best against best: its table, its tests, and its decision."""

from itertools import product
from math import sqrt
from pathlib import Path
from statistics import mean, stdev

import numpy as np
import pandas as pd
import pytest

from studies.tuned import analyse

RESULTS = Path(analyse.__file__).with_name("results")

#: The 97.5th percentile of Student's t with 5 degrees of freedom, from a printed table.
T_5 = 2.5706


def table():
    return pd.read_csv(analyse.TABLE)


def by_hand(rates):
    """Loss of stock less that of exact, each at its rate, in the order of the seeds of stage 2."""
    losses = {(r.arm, r.rate, r.seed): r.held_out for r in table().itertuples()}
    return [
        losses["stock", rates["stock"], seed] - losses["exact", rates["exact"], seed]
        for seed in range(201, 207)
    ]


def test_table_holds_all_forty_runs_as_they_were_gathered():
    found = analyse.gathered(sorted(RESULTS.iterdir())).reset_index(drop=True)
    assert len(found) == 40
    # Eight digits are kept.
    pd.testing.assert_frame_equal(found, table(), check_dtype=False, rtol=1e-7)


def test_both_arms_are_best_at_the_lowest_rate():
    stage_1 = table()[lambda runs: runs["seed"].isin((101, 102))]
    means = stage_1.groupby(["arm", "rate"])["held_out"].mean()
    best = {arm: min((loss, rate) for (a, rate), loss in means.items() if a == arm)[1]
            for arm in ("stock", "exact")}  # fmt: skip
    assert best == analyse.best_rates(table()) == {"stock": 6e-4, "exact": 6e-4}


def test_differences_and_interval_are_those_of_the_losses_by_hand():
    best, higher = (by_hand({"stock": rate, "exact": rate}) for rate in (6e-4, 1e-3))
    found = analyse.differences(table())
    np.testing.assert_allclose(found["best"], best, atol=1e-12)
    np.testing.assert_allclose(found["excess"], np.subtract(higher, best), atol=1e-12)
    half = T_5 * stdev(best) / sqrt(len(best))
    # The printed percentile has five digits.
    expected = mean(best) - half, mean(best) + half
    np.testing.assert_allclose(analyse.interval(np.array(best)), expected, atol=1e-6)
    assert expected[1] < 0  # stock ended ahead


@pytest.mark.parametrize("differences", [[0.3, -0.1, 0.2], [-1.0, -2.0, -3.0], [0.5, 0.4, 0.1]])
def test_sign_flips_counts_all_signs(differences):
    flipped = [mean(s * d for s, d in zip(signs, differences, strict=True))
               for signs in product((1, -1), repeat=3)]  # fmt: skip
    expected = sum(one >= mean(differences) - 1e-12 for one in flipped) / 8
    assert analyse.sign_flips(np.array(differences)) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("best", "excess", "number"),
    [(0.02, 0.0, "1"), (0.0005, 0.01, "2"), (0.0005, -0.01, "3"), (-0.02, 0.01, "3")],
)
def test_decision_follows_the_rules(best, excess, number):
    wobble = np.linspace(-2e-3, 2e-3, 6)  # six seeds; an interval of 0.0016 to either side
    found = pd.DataFrame({"best": best + wobble, "excess": excess + wobble})
    assert analyse.decision(found).startswith(number)
