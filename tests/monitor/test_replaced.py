"""A watched run keeps its bits where another function stands in PyTorch's place."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.monitor import replaced_run

pytest.importorskip("transformers")


@pytest.mark.parametrize("when", ["before import", "after import", "in the run"])
def test_weights_are_those_of_the_run_that_nobody_watches(when):
    command = [sys.executable, "-m", replaced_run.__name__, when]
    done = subprocess.run(
        command, capture_output=True, text=True, cwd=Path(__file__).parents[2], check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    expected = {name: [True, True] for name in replaced_run.MODELS}
    assert json.loads(done.stdout.splitlines()[-1]) == expected
