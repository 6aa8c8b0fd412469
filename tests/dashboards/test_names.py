"""Names of runs that are shown together."""

from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from guardbit.dashboards.names import MOST_CHARACTERS, distinguished, fitted, place_of_run

LONG = "gpt2-small-without-biases-lr1.5e-03-seed4"


def test_what_all_have_in_common_goes_first():
    names = [f"stock-{LONG}", f"rescue-all-{LONG}"]
    assert distinguished(names) == fitted(names) == ["stock", "rescue-all"]
    short = ["a-1", "b-1"]
    assert distinguished(short) == short, "there is room"
    nested = [LONG, f"{LONG}-again"]
    assert distinguished(nested) == nested, "nothing would be left of one"
    turned = ["a" * 30 + "-" + "b" * 30, "b" * 30 + "-" + "a" * 30]
    assert distinguished(turned) == turned


@given(st.lists(st.text("ab-", min_size=1, max_size=120), min_size=1, max_size=4, unique=True))
def test_names_fit_and_still_differ_where_they_are_not_cut(names):
    told = distinguished(names)
    assert len(set(told)) == len(names) and all(told)
    assert sum(map(len, fitted(names))) <= MOST_CHARACTERS


def test_what_is_too_long_is_cut_in_the_middle():
    (name,) = fitted(["start-" + "x" * 100 + "-end"])
    assert len(name) in (MOST_CHARACTERS - 1, MOST_CHARACTERS)
    assert name.startswith("start-x") and name.endswith("x-end") and "…" in name


def test_a_run_is_called_after_its_log_directory(tmp_path, monkeypatch):
    folder = tmp_path / "version_0" / "guardbit"
    assert place_of_run(folder).name == "version_0"
    assert place_of_run(tmp_path / "mine").name == "mine"
    folder.mkdir(parents=True)
    monkeypatch.chdir(folder)
    assert place_of_run(Path()).name == "version_0"
