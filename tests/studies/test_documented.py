"""The commands that the pages name for the study's tables and figures still make them."""

import importlib
import re
import shlex
from glob import glob
from itertools import chain
from pathlib import Path

import pytest

from guardbit.monitor.replay import replay
from studies.rescue import survival

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *ROOT.glob("docs/*.md"), ROOT / "studies" / "rescue" / "README.md"]
#: Those that train, or write runs and tables anew.
OTHERS = {"train", "families", "doses", "kinds", "analyse"}


def documented():
    """The commands after `python -m studies.rescue.`, but those that another one goes on from."""
    text = "\n".join(page.read_text() for page in PAGES)
    # In running text a command may go over the end of a line.
    found = re.findall(r"^    python -m studies\.rescue\.(.+)$", text, re.MULTILINE)
    found += re.findall(r"`python -m studies\.rescue\.([^`]+)`", text)
    every = {" ".join(each.split()) for each in found if each.split()[0] not in OTHERS}
    return sorted(e for e in every if not any(o.startswith(f"{e} ") for o in every))


def expanded(word):
    """Of a word what a shell makes of braces and stars."""
    if match := re.fullmatch(r"(.*)\{(.+)\}(.*)", word):
        before, middle, after = match.groups()
        return list(chain.from_iterable(expanded(before + m + after) for m in middle.split(",")))
    return sorted(glob(word, root_dir=ROOT)) if "*" in word else [word]


def replay_of_few(frame, **how):
    """A replay of few samples; `test_analyse.py` has what all samples of each run say."""
    return replay(frame[frame["step"] % 1000 == 0], **how)


#: Does not read all results.
QUICK = "paired studies/rescue/results/paired.csv"


def test_there_are_such_commands():
    modules = {command.split()[0] for command in documented()}
    assert QUICK in documented()
    assert {"branches", "controls", "copies", "counterfactual"} <= modules


@pytest.mark.parametrize(
    "command",
    [QUICK, *(pytest.param(x, marks=pytest.mark.slow) for x in documented() if x != QUICK)],
)
def test_it_runs(command, read_once, monkeypatch, tmp_path, capsys):
    module, *words = shlex.split(command)
    words = list(chain.from_iterable(map(expanded, words)))
    if "--figure" in words:
        at = words.index("--figure") + 1
        words[at] = str(tmp_path / words[at])
    monkeypatch.chdir(ROOT)
    study = importlib.import_module(f"studies.rescue.{module}")
    if hasattr(study, "load"):
        monkeypatch.setattr(study, "load", read_once)
    if hasattr(study, "replay"):
        monkeypatch.setattr(study, "replay", replay_of_few)
    # A few draws: what is made of them has tests of its own.
    monkeypatch.setattr(survival, "RESAMPLES", 20)
    study.main(words)
    assert len(capsys.readouterr().out.splitlines()) > 3
    assert [path.suffix for path in tmp_path.iterdir()] == [".png"] * ("--figure" in words)
