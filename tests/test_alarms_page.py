"""`docs/alarms.md` shows what its commands print, and says what each state of a run means."""

from __future__ import annotations

import re
from pathlib import Path

from typer.testing import CliRunner

from guardbit.cli import app
from guardbit.judgement import STATES

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "alarms.md").read_text()


def test_the_replay_on_the_page_is_what_comes(monkeypatch):
    monkeypatch.chdir(ROOT)
    found = re.search(r"`guardbit (replay guardbit/\S+)`.*?\n```\n(.*?)```", PAGE, re.DOTALL)
    assert found is not None
    result = CliRunner().invoke(app, found[1].split(), env={"COLUMNS": "100"})
    assert result.exit_code == 0
    assert found[2].split() == result.stdout.split()  # the page breaks long lines


def test_the_page_says_what_each_state_means():
    table = PAGE.partition("| state | what it means |")[2].partition("\n\n")[0]
    assert set(re.findall(r"^\| `([a-z-]+)` \|", table, re.MULTILINE)) == set(STATES)
