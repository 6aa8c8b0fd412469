"""The page in the docs about dashboards names what exists."""

import re
from pathlib import Path

from guardbit.callbacks import loggers
from guardbit.callbacks.loggers import COUNTED_KEYS, MODULE_KEY, WORST_KEYS
from guardbit.callbacks.monitoring import MAP_KEY
from guardbit.catalog import LOGGED_KEYS
from guardbit.dashboards import figures

DOCS = Path(__file__).parents[2] / "docs"
TEXT = (DOCS / "dashboards.md").read_text(encoding="utf-8")


def test_every_key_is_in_the_table_and_every_key_of_the_table_exists():
    documented = set(re.findall(r"`(guardbit/[a-z_]+)`", TEXT))
    documented = {key for key in documented if not (DOCS.parent / key).exists()}
    others = {MODULE_KEY, loggers.ALARMS_KEY, loggers.SWITCHES_KEY, MAP_KEY}
    assert documented == {*LOGGED_KEYS, *COUNTED_KEYS, *WORST_KEYS, *others}


def test_every_image_exists_and_every_figure_is_shown():
    images = re.findall(r"\]\((images/[^)]+)\)", TEXT)
    assert images and all((DOCS / image).is_file() for image in images)
    drawn = {*figures.__all__} - {"CHARTS", "model_map"}
    assert all(f"`{name}`" in TEXT for name in drawn), drawn
    assert ".plot.map(" in TEXT
    # Each figure stands in its own line or paragraph with a picture.
    for name in drawn - {"multiple_maxima"}:
        (line,) = [line for line in TEXT.splitlines() if f"`{name}`" in line]
        assert "![](images/" in line, name


def test_no_image_lies_about_that_no_page_shows():
    pages = [*DOCS.glob("*.md"), DOCS.parent / "README.md"]
    text = "".join(page.read_text(encoding="utf-8") for page in pages)
    shown = {DOCS / name for name in re.findall(r"\]\((?:docs/)?(images/[^)]+)\)", text)}
    assert {path for path in (DOCS / "images").rglob("*") if path.is_file()} == shown
