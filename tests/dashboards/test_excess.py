import math
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from guardbit.dashboards.history import EXCESS_INDICATORS, times_baseline
from guardbit.dashboards.tables import Recorded

RUNS = Path(__file__).parents[1] / "data" / "runs"


def steady(samples=40, heads=8, noise=0.0, seed=0):
    return np.exp(np.random.default_rng(seed).normal(0, noise, (samples, heads)))


@pytest.mark.parametrize("factor", [3.0, 50.0])
@pytest.mark.parametrize("ill_from", [12, 25, 39])
def test_a_jump_is_told_as_its_factor(factor, ill_from):
    values = steady()
    values[ill_from:, 5] *= factor
    excess = times_baseline(values)
    assert excess[5] == pytest.approx(factor)
    np.testing.assert_allclose(np.delete(excess, 5), 1)


def test_noise_is_within_the_normal():
    excess = times_baseline(steady(noise=0.3))
    # Three standard deviations are allowed; eight heads once each.
    assert (excess < 1.3).all()


def test_growth_that_all_heads_share_is_no_excess():
    shared = np.exp(np.linspace(0, 4, 40))[:, None]
    np.testing.assert_allclose(times_baseline(steady() * shared), 1)
    # Where there are too few heads for a median to be a clock, the growth is each head's own.
    assert (times_baseline(steady(heads=3) * shared) > 5).all()


def test_the_last_measured_value_stands_for_heads_measured_in_turn():
    values = np.full((60, 8), np.nan)
    for sample in range(60):
        measured = np.arange(8) % 2 == sample % 2
        values[sample, measured] = 1.0
    values[56:, 4] *= 7
    excess = times_baseline(values)
    assert excess[4] == pytest.approx(7)
    np.testing.assert_allclose(np.delete(excess, 4), 1)


def test_too_few_samples_know_no_normal_and_none_know_nothing():
    values = np.ones((4, 5))
    values[3, 0] = 100
    values[:, 1] = np.nan
    np.testing.assert_array_equal(times_baseline(values), [1, np.nan, 1, 1, 1])
    assert times_baseline(np.ones((0, 3))).tolist() == pytest.approx([np.nan] * 3, nan_ok=True)


# From 1e-30 to infinity is more than either type holds as a ratio.
@pytest.mark.parametrize("usual", [1.0, 1e-30])
@pytest.mark.parametrize(
    "ill", [np.inf, np.float64(1e300), np.finfo(np.float32).max, np.finfo(np.float64).max]
)
def test_an_overflow_is_far_beyond_normal_and_a_number(usual, ill):
    values = (usual * steady()).astype(np.asarray(ill).dtype)
    values[30:, 1] = ill
    excess = times_baseline(values)
    assert np.isfinite(excess).all() and excess.argmax() == 1 and excess[1] > 1e20


def test_a_share_that_rises_from_nothing_to_little_is_no_excess():
    shares = np.zeros((40, 8))
    shares[30:, 3] = 0.01
    shares[30:, 4] = 0.3
    excess = times_baseline(shares, EXCESS_INDICATORS["multiple_maxima"])
    assert excess[3] == pytest.approx(2) and excess[4] == pytest.approx(31)


@given(st.integers(0, 2**16), st.floats(1e-6, 1e6))
def test_units_do_not_matter(seed, unit):
    values = steady(seed=seed, noise=0.5)
    np.testing.assert_allclose(times_baseline(unit * values), times_baseline(values), rtol=1e-9)


def excess_of(frame, step=math.inf):
    run = Recorded(frame)
    excess, _, _ = run.excess(run.history.bucket_of(step))
    return excess


def test_recorded_runs_stable_ones_stay_light_and_the_failing_one_turns_dark():
    for name in (
        "bf16out-lr1.0e-3",
        "bf16out-lr1.5e-3",
        "fa2numerics-lr1.5e-3",
        "fp32out-lr1.5e-3",
    ):
        assert excess_of(pd.read_csv(RUNS / f"stable-{name}.csv.gz")).max() < 13
    # Layer 2 leaves its trend at about step 6,700, long before the loss does at 9,000.
    before = excess_of(pd.read_csv(RUNS / "fails-sdpa-lr1.5e-3.csv.gz"), 8000)
    assert before.argmax() == 2 and before.max() > 100
    assert np.delete(before, 2).max() < 13


def test_a_head_is_as_far_above_its_baseline_as_its_worst_indicator(run):
    excess = excess_of(run.frame)
    assert excess.shape == (12, 12)
    # The logit of the sick head has grown by e^(3 * 2.45) in the end, its noise is 10 %.
    assert excess[2, 7] == pytest.approx(np.exp(3 * 2.45), rel=0.5)
    excess[2, [3, 7]] = 0
    assert excess.max() < 1.5
    # Up to a step nothing of what came later counts.
    assert excess_of(run.frame, 2400).max() < 1.5


def test_a_switch_of_half_of_the_heads_leaves_the_others_at_their_baseline():
    """The switch takes the bias from four of eight heads; the others are as before."""
    values = steady(noise=0.1)
    values[12:, :4] /= 1000
    moved = np.arange(8) < 4
    assert (times_baseline(values)[4:] > 300).all(), "by the median of all they would stand out"
    np.testing.assert_allclose(times_baseline(values, 0.0, moved, 12), 1, rtol=0.35)


def test_a_head_that_was_ill_for_most_of_a_run_stays_far_above_its_baseline():
    values = steady()
    values[8:, 5] *= 50
    assert times_baseline(values)[5] == pytest.approx(1), "its illness is its usual state by then"
    moved = np.arange(8) == 5
    assert times_baseline(values, 0.0, moved, 9)[5] == pytest.approx(50)
    # Without a past before the alarm it is compared with the median of the others,
    assert times_baseline(values, 0.0, moved, 3)[5] == pytest.approx(50)
    # from its first sample on, and not where too few others are left.
    assert times_baseline(values[6:9], 0.0, moved, 3)[5] == pytest.approx(50)
    assert times_baseline(values, 0.0, np.arange(8) > 3, 3)[5] == pytest.approx(50)
    assert times_baseline(values, 0.0, np.arange(8) > 2, 3)[5] == pytest.approx(1)
