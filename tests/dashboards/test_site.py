"""The documentation's site builds without a warning, and its reference names all that is public."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import guardbit
from guardbit import metrics

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    for package in ("mkdocs", "material", "mkdocstrings"):
        pytest.importorskip(package, reason="the extra `docs` is not installed")
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "-d", str(folder)]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    built = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert built.returncode == 0, built.stderr
    assert "WARNING" not in built.stdout + built.stderr
    return folder


def test_every_page_is_built(site):
    pages = {path.stem for path in (ROOT / "docs").glob("*.md")}
    assert pages | {"404"} == {path.stem for path in site.glob("*.html")}


def test_the_reference_has_every_public_name(site):
    page = (site / "api.html").read_text(encoding="utf-8")
    documented = {
        name.rpartition(".")[2] for name in re.findall(r'<h3 id="(guardbit\.[\w.]+)"', page)
    }
    constants = {name for name in guardbit.__all__ if name.isupper()}
    assert set(guardbit.__all__) - documented == constants
    assert all(f"guardbit.{name}" in page for name in constants)
    # From the docstrings, not the names alone.
    assert "Cadence in optimizer steps" in page
    page = (site / "metrics.html").read_text(encoding="utf-8")
    updates = re.findall(r'<h3 id="guardbit\.metrics\.(\w+)\.update"', page)
    assert set(updates) == {one.__name__ for one in metrics._CLASSES}


def test_search_works_from_disk(site, new_page):
    page = new_page("file:", "data:")
    page.goto((site / "index.html").as_uri() + "?q=dropout")
    page.wait_for_selector(".md-search-result__item a[href*='guarantees.html']", state="attached")


def test_nothing_is_fetched_from_elsewhere(site):
    for path in site.glob("*.html"):
        page = path.read_text(encoding="utf-8")
        fetched = re.findall(r'<(?:script|link|img)[^>]*(?:src|href)="(https?://[^"]*)"', page)
        assert fetched == [], path.name
