"""The scripts of pages: their helpers, by node, and lines that a person can read."""

import shutil
import subprocess
from pathlib import Path

import pytest

from guardbit import dashboards

WEB = Path(dashboards.__file__).parent / "web"


def test_helpers_by_node():
    node = shutil.which("node")
    if node is None:
        pytest.skip("node is not installed (apt-get install nodejs)")
    tests = Path(__file__).with_name("format.test.js")
    done = subprocess.run([node, "--test", tests], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr


def test_lines_are_as_long_as_those_of_python():
    ours = [path for path in WEB.iterdir() if not path.name.startswith("uPlot")]
    lines = [line for path in ours for line in path.read_text().splitlines()]
    assert len(lines) > 1000 and [line for line in lines if len(line) > 100] == []
