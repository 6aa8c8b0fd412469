"""The catalogue, and the tables in the docs that are made of it."""

import re
from pathlib import Path

import pytest

from guardbit.catalog import (
    BY_NAME,
    CATALOG,
    HEAD_INDICATORS,
    INDICATORS,
    LOGGED_KEYS,
    RUN_INDICATORS,
)

DOCS = Path(__file__).parents[1] / "docs"


def indicator_rows():
    """The table of `docs/rules.md`, whose definitions stand there only."""
    for one in CATALOG:
        unit = ", ".join(filter(None, (one.unit, "signed" if one.is_signed else "")))
        baseline = "" if one.floor is None else f"its own, floor {one.floor:g}"
        key = f"`guardbit/{one.name}`" if one.is_logged else ""
        begins, ends = f"| `{one.name}` | {one.title}: ", f" | {unit} | {baseline} | {key} |"
        yield f"{re.escape(begins)}[^|\n]+{re.escape(ends)}"


def key_rows():
    """The rows of `docs/dashboards.md` about what loggers get of each indicator."""
    for key, name in LOGGED_KEYS.items():
        yield re.escape(f"| `{key}` | {BY_NAME[name].label} |")


@pytest.mark.parametrize("page, rows", [("rules.md", indicator_rows), ("dashboards.md", key_rows)])
def test_the_tables_of_the_docs_are_those_of_the_catalogue(page, rows):
    expected = "\n".join(rows())
    assert re.search(expected, (DOCS / page).read_text("utf-8")), f"the table is:\n{expected}"


def test_the_page_on_indicators_names_no_other():
    page = (DOCS / "rules.md").read_text("utf-8")
    (section,) = re.findall(r"^## Indicators\n(.*?)^## ", page, re.M | re.DOTALL)
    assert re.findall(r"^\| `(\w+)` \|", section, re.M) == list(INDICATORS)


def test_names_and_keys_are_there_once():
    assert len(BY_NAME) == len(CATALOG) == len(INDICATORS)
    assert len(LOGGED_KEYS) == sum(one.is_logged for one in CATALOG)
    assert not set(HEAD_INDICATORS) & set(RUN_INDICATORS)


def test_a_title_begins_a_line_and_leaves_symbols_alone():
    titles = [BY_NAME[name].title for name in ("max_logit", "dq_relative_error", "loss")]
    assert titles == ["Max logit", "dQ relative error", "Training loss"]
    assert BY_NAME["w_q_spectral_norm"].title == "W_Q spectral norm"


def test_what_has_a_baseline_is_a_size_of_a_head():
    """A logarithm is taken of it, relative to the median head."""
    compared = [one for one in CATALOG if one.floor is not None]
    assert compared
    for one in compared:
        assert one.floor >= 0 and not one.is_signed and not one.is_of_run, one.name
