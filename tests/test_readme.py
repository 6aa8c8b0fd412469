"""What an index shows of the README, where its relative pictures and links lead nowhere."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

from typer.testing import CliRunner

from guardbit.cli import app

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
RELATIVE = r"\]\((?!https?:)([^)]*)\)"


def as_an_index_shows_it():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    text = README
    for change in project["tool"]["hatch"]["metadata"]["hooks"]["fancy-pypi-readme"][
        "substitutions"
    ]:
        text = re.sub(change["pattern"], change["replacement"], text)
    return text


def test_all_that_the_readme_leads_to_exists():
    targets = re.findall(RELATIVE, README)
    assert targets and all((ROOT / target.partition("#")[0]).exists() for target in targets)


def test_an_index_gets_no_picture_and_no_link_that_leads_nowhere():
    text = as_an_index_shows_it()
    assert not re.search(RELATIVE, text) and "![" not in text
    assert "[arXiv 2510.04212](https://arxiv.org/abs/2510.04212)" in text
    # A caption without its picture says nothing.
    assert "A real failure of GPT-2 small;" in README and "A real failure of GPT-2" not in text
    # All else stays.
    headings = re.findall(r"^#+ .*$", README, re.MULTILINE)
    assert re.findall(r"^#+ .*$", text, re.MULTILINE) == headings
    assert "pip install" in text.partition("## Use")[0]


def test_the_replay_on_the_page_is_what_comes(monkeypatch):
    monkeypatch.chdir(ROOT)
    found = re.search(r"`guardbit (replay guardbit/\S+)`.*?\n```\n(.*?)```", README, re.DOTALL)
    assert found is not None
    result = CliRunner().invoke(app, found[1].split(), env={"COLUMNS": "100"})
    assert result.exit_code == 0
    # The page leaves out the verdict.
    assert result.stdout.split()[: len(found[2].split())] == found[2].split()
