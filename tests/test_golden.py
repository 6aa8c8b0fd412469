"""Folding changes no alarm, verdict or outcome of recorded runs."""

import json

import pytest

from tests import golden

#: One of each kind; `python -m tests.golden` compares all.
RUNS = (
    "guardbit/recorded/lost",
    "guardbit/recorded/guarded",
    "tests/data/runs/fails-sdpa-lr1.5e-3.csv.gz",
    "tests/data/runs/lrdiverges-sdpa-lr3e-3.csv.gz",
    "tests/data/runs/stable-fp32out-lr1.5e-3.csv.gz",
    "studies/rescue/results/stock-guardbit-lr1.5e-03-seed9",
)


@pytest.mark.parametrize("run", [run for run in golden.recorded_runs() if run.as_posix() in RUNS])
def test_a_recorded_run_is_judged_as_before(run):
    expected = json.loads(golden.REPLAYS.read_text())[run.as_posix()]
    assert json.loads(json.dumps(golden.judged(run))) == expected
