"""Folding changes no alarm, verdict or outcome of recorded runs, and no bit of a switched head."""

import json

import pytest
import torch

from tests import golden

#: One of each kind; `python -m tests.golden` compares all.
RUNS = (
    "guardbit/recorded/lost",
    "guardbit/recorded/switched",
    "tests/data/runs/fails-sdpa-lr1.5e-3.csv.gz",
    "tests/data/runs/lrdiverges-sdpa-lr3e-3.csv.gz",
    "tests/data/runs/stable-fp32out-lr1.5e-3.csv.gz",
    "studies/rescue/results/stock-guardbit-lr1.5e-03-seed9",
)


def kept(part):
    return json.loads((golden.DATA / f"{part}.json").read_text())


@pytest.mark.parametrize("run", [run for run in golden.recorded_runs() if run.as_posix() in RUNS])
def test_a_recorded_run_is_judged_as_before(run):
    assert json.loads(json.dumps(golden.judged(run))) == kept("replays")[run.as_posix()]


@pytest.mark.parametrize("part", ["hashes", "measured"])
def test_switched_heads_keep_their_bits_and_their_numbers(part):
    hashes = kept("hashes")
    # Two processors with AVX512 may round differently.
    if torch.__version__ != hashes["torch"] or not golden.unwatched().items() <= hashes.items():
        pytest.skip(f"PyTorch {hashes['torch']} wrote it, on a processor that rounds differently")
    assert golden.PARTS[part]() == kept(part)
