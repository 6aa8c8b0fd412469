"""The interactive report in a real browser (Debian's chromium): skipped where there is none."""

import pytest

from guardbit.dashboards import report as reports
from guardbit.dashboards.figures import story
from guardbit.dashboards.loading import LoadedRun as Run
from guardbit.dashboards.report import write_reports
from tests.dashboards.made import colour, journal, modules, wait, write_report


@pytest.fixture
def visit(new_page):
    """Opens a page, which may neither ask for anything nor complain."""

    def visit(path, fragment="", **settings):
        page = new_page("file:", **settings)
        page.on(
            "console",
            lambda told: new_page.problems.append(told.text) if told.type == "error" else None,
        )
        page.goto(f"file://{path}{fragment}")
        return page

    return visit


@pytest.fixture(scope="module")
def without_figures():
    """The pictures beside the page take most of the time, and other tests look at them."""
    patch = pytest.MonkeyPatch()
    patch.setattr(reports, "CHARTS", {"story": story})
    yield
    patch.undo()


@pytest.fixture(scope="module")
def report(run, without_figures, tmp_path_factory):
    path = tmp_path_factory.mktemp("report") / "report.html"
    return write_report(run.frame, run.events, {"a": 1}, path, title="a run")


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 390])
def test_the_page_tells_its_outcome_first_and_fits(visit, report, scheme, width):
    page = visit(report, color_scheme=scheme, viewport={"width": width, "height": 900})
    wait(page, "document.querySelectorAll('#story-charts .uplot').length === 3")
    assert page.inner_text("h1").startswith("Alarmed: 2 of 144 heads since step 2,950")
    assert page.locator("h1").bounding_box()["y"] < 300
    assert page.evaluate("document.documentElement.scrollWidth") == width
    # No text is smaller than 11 pixels: neither in the page nor on its canvases.
    sizes = page.evaluate(
        "[...document.querySelectorAll('main *')].filter((one) => one.offsetParent && "
        "[...one.childNodes].some((part) => part.nodeType === 3 && part.data.trim()))"
        ".map((one) => parseFloat(getComputedStyle(one).fontSize))"
    )
    assert min(sizes) >= 11
    paper = sum(page.evaluate("getComputedStyle(document.body).backgroundColor.match(/\\d+/g)"
                              ".slice(0, 3).map(Number)"))  # fmt: skip
    assert (paper > 600) == (scheme == "light")
    # At the end the alarmed head stands out against the others on either paper.
    page.evaluate("showStep(null)")
    sick, well = sum(colour(page, 2, 7)), sum(colour(page, 9, 9))
    assert sick < well - 300 if scheme == "light" else sick > well + 100


def test_the_player_the_cells_and_the_links(visit, report):
    page = visit(report)
    wait(page, "document.body.dataset.step >= 2950")
    assert "at step 2,9" in page.inner_text("#map-step")
    page.evaluate("showStep(0)")
    assert page.evaluate("view.state.map.alarmed.length") == 0
    page.click("#play")
    wait(page, "view.step > 200")
    page.click("#play")
    # A cell opens its head's history, and the address names both.
    page.evaluate("select({ layer: 2, head: 7 })")
    wait(page, "!document.getElementById('detail').hidden")
    assert "layer 2, head 7" in page.inner_text("#detail-title")
    assert "First alarm at step 2,950" in page.inner_text("#detail-note")
    assert page.evaluate("location.hash").endswith("&head=2.7")
    other = visit(report, "#step=4000&head=2.3")
    wait(other, "!document.getElementById('detail').hidden")
    assert "layer 2, head 3" in other.inner_text("#detail-title")
    assert abs(other.evaluate("view.state.map.step") - 4000) <= 130


def test_three_hundred_events_are_a_row_a_head(visit, run, without_figures, tmp_path):
    alarms = [
        (3000 + n, "alarm", f"h.{n % 12}.attn", (n % 5,), f"It grew {n}.", "norm_growth")
        for n in range(300)
    ]
    page = visit(write_report(run.frame, journal(*alarms), {}, tmp_path / "report.html"))
    rows = page.locator(".alarms > details")
    assert rows.count() == 11  # ten, and one that folds the others
    assert page.locator(".alarms > details > summary").first.inner_text().split("\n") == [
        "layer 0, head 0",
        "norm_growth × 5",
        "steps 3,000 to 3,240",
    ]
    # What is seen before anything is unfolded; the appendix is folded.
    assert len(page.inner_text("main").split()) <= 1200
    page.locator("summary", has_text="Timeline").click()
    lines = page.locator("#events li")
    assert lines.first.inner_text() == "step 3,000 alarm: norm_growth, h.0.attn, head 0\nIt grew 0."
    # The first of 60 heads, and the newest.
    assert lines.count() == 100
    assert page.inner_text("#event-count").startswith("100 of 300: the newest, and all first")
    sentence = page.locator(".alarms p", has_text="It grew 1.").first
    assert sentence.is_hidden()
    page.locator(".alarms > details > summary").nth(1).click()
    sentence.wait_for(state="visible")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_modules_cells_tell_apart_what_was_found_and_open_its_numbers(
    visit, run, without_figures, tmp_path, scheme
):
    name = f"model.{'layers.40.' * 3}a_long_name_of_a_projection"
    rows = [
        (10, f"h.{n}", "linear", "output", "gain", value)
        for n, value in enumerate([0.0, 1e-5, 9e-4, 1.0] * 10)
    ]
    path = tmp_path / "report.html"
    rows = modules(*rows, (10, name, "linear", "input", "slope", 0.5))
    path = write_report(run.frame, run.events, {}, path, modules=rows)
    page = visit(path, color_scheme=scheme, viewport={"width": 390, "height": 900})
    assert page.evaluate("document.documentElement.scrollWidth") == 390
    drawn = page.evaluate(
        "[...document.querySelectorAll('.layers details:nth-of-type(-n + 4) i')]"
        ".map((one) => getComputedStyle(one)).map((one) => one.background)"
    )
    # Exact, a hundredth of the limit, nearly the limit, beyond it; and not measured.
    assert len({*drawn[::3], drawn[1]}) == 5 and drawn[1] == drawn[2]
    numbers = page.locator(".layers p", has_text="limit 0.1 %, step 10").nth(3)
    assert numbers.is_hidden()
    page.locator("#section-layers a").click()
    numbers.wait_for(state="visible")
    assert numbers.inner_text().split("\n") == ["h.3", "output: gain 100 %, limit 0.1 %, step 10"]


def test_runs_lie_over_one_another(visit, run, without_figures, tmp_path):
    well = run.frame[run.frame["layer"].isin([-1, 4, 5])]
    runs = [Run("ill", run.frame, run.events), Run("well", well)]
    page = visit(write_reports(runs, tmp_path / "comparison.html"))
    wait(page, "document.querySelectorAll('#overlays .uplot').length === 4")
    series = "document.querySelector('#overlays').charts[0].plot.series"
    colours = f"{series}.map(one => one.label + one._stroke)"
    both = page.evaluate(colours)
    assert page.inner_text("h1") == "2 runs: 1 alarmed, 1 healthy"
    # In its colour: the run's alarm and switch.
    drawn = page.evaluate("document.querySelector('#overlays').charts[0].plot.drawnMarks")
    assert drawn == [{"kind": "alarm", "step": 2950}, {"kind": "switch", "step": 3100}]
    assert page.inner_text("#key") == "▼\u00a0first alarm of a head · ◆\u00a0switch"
    assert "In the run’s colour: ▼" in page.locator("p", has_text="One line is").inner_text()
    labels = page.locator("#overlays .u-legend").first.inner_text()
    assert "ill" in labels and "well" in labels
    # Without a loss of the first run the second keeps its colour.
    runs[0] = Run("ill", run.frame[run.frame["indicator"] != "loss"], run.events)
    page = visit(write_reports(runs, tmp_path / "one.html"))
    wait(page, "document.querySelectorAll('#overlays .uplot').length === 4")
    assert page.evaluate(colours)[-1] == both[-1]
