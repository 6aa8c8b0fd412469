"""A watched run keeps its bits where another function replaces PyTorch's."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.monitor import replaced_run

pytest.importorskip("transformers")


@pytest.mark.parametrize(("when", "steps"), [("before import", (0,)), ("after import", (0, 2))])
def test_weights_are_those_of_the_run_that_nobody_watches(when, steps):
    command = [sys.executable, "-m", replaced_run.__name__, when]
    done = subprocess.run(
        command, capture_output=True, text=True, cwd=Path(__file__).parents[2], check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    expected = {f"{name}, {step}": [True, True] for name in replaced_run.MODELS for step in steps}
    assert json.loads(done.stdout.splitlines()[-1]) == expected
