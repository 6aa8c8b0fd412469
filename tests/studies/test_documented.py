"""The commands that the pages name for the study's tables and figures still make them."""

import contextlib
import importlib
import io
import json
import re
import shlex
import tempfile
from functools import cache
from glob import glob
from itertools import chain
from pathlib import Path

import pytest

from studies.rescue import packed

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *ROOT.glob("docs/*.md"), ROOT / "studies" / "rescue" / "README.md"]
#: What each command has printed of the committed runs; `python -m tests.studies.test_documented`
#: writes it anew. Other tests compare the studies with figures worked out by hand.
PRINTED = ROOT / "tests" / "data" / "studies.json"
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


@pytest.fixture(scope="module")
def read_once():
    return cache(packed.load)


def test_there_are_such_commands():
    modules = {command.split()[0] for command in documented()}
    assert {"branches", "controls", "copies", "counterfactual", "growth"} <= modules


#: What a module says of results that hold no run for it.
REFUSED = {
    "counterfactual": "no run has both kinds of copies",
    "dose_response": "no run has such copies of all ways",
    "entropies": "no run recorded entropies",
    "low_rate": "no run at a rate of",
    "remedy": "no run was on row_max",
}


@pytest.mark.parametrize("module", REFUSED)
def test_results_without_such_runs_are_refused(module, tmp_path):
    with pytest.raises(SystemExit, match=REFUSED[module]):
        importlib.import_module(f"studies.rescue.{module}").main([str(tmp_path)])


def printed(command, folder, load):
    """What a command prints, with its figures in a folder."""
    module, *words = shlex.split(command)
    words = list(chain.from_iterable(map(expanded, words)))
    if "--figure" in words:
        at = words.index("--figure") + 1
        words[at] = str(folder / words[at])
    study = importlib.import_module(f"studies.rescue.{module}")
    text = io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(text):
        patch.chdir(ROOT)
        if hasattr(study, "load"):
            patch.setattr(study, "load", load)
        study.main(words)
    return text.getvalue()


def numbers_of(text):
    """The words of a text, and its numbers."""
    number = r"-?\d[\d,]*\.?\d*(?:e[+-]?\d+)?"
    found = [float(one.replace(",", "")) for one in re.findall(number, text)]
    # Columns are as wide as what stands in them.
    return re.sub(number, "#", text).split(), found


@pytest.mark.parametrize("command", documented())
def test_it_prints_what_it_did(command, read_once, tmp_path):
    words, numbers = numbers_of(printed(command, tmp_path, read_once))
    kept_words, kept = numbers_of(json.loads(PRINTED.read_text(encoding="utf-8"))[command])
    assert words == kept_words
    # One in the last of three digits, or of two behind the point, for another processor's sums.
    assert numbers == pytest.approx(kept, rel=0.01, abs=0.011)
    assert [path.suffix for path in tmp_path.iterdir()] == [".png"] * ("--figure" in command)


if __name__ == "__main__":
    folder, load = Path(tempfile.mkdtemp()), cache(packed.load)
    told = {command: printed(command, folder, load) for command in documented()}
    PRINTED.write_text(json.dumps(told, indent=1, ensure_ascii=False), encoding="utf-8")
