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
    assert risk.table([run, twin._replace(frame=twin.frame.query("step < 5000"))]).empty


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


def test_the_largest_audit_leaves_out_saturated_heads_and_later_steps():
    rows = [
        (1000, "attention_entropy", 0, 1.0), (1000, "attention_entropy", 1, 1e-3),
        (2000, "attention_entropy", 1, 0.5),
        (1500, "dq_relative_error", 0, 0.2), (1500, "dq_relative_error", 1, 9.0),
        (2500, "dq_relative_error", 1, 0.4), (3050, "dq_relative_error", 0, 7.0),
    ]  # fmt: skip
    frame = pd.DataFrame(rows, columns=["step", "indicator", "head", "value"]).assign(site="h.0")
    assert risk.largest_audit(frame) == 0.4
    assert np.isnan(risk.largest_audit(frame[frame["indicator"] == "attention_entropy"]))


def test_unseen_pairs_do_not_enter_the_test(capsys):
    results = [str(ROOT / "studies/rescue" / name) for name in ("other_models", "results")]
    risk.main(results)
    said = capsys.readouterr().out
    assert "Spearman's correlation over 8 kinds: 0.88, p 0.004" in said
    of_seed_3 = [line.split() for line in said.splitlines() if line.endswith("True")]
    # Of the first four pairs by hand: what positions make of the audit.
    audits = {row[0]: float(row[-2]) for row in of_seed_3 if row[2] == "3"}
    assert audits.keys() == {"gpt2", "llama", "llama_none", "llama_qk_norm"}
    assert min(audits["gpt2"], audits["llama_none"]) > 1 > 0.1 > max(
        audits["llama"], audits["llama_qk_norm"]
    )  # fmt: skip
