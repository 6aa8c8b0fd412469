"""Runs on row_max from the start beside others, on made-up runs whose losses are known."""

import math

import pytest

from studies.rescue import remedy
from tests.studies.conftest import made_up


def run_of(name, stabilizer, last, growth=0.0, above=0.0, **facts):
    """Loss 2 + above from 6,500 on; head 1 of four grows by a factor of 1 + growth a step."""
    rows = [(step, "", -1, -1, "loss", 2 + above * (step >= 6500)) for step in range(0, last, 20)]
    for step in range(0, last, 200):
        peer = 1 + 1e-6 * step  # they train
        for head, value in enumerate((peer, (1 + growth) ** step, peer, peer)):
            rows += [(step, "h.1", 1, head, "w_q_spectral_norm", value),
                     (step, "h.1", 1, head, "max_logit", 10 * value)]  # fmt: skip
    facts = {"arm": "from_start" if stabilizer else "stock", **facts}
    return made_up(name, rows, stabilizer=stabilizer, **facts)


RUNS = [
    run_of("fails", None, 9001, 1e-3, 0.2),
    run_of("exact", "exact_delta", 10001, 1e-5),
    run_of("its", "row_max", 8001, 5e-4, 0.05),
]
OTHERS = [
    run_of("short", None, 5001),
    run_of("copy", None, 9001, branched_from="fails/step=1.ckpt"),
    run_of("ours", None, 9001, backend="guardbit"),
    run_of("fast", None, 9001, learning_rate=3e-3),
    run_of("alone", None, 9001, seed=2),
    run_of("late", "row_max", 9001, arm="rescue_all"),
]


def test_runs_of_a_seed_are_read_up_to_the_last_common_step():
    found = remedy.table(RUNS + OTHERS).set_index("run")
    assert list(found.index) == ["its", "exact", "fails"]
    assert set(found["steps"]) == {8000}
    assert found.loc["fails", "logit"] == pytest.approx(10 * 1.001**8000)
    assert found.loc["its", "W_Q"] == pytest.approx(1.0005**8000)
    assert found.loc["its", "above"] == pytest.approx(0.05) and math.isnan(found.above["exact"])
    # Half of 25 losses and more lie 0.2 nats above: the thirteenth from 6,500 on.
    assert found.loc["fails", "departs"] == 6740 and math.isnan(found.departs["its"])
    # The norm fires 0.63 e-folds ahead of what it is allowed, 0.0105 a sample: the lead grows by
    # 0.189 and by 0.0895 a sample.
    assert (found.alarm["fails"], found.alarm["its"]) == (800, 1600)
    assert math.isnan(found.alarm["exact"])
