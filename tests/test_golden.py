"""Folding changes no alarm, verdict or outcome of recorded runs, and no bit of a switched head."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests import golden

#: One of each kind; `python -m tests.golden` compares all.
RUNS = (
    "guardbit/recorded/lost",
    "guardbit/recorded/saved",
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
    expected = kept("hashes")
    here = torch.backends.cpu.get_cpu_capability(), torch.__version__
    if here != (expected["processor"], expected["torch"]):
        pytest.skip(f"written on {expected['processor']} by PyTorch {expected['torch']}")
    # In a process of its own: which kernel serves a switched head may depend on what ran before.
    program = f"import json; from tests import golden; print(json.dumps(golden.PARTS[{part!r}]()))"
    root = Path(__file__).parents[1]
    printed = subprocess.run(
        [sys.executable, "-c", program], cwd=root, stdout=subprocess.PIPE, text=True, check=True
    ).stdout
    assert json.loads(printed.splitlines()[-1]) == kept(part)
