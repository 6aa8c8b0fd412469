"""Runs with and without a correction from the first step: the table, and what chance would do."""

from pathlib import Path

import numpy as np
import pytest

from guardbit import read_run
from guardbit.monitor.replay import replay
from studies.rescue import controls
from studies.rescue.packed import load
from tests.studies.conftest import made_up

RESULTS = Path(controls.__file__).with_name("results")


def run(name, arm, backend, seed, logits, losses, alarms=(), branched_from=None, rate=1.5e-3):
    rows = [(step, "", -1, -1, "loss", value) for step, value in losses.items()]
    rows += [(step, "h.0", 0, 0, "max_logit", value) for step, value in logits.items()]
    alarms = [(step, "alarm", "h.0", (0,)) for step in alarms]
    return made_up(name, rows, alarms, arm=arm, backend=backend, stabilizer="compensated",
                   seed=seed, branched_from=branched_from, learning_rate=rate)  # fmt: skip


def test_a_row_compares_the_runs_of_a_seed():
    losses = {step: 2.0 for step in range(0, 9001, 100)}
    higher = {step: 2.0 + 0.01 * (step > 8500) for step in losses}
    runs = [
        run("ours", "stock", "guardbit", 3, {7800: 50.0, 8000: 900.0, 9000: 1e6}, higher, [6000]),
        run("corrected", "from_start", "cudnn", 3, {7800: 1e6, 8000: 30.0, 9000: 7.0}, losses),
        run("copy", "stock", "guardbit", 3, {8000: 1e9}, higher, branched_from="ours/step=1.ckpt"),
        run("vendor's", "stock", "cudnn", 3, {8000: 1e9}, higher),
        run("too fast", "from_start", "cudnn", 4, {8000: 5.0}, losses, rate=3e-3),
        run("alone", "stock", "guardbit", 4, {8000: 5.0}, losses),
    ]
    (row,) = controls.table(runs).to_dict("records")
    assert (row["seed"], row["logit"], row["logit_corrected"]) == (3, 900.0, 30.0)
    assert (row["steps"], row["alarm"], row["alarm_corrected"]) == (9000, 6000, None)
    assert row["loss_above"] == pytest.approx(0.01)


def test_chance_is_counted_exactly():
    assert controls.chance_of_pairs(np.array([1.0, 2, 3, 4, 5])) == 1 / 32
    # 3 - 1 = 2: the sums 4, 2, -2, -4 and two of four are as large.
    assert controls.chance_of_pairs(np.array([3.0, -1.0])) == 1 / 2


@pytest.mark.slow
def test_the_committed_runs_part_as_the_docs_say(tmp_path):
    for folder in (*RESULTS.glob("from_start-*"), *RESULTS.glob("stock-guardbit-*-again*")):
        (tmp_path / folder.name).symlink_to(folder)
    found = controls.table(load(tmp_path)).set_index("seed")
    for name, seed, column in (
        ("stock-guardbit-lr1.5e-03-seed4-again7", 4, "logit"),
        ("from_start-exact_delta-cudnn-lr1.5e-03-seed9-again7", 9, "logit_corrected"),
    ):
        frame = read_run(RESULTS / name)
        at = frame[(frame["indicator"] == "max_logit") & (frame["step"] == 8000)]
        assert len(at) == 144 and found.loc[seed, column] == at["value"].max()
    assert sorted(found.index) == [2, 4, 6, 9, 10]
    assert found["logit"].min() > 3 * found["logit_corrected"].max()


def test_a_model_whose_norms_grow_where_scores_do_not_see_it_is_stable():
    run = "llama-stock-cudnn-lr1.0e-03-seed0-again7"
    frame = read_run(RESULTS.with_name("other_models") / run)
    first = frame[frame["site"] == "net.layers.0.self_attn"]
    norms, logits = (
        first[first["indicator"] == name].pivot_table(index="step", columns="head", values="value")
        for name in ("w_q_spectral_norm", "max_logit")
    )
    assert (norms.loc[9000] > 8 * norms.loc[2000]).all() and logits.loc[2000:].max().max() < 16
    found = replay(frame)
    assert (found.alarms, found.advisories, found.judgement().verdict) == ([], [], "stable")
