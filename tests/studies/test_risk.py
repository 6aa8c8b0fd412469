"""Pairs of a run and its twin: what is compared, and the test over kinds."""

from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from scipy.stats import spearmanr

from studies.rescue import risk
from tests.studies.conftest import made_up

ROOT = Path(__file__).parents[2]


def run_of(name, facts, logit, alarms=()):
    rows = [
        (step, site, 0, head, indicator, value)
        for step in (1000, 2000, 5200, 6000, 6200)
        for indicator, site, head, value in (
            ("max_logit", "h.0", 0, 1.0),
            ("max_logit", "h.0", 1, logit * step / 6000),
            ("w_q_spectral_norm", "h.0", 0, logit / 100),
            ("key_common_mode", "h.0", 1, step / 1e4),
            ("loss", "", -1, 2.0 + logit / 1000),
        )
    ]
    return made_up(name, rows, alarms, **facts)


def test_a_run_is_compared_with_its_twin_at_the_last_common_step_by_6000():
    facts = {"architecture": "llama", "learning_rate": 1e-3, "seed": 1}
    alarms = [(4000, "alarm", "h.0", (0, 1)), (5000, "alarm", "h.0", (1,)),
              (6100, "alarm", "h.0", (2,)), (4500, "alarm", "", ())]  # fmt: skip
    run = run_of("llama-stock-cudnn-seed1-again30", {**facts, "arm": "stock"}, 600, alarms)
    twin = run_of(
        "llama-from_start-exact_delta-cudnn-seed1-again30", {**facts, "arm": "from_start"}, 300
    )
    alone = run_of("llama-stock-cudnn-seed2-again30", {**facts, "arm": "stock"}, 1)
    earlier = run_of("llama-stock-cudnn-seed1-again7", {**facts, "arm": "stock"}, 1)
    (row,) = risk.table([twin, alone, run, earlier]).to_dict("records")
    assert (row["kind"], row["rate"], row["seed"], row["step"]) == ("llama", 1e-3, 1, 6000)
    assert (row["logit"], row["twin's"]) == (600, 300)
    assert row["log ratio"] == pytest.approx(np.log(2)) == row["W_Q log ratio"]
    assert (row["alarmed"], row["alarmed twin's"]) == (2, 0)
    assert row["loss less twin's"] == pytest.approx(0.3)
    assert row["common mode"] == 0.2
    short = twin._replace(frame=twin.frame.query("step < 5000"))
    assert risk.table([run, short]).empty


def test_the_correlation_over_kinds_is_spearmans_and_its_p_exact():
    generator = np.random.default_rng(1)
    found = pd.DataFrame(
        {
            "kind": np.repeat(list("abcdefg"), 2),
            "common mode": generator.random(14),
            "log ratio": generator.random(14),
        }
    )
    means = found.groupby("kind").mean()
    correlation, _ = risk.test(found)
    assert correlation == pytest.approx(spearmanr(means).statistic)
    # In the order of the predictor: of the 5,040 orders this one alone reaches it.
    found["log ratio"] = found.groupby("kind")["common mode"].transform("mean")
    assert risk.test(found) == (pytest.approx(1.0), pytest.approx(1 / 5040))
