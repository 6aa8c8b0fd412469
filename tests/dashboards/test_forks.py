"""Copies of one run: made-up losses, and two recorded ones of the rescue study."""

import csv
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from guardbit.dashboards.forks import against_each_other, departure, fork_of
from guardbit.dashboards.marks import judgement_of
from guardbit.dashboards.tables import of_run
from guardbit.store import read_events, read_run

RESULTS = Path(__file__).parents[2] / "studies" / "rescue" / "results"
STEPS = np.arange(0, 10_000, 20)


def loss(seed, fork, shift_from=10**9, shift=0.0):
    shared = 3 - STEPS / 5000 + np.random.default_rng(0).normal(0, 0.05, STEPS.size)
    own = np.random.default_rng(seed).normal(0, 0.01, STEPS.size)
    values = shared + np.where(fork < STEPS, own, 0) + np.where(shift_from <= STEPS, shift, 0)
    return pd.Series(values, index=STEPS)


def test_the_fork_is_the_last_step_in_common():
    assert fork_of({"a": loss(1, 4000), "b": loss(2, 4000), "c": loss(3, 6000)}) == 4000
    # What never parts has no fork, nor what shares no beginning, nor one run alone.
    assert fork_of({"a": loss(1, 4000), "b": loss(1, 4000).loc[:3000]}) is None
    assert fork_of({"a": loss(1, -1), "b": loss(2, -1)}) is None
    assert fork_of({"a": loss(1, 4000)}) is None
    assert fork_of({"a": loss(1, 4000), "b": pd.Series(dtype=float)}) is None


def test_a_departure_is_a_lasting_tenth_of_a_nat():
    sound = loss(1, 4000)
    assert departure(loss(2, 4000), sound) is None
    assert departure(loss(2, 4000, 6000, 0.08), sound) is None
    # The mean over 500 steps, 25 samples, is 0.1 above once half of them are 0.2 above.
    assert departure(loss(2, 4000, 6000, 0.2), sound) == pytest.approx(6240, abs=20)
    assert departure(loss(2, 4000, 6000, np.inf), sound) == 6000


def test_the_lead_of_a_failed_run_is_the_studys_own():
    names = {
        "stock": "stock-cudnn-lr1.5e-03-seed10",
        "rescue": "rescue_all-compensated-cudnn-lr1.5e-03-seed10",
    }
    frames = {short: read_run(RESULTS / name) for short, name in names.items()}
    losses = {short: of_run(frame, "loss") for short, frame in frames.items()}
    outcomes = {
        short: judgement_of(frames[short], read_events(RESULTS / name))
        for short, name in names.items()
    }
    found = against_each_other(outcomes, losses)
    with open(RESULTS / "runs.csv") as lines:
        row = {line["run"]: line for line in csv.DictReader(lines)}[names["stock"]]
    lead = int(row["failed_at"]) - int(row["first_alarm"])
    assert (found["stock"].state, found["stock"].lead) == ("lost", lead)
    assert f"{lead:,} steps after the first alarm" in found["stock"].headline
    assert found["rescue"] == outcomes["rescue"] and found["rescue"].state == "saved"


def test_a_copy_that_leaves_without_an_alarm_is_lost():
    frame = read_run(RESULTS / "stock-cudnn-lr1.5e-03-seed0")
    outcomes = {name: judgement_of(frame, None) for name in "ab"}
    assert {outcome.state for outcome in outcomes.values()} == {"warning"}
    found = against_each_other(outcomes, {"a": loss(1, 4000, 6000, 0.5), "b": loss(2, 4000)})
    assert found["b"] == outcomes["b"]
    # Of 25 samples, six at 0.5 lie 0.12 above in the mean; the noise may add a sample.
    assert (found["a"].state, found["a"].lead) == ("lost", None)
    assert found["a"].departed == pytest.approx(6100, abs=20)
    said = f"Lost: the loss diverged at step {found['a'].departed:,}, before any head alarmed"
    assert found["a"].headline.startswith(said)


def test_runs_that_are_no_copies_are_no_measure_for_one_another():
    frame = read_run(RESULTS / "stock-cudnn-lr1.5e-03-seed0")
    outcomes = {name: judgement_of(frame, None) for name in "ab"}
    found = against_each_other(outcomes, {"a": loss(1, -1, 0, 5.0), "b": loss(2, -1)})
    assert found == outcomes
