"""`docs/alarms.md` shows what its commands print, and says what verdicts mean."""

from __future__ import annotations

import re
from pathlib import Path

from typer.testing import CliRunner

from guardbit.cli import app
from guardbit.monitor.verdict import judge
from guardbit.records import Alarm

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "alarms.md").read_text()


def test_the_replay_on_the_page_is_what_comes(monkeypatch):
    monkeypatch.chdir(ROOT)
    found = re.search(r"`guardbit (replay studies/\S+)`.*?\n```\n(.*?)```", PAGE, re.DOTALL)
    assert found is not None
    result = CliRunner().invoke(app, found[1].split(), env={"COLUMNS": "100"})
    assert result.exit_code == 0
    assert found[2].split() == result.stdout.split()  # the page breaks long lines


def test_the_page_says_what_rounding_without_a_measured_cause_means():
    found = judge([Alarm(5, "h.1.attn", (1,), "head_growth", "it grows")], sites=12)
    assert found.verdict == "rounding"
    (row,) = [line for line in PAGE.splitlines() if line.startswith("| `rounding` |")]
    (quoted,) = re.findall(r'"(.+?)"', row)
    assert quoted in found.why
    assert "it is a guess" in row and "`guardbit diagnose RUN`" in row
