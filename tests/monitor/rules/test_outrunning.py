"""Leads against a search over all stretches of samples."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from guardbit.monitor.detectors.rules.head_growth import outrun


def by_search(steps, series, over_peers, drift):
    """For each head the largest of L(t) - L(s) - over_peers (P(t) - P(s)) - drift (t - s)."""
    clock, ticks, last = 0.0, [], {}
    for index in range(len(steps)):
        grown = []
        for site, values in series.items():
            for head, value in enumerate(values[index]):
                if math.isnan(value):
                    continue
                if (site, head) in last:
                    before, tick = last[site, head]
                    grown.append(math.log(value / before) - (clock - ticks[tick]))
                last[site, head] = value, index
        if grown:
            clock += max(0.0, sorted(grown)[(len(grown) - 1) // 2])
        ticks.append(clock)
    leads = {}
    for site, values in series.items():
        for head in range(values.shape[1]):
            known = [i for i in range(len(steps)) if not math.isnan(values[i, head])]
            if not known or known[-1] != len(steps) - 1:
                continue
            end = known[-1]
            leads[site, head] = max(
                math.log(values[end, head] / values[start, head])
                - over_peers * (ticks[end] - ticks[start])
                - drift * (steps[end] - steps[start]) / 1000
                for start in known
            )
    return leads


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    sites=st.integers(1, 4),
    heads=st.integers(1, 3),
    length=st.integers(1, 12),
    missing=st.sampled_from([0.0, 0.2]),
)
def test_a_lead_is_the_most_that_any_stretch_shows(seed, sites, heads, length, missing):
    generator = np.random.default_rng(seed)
    steps = generator.integers(1, 700, length).cumsum().tolist()
    series = {}
    for site in range(sites):
        values = np.exp(generator.normal(0.1, 0.3, (length, heads)).cumsum(0))
        values[generator.random((length, heads)) < missing] = np.nan
        series[f"h.{site}"] = values
    expected = by_search(steps, series, 1.5, 0.2)
    state = {}
    for index, step in enumerate(steps):
        rows = {site: values[index] for site, values in series.items()}
        last = outrun(state, step, rows, 1.5, 0.2)
    found = {site: ahead.lead for site, ahead in last.items()}
    for (site, head), lead in expected.items():
        assert found[site][head] == pytest.approx(lead, abs=1e-12)
    known = sum(int((~np.isnan(lead)).sum()) for lead in found.values())
    assert known == len(expected)


def test_modules_that_miss_samples_do_not_hurry_the_clock():
    """Twelve modules grow alike; each misses half of the samples. Nothing is counted twice."""
    generator = np.random.default_rng(7)
    steps = range(0, 10_000, 50)
    alike = np.exp(0.2 * np.array(steps) / 1000)[:, None] * np.ones(4)
    series = {}
    for layer in range(12):
        values = alike.copy()
        values[generator.random(len(steps)) < 0.5] = math.nan
        series[f"h.{layer}"] = values
    state = {}
    for index, step in enumerate(steps):
        outrun(state, step, {site: rows[index] for site, rows in series.items()}, 2.0, 0.05)
    # The last sample of each is at most a few samples, of 0.01 e-folds each, behind.
    assert state["clock"] == pytest.approx(0.2 * steps[-1] / 1000, abs=0.1)
