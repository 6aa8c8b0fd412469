import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from guardbit.dashboards.history import History, times_baseline


def fill(history, values, steps, indicator="max_logit"):
    """Values (samples, layers, heads), one `add` a sample."""
    layer, head = (index.ravel() for index in np.indices(values.shape[1:]))
    for step, sample in zip(steps, values, strict=True):
        history.add(indicator, np.full(layer.size, step), layer, head, sample.ravel())


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 90), st.integers(0, 1000), st.integers(1, 37), st.integers(0, 2**16))
def test_buckets_keep_the_extremes_of_all_samples(samples, first, every, seed):
    values = np.random.default_rng(seed).normal(size=(samples, 2, 3)).astype(np.float32)
    steps = first + every * np.arange(samples)
    history = History(buckets=16)
    fill(history, values, steps)
    recorded = history.steps[: history.used]
    assert history.used <= 16 and history.last_step == steps[-1]
    kept = recorded[recorded >= 0]
    assert (np.diff(kept) > 0).all() and set(kept) <= set(steps)
    # Brute force: a bucket holds the samples after the step of the one before, up to its own.
    for low, high, before, step in zip(
        history.low["max_logit"][: history.used][recorded >= 0],
        history.high["max_logit"][: history.used][recorded >= 0],
        [-1, *kept[:-1]],
        kept,
        strict=True,
    ):
        inside = values[(steps > before) & (steps <= step)]
        np.testing.assert_array_equal(low, inside.min(axis=0).ravel())
        np.testing.assert_array_equal(high, inside.max(axis=0).ravel())


def test_taking_the_same_in_twice_changes_nothing():
    values = np.random.default_rng(0).normal(size=(40, 2, 2))
    once, twice = History(16), History(16)
    fill(once, values, range(40))
    fill(twice, values, range(40))
    fill(twice, values[20:], range(20, 40))
    np.testing.assert_array_equal(once.high["max_logit"], twice.high["max_logit"])
    np.testing.assert_array_equal(once.steps, twice.steps)


def test_layers_and_heads_may_come_later():
    history = History(8)
    one = np.array([0])
    history.add("max_logit", np.array([3]), one, one, np.array([1.0]))
    history.add("max_logit", np.array([4]), one + 2, one + 1, np.array([5.0]))
    assert (history.num_layers, history.num_heads) == (3, 2)
    assert history.heads == [(0, 0), (2, 1)]
    np.testing.assert_array_equal(history.of_head("max_logit", 0, 0), [[1, np.nan]] * 2)
    np.testing.assert_array_equal(history.of_head("max_logit", 2, 1), [[np.nan, 5]] * 2)
    np.testing.assert_array_equal(history.of_head("max_logit", 1, 1), [[np.nan, np.nan]] * 2)
    assert np.isfinite(history.high["max_logit"]).sum() == 2


def test_the_run_has_curves_of_its_own_and_unknown_indicators_are_passed_over():
    history = History(8)
    nowhere = np.array([-1, -1])
    history.add("loss", np.array([0, 1]), nowhere, nowhere, np.array([3.0, np.nan]))
    history.add("tomorrow", np.array([0, 1]), nowhere, nowhere, np.array([3.0, 2.0]))
    assert history.high["loss"][0, 0] == 3 and np.isnan(history.high["loss"][1, 0])
    assert set(history.high) == set(history.low) == {"loss"} and not history.heads


def test_excess_is_that_of_the_samples_and_names_the_worst_indicator():
    generator = np.random.default_rng(0)
    logits = generator.lognormal(0, 0.1, (60, 2, 4))
    logits[40:, 1, 2] *= 30
    norms = generator.lognormal(0, 0.1, (60, 2, 4))
    norms[50:, 0, 1] *= 9
    history = History(400)
    fill(history, logits, range(60))
    fill(history, norms, range(60), "w_q_spectral_norm")
    excess, which, names = history.excess()
    # float32 against float64.
    expected = np.fmax(
        times_baseline(logits.reshape(60, -1)), times_baseline(norms.reshape(60, -1))
    ).reshape(2, 4)
    np.testing.assert_allclose(excess, expected, rtol=1e-5)
    assert names[which[1, 2]] == "max_logit" and names[which[0, 1]] == "w_q_spectral_norm"
    early, _, _ = history.excess(history.bucket_of(39))
    assert early.max() < 2 and excess.max() > 10


@pytest.mark.parametrize(("step", "bucket"), [(-1, -1), (0, 0), (9, 0), (10, 10), (99, 20)])
def test_the_bucket_of_a_step(step, bucket):
    history = History(400)
    fill(history, np.ones((3, 1, 1)), [0, 10, 20])
    assert history.bucket_of(step) == bucket


def test_a_far_head_costs_no_more_than_itself():
    history = History(400)
    fill(history, np.ones((3, 2, 4)), range(3))
    far = np.array([1023])
    history.add("max_logit", np.array([2]), far, far, np.array([9.0]))
    # 400 buckets of 1024 * 1024 heads would be 1.6 GB an array.
    assert history.high["max_logit"].shape == (400, 9)
    excess, _, _ = history.excess()
    assert excess.shape == (1024, 1024) and np.isfinite(excess).sum() == 9


@pytest.mark.parametrize("step", [0, 1, 7])
def test_the_first_step_of_a_long_run_is_in_the_first_bucket(step):
    # Every bucket holds eight steps, of which it knows the last.
    history = History(8)
    fill(history, np.ones((60, 1, 1)), range(60))
    assert history.steps[0] == 7
    assert history.bucket_of(step) == 0
    assert history.bucket_of(-1) == -1
    excess, _, _ = history.excess(history.bucket_of(-1))
    assert excess.shape == (1, 1) and np.isnan(excess).all()
