from __future__ import annotations

import re

import numpy as np
import pandas as pd
import pytest
from matplotlib.figure import Figure
from PIL import Image

from guardbit.dashboards.figures import CHARTS
from guardbit.dashboards.report import FORMATS, Run, write_report, write_reports
from guardbit.dashboards.report.document import Document, Heading, Paragraph, Picture
from guardbit.dashboards.report.pages import text_pages

SAMPLES = ["step", "site", "layer", "head", "indicator", "value"]
ATTACK = "a|b <script>alert(1)</script> `x` [y](z) \n# h"


def short(site="h.0.attn"):
    rows = [
        (step, site, 0, head, "delta_bias", 1.0 + step * head)
        for step in range(0, 100, 10)
        for head in range(2)
    ]
    return pd.DataFrame(rows, columns=SAMPLES)


def few(run):
    """Two layers, which are drawn faster than twelve."""
    return run.frame[run.frame["layer"].isin([-1, 2, 3])]


@pytest.fixture(scope="module")
def markdown(run, tmp_path_factory):
    output = tmp_path_factory.mktemp("md") / "report.md"
    settings = {"settings": {"every_n_train_steps": 50}}
    assert write_report(few(run), run.events, settings, output, format="md") == output
    return output


def test_markdown_says_the_same_in_the_same_order(markdown):
    text = markdown.read_text(encoding="utf-8")
    said = "# Alarmed: 2 of 24 heads since step 2,950; 2 still growing after the switch\n"
    assert text.startswith(said)
    order = ["First alarm", "Alarms", "What the switch did", "Heads to watch", "Figures"]
    places = [text.index(words) for words in [*order, "Timeline", "Settings and versions"]]
    assert places == sorted(places)
    assert "| layer 2 · head 7 · h.2.attn |" in text
    assert "**2,950** Alarm: norm\\_trend · h.2.attn, head 7" in text
    assert "<b>" not in text  # the error's text, which is no markup here either


def test_markdowns_pictures_exist(markdown):
    found = re.findall(r"!\[[^\]]*\]\(([^)]+)\)", markdown.read_text(encoding="utf-8"))
    assert found == [f"report_figures/{chart.name}.png" for chart in CHARTS]
    for address in found:
        with Image.open(markdown.parent / address) as picture:
            assert picture.width == 1500


def test_markdown_tables_keep_their_columns_whatever_the_data_says(tmp_path):
    frame, settings = short(ATTACK), {"settings": {ATTACK: ATTACK}}
    text = write_report(frame, None, settings, tmp_path / "r.md", format="md").read_text()
    assert not re.search(r"(?<!\\)[<`\[]", text)  # every sign of markup has a backslash
    rows = [line for line in text.splitlines() if line.startswith("|")]
    cells = [re.split(r"(?<!\\)\|", row)[1:-1] for row in rows]
    tables = [len(row) for row in cells]
    assert set(tables) == {2, 4}  # tiles and heads to watch have four columns, settings two


def test_pdf_has_text_pages_first_and_a_page_a_figure(run, tmp_path):
    output = tmp_path / "report.pdf"
    assert write_report(few(run), run.events, {}, output, format="pdf", title="gpt2") == output
    content = output.read_bytes()
    assert content.startswith(b"%PDF-")
    pages = [
        [float(number) for number in box.split()]
        for box in re.findall(rb"/Type /Page\b.*?/MediaBox \[([^\]]*)\]", content, re.DOTALL)
    ]
    text = [page for page in pages if page[2:] == pytest.approx([8.27 * 72, 11.69 * 72], abs=1)]
    figures = [page for page in pages if page[2] == pytest.approx(720)]
    assert pages[: len(text)] == text and len(text) >= 1
    assert len(figures) == len(CHARTS) and len(text) + len(figures) == len(pages)
    assert b"(GuardBit: gpt2)" in content and b"/CreationDate" not in content


def test_no_line_of_a_page_runs_off_it(run):
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    from guardbit.dashboards.report.contents import document_of
    from guardbit.dashboards.report.pages import text_pages

    why = "a very long reason " * 30
    events = run.events.assign(why=why)
    for page in text_pages(document_of(Run("t-" * 80, short(), events, {"x": {"y": why}}))):
        renderer = FigureCanvasAgg(page).get_renderer()
        for line in page.texts:
            box = line.get_window_extent(renderer)
            assert box.x1 <= page.bbox.x1 and box.y0 >= 0, line.get_text()


def test_png_is_a_folder_of_pictures_with_the_summary(tmp_path):
    folder = tmp_path / "pictures"
    assert write_report(short(), None, {}, folder, format="png") == folder
    assert {path.name for path in folder.iterdir()} == {"summary.png"}
    with Image.open(folder / "summary.png") as picture:
        assert np.asarray(picture.convert("L")).min() < 100


@pytest.mark.parametrize("format", FORMATS)
def test_a_place_of_the_wrong_kind_is_refused(tmp_path, format):
    (tmp_path / "file").write_text("x")
    place = tmp_path / "file" if format == "png" else tmp_path
    with pytest.raises(ValueError, match=f"but {place} is a"):
        write_report(short(), None, None, place, format=format)


@pytest.mark.parametrize("format", FORMATS)
def test_a_name_that_means_another_format_is_refused(tmp_path, format):
    for meant in set(FORMATS) - {format}:
        with pytest.raises(ValueError, match=f"x.{meant} is named as a {meant.upper()}"):
            write_report(short(), None, None, tmp_path / f"x.{meant}", format=format)
    assert list(tmp_path.iterdir()) == []


def test_an_unknown_format_is_refused(tmp_path):
    with pytest.raises(ValueError, match="one of html, png, pdf, md, got 'gif'"):
        write_report(short(), None, None, tmp_path / "x.gif", format="gif")


# --- several runs --------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def comparison(run, tmp_path_factory):
    output = tmp_path_factory.mktemp("two") / "comparison.html"
    well = run.frame[run.frame["layer"].isin([-1, 4, 5])]
    runs = [
        Run("ill", few(run), run.events, {"precision": "bf16", "seed": 1}),
        Run("well", well, None, {"precision": "bf16", "seed": 2}),
    ]
    assert write_reports(runs, output) == output
    return output


def test_runs_stand_side_by_side(comparison):
    page = comparison.read_text(encoding="utf-8")
    text = re.sub(r"<svg.*?</svg>", "", page, flags=re.DOTALL)
    assert '<h1 class="outcome alarmed">2 runs: 1 alarmed, 1 healthy</h1>' in text
    assert '<dt>ill</dt><dd class="outcome alarmed">Alarmed</dd>' in text
    assert "Healthy: no alarm up to step 4,950" in text
    assert text.index("<th>ill</th><th>well</th>") > 0
    assert "<td>Outcome</td><td>alarmed</td><td>healthy</td>" in text
    assert "<td>First alarm</td><td>step 2,950" in text
    assert "layer 2 · head 7, &gt; 1,000 ×" in text
    # What is the same in both is no news.
    assert "<td>seed</td><td>1</td><td>2</td>" in text
    assert "<td>precision" not in text
    names = {path.stem for path in (comparison.parent / "comparison_figures").iterdir()}
    assert names == {
        "runs_loss",
        "runs_w_q_spectral_norm",
        "runs_max_logit",
        "runs_multiple_maxima_bf16",
        "run_0_model_map",
        "run_1_model_map",
    }


def test_runs_that_cannot_be_compared_are_refused(tmp_path):
    frame = short()
    with pytest.raises(ValueError, match="compares 4 runs at most"):
        write_reports([Run(str(n), frame) for n in range(5)], tmp_path / "r.html")
    with pytest.raises(ValueError, match="different titles, got a, a"):
        write_reports([Run("a", frame), Run("a", frame)], tmp_path / "r.html")
    with pytest.raises(ValueError, match="at least one run"):
        write_reports([], tmp_path / "r.html")


def test_a_run_without_samples_is_compared_too(tmp_path):
    runs = [Run("full", short()), Run("empty", pd.DataFrame(columns=SAMPLES))]
    text = write_reports(runs, tmp_path / "r.md", format="md").read_text()
    assert "no samples" in text and "2 runs: 2 unclear" in text


def test_long_names_lose_in_the_text_what_they_have_in_common(run, tmp_path):
    names = [f"{name}-gpt2-small-with-a-long-name-lr1.5e-03-seed4" for name in ("one", "two")]
    runs = [Run(name, few(run), run.events) for name in names]
    text = write_reports(runs, tmp_path / "r.md", format="md").read_text(encoding="utf-8")
    assert "# 2 runs: 2 alarmed\n" in text
    assert "|  | one | two |" in text
    assert [text.count(name) for name in names] == [1, 1], "in the line that names the runs"


def test_a_page_of_text_has_no_title_without_text():
    blocks = [
        Heading("Figures alone"), Picture("a", "", "", Figure()), Heading("Words"),
        Heading("below", 3), Paragraph("are here"), Heading("the end"),
    ]  # fmt: skip
    (page,) = text_pages(Document("run", "", "headline", "healthy", (), (), blocks))
    written = [text.get_text() for text in page.texts]
    assert written[-3:] == ["Words", "below", "are here"]
    assert "Figures alone" not in written
