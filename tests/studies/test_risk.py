"""Pairs of a run and its twin: what is compared, and the test over kinds."""

from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from scipy.stats import spearmanr

from guardbit import read_run
from studies.rescue import kinds, risk, train
from studies.rescue.packed import Run

ROOT = Path(__file__).parents[2]


def made_up(name, facts, logit, alarms=()):
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
    frame = pd.DataFrame(rows, columns=["step", "site", "layer", "head", "indicator", "value"])
    events = pd.DataFrame(alarms, columns=["step", "kind", "site", "heads"])
    return Run(name, facts, frame, events)


def test_a_run_is_compared_with_its_twin_at_the_last_common_step_by_6000():
    facts = {"architecture": "llama", "learning_rate": 1e-3, "seed": 1}
    alarms = [(4000, "alarm", "h.0", (0, 1)), (5000, "alarm", "h.0", (1,)),
              (6100, "alarm", "h.0", (2,)), (4500, "alarm", "", ())]  # fmt: skip
    run = made_up("llama-stock-cudnn-seed1-again30", {**facts, "arm": "stock"}, 600, alarms)
    twin = made_up(
        "llama-from_start-exact_delta-cudnn-seed1-again30", {**facts, "arm": "from_start"}, 300
    )
    alone = made_up("llama-stock-cudnn-seed2-again30", {**facts, "arm": "stock"}, 1)
    earlier = made_up("llama-stock-cudnn-seed1-again7", {**facts, "arm": "stock"}, 1)
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


def test_pairs_are_made_in_their_order_run_before_twin(monkeypatch, tmp_path):
    queue = []

    class Jobs:
        def __init__(self, *_):
            pass

        def train(self, runs, slots):
            queue.extend(train.parse(run) for run in runs)

        def stop_all(self):
            pass

    monkeypatch.setattr(kinds, "Jobs", Jobs)
    kinds.main(["llama,1e-3,1", "gpt2,2e-3,0", "--again=31", f"--folder={tmp_path}"])
    assert [(o.architecture, o.learning_rate, o.seed, o.arm, o.again, o.steps) for o in queue] == [
        ("llama", 1e-3, 1, "stock", 31, 6000),
        ("llama", 1e-3, 1, "from_start", 31, 6000),
        ("gpt2", 2e-3, 0, "stock", 31, 6000),
        ("gpt2", 2e-3, 0, "from_start", 31, 6000),
    ]
    assert {o.stabilizer for o in queue[1::2]} == {"exact_delta"}
    with pytest.raises(SystemExit):
        kinds.main(["no_such_kind,1e-3,1", "--again=31"])


def test_committed_pairs_hold_what_the_table_says(read_once):
    found = risk.table(read_once(ROOT / "studies/rescue/other_models"))
    for row in found.to_dict("records"):
        name = f"{row['kind']}-stock-cudnn-lr{row['rate']:.1e}-seed{row['seed']}-again[37][012]"
        (folder,) = (ROOT / "studies/rescue/other_models").glob(name)
        frame = read_run(folder)
        at = frame[(frame["step"] == row["step"]) & (frame["indicator"] == "max_logit")]
        assert row["logit"] == at["value"].max()
