"""The live page in a real browser: Debian's chromium, driven by Playwright, without a network."""

import os
import signal
import subprocess
import sys

import pytest

import guardbit
from tests.dashboards.made import colour, wait


@pytest.fixture
def open_page(new_page):
    """Opens pages that ask ten times a second."""

    def open_page(**settings):
        opened = new_page("http://127.0.0.1:", "data:", **settings)
        opened.add_init_script(
            """(() => {
              const repeat = setInterval;
              window.setInterval = (what, every) => repeat(what, Math.min(every, 100));
            })()"""
        )
        return opened

    return open_page


@pytest.fixture
def page(open_page):
    return open_page()


def show(page, server):
    page.goto(server.address)
    page.wait_for_selector("#story-charts .uplot")
    wait_until_drawn(page)


def wait_until_drawn(page):
    wait(page, "document.body.dataset.version == view.state.version")


def text(page, selector):
    return page.locator(selector).inner_text()


def click_cell(page, layer, head):
    place = page.evaluate(
        """([layer, head]) => {
          const { left, cell, layers } = geometry();
          return [left + (head + 0.5) * cell.width, 1 + (layers - 1 - layer + 0.5) * cell.height];
        }""",
        [layer, head],
    )
    page.locator("#map").click(position={"x": place[0], "y": place[1]})


def test_from_nothing_through_growth_to_a_head_that_falls_ill(page, serve, recorder, tmp_path):
    run = tmp_path / "run"
    with serve(run) as server:
        page.goto(server.address)
        wait(page, "document.querySelector('#status').textContent.includes('first sample')")
        assert text(page, "h1") == "Waiting for the first sample"
        assert "none so far" in text(page, "#events")

        with recorder(run, ill_from=300) as writer:
            writer.record(range(0, 300, 10))
            wait(page, "view.state.last_step === 290")
            wait_until_drawn(page)
            assert text(page, "h1") == "Running, healthy: no alarm up to step 290"
            assert page.get_attribute("#map", "data-cells") == "12"
            assert page.locator("#story-charts .uplot").count() == 3
            tiles = page.locator(".tiles dd:nth-child(2)").all_inner_texts()
            # The recorder's loss at step 270, the middle of the last five.
            assert tiles == ["none", "–", "0", "2.73"]
            # Charts come before prose.
            top = [page.locator(x).bounding_box()["y"] for x in ("#tiles", "#story", "#lede")]
            assert top == sorted(top)
            healthy = colour(page, 1, 2)
            assert min(healthy) > 220  # light
            assert page.get_attribute("#section-timeline", "open") is not None
            page.locator("summary", has_text="Timeline").click()
            assert page.get_attribute("#section-timeline", "open") is None, "folded"

            writer.record(range(300, 400, 10))
            writer.alarm(300)
            wait(page, "view.state.events.length === 2 && view.state.last_step === 390")
            wait_until_drawn(page)
        wait(page, "document.querySelector('#status').className === 'finished'")
        wait(page, "document.querySelector('h1').textContent.startsWith('Switched')")
        said = "Switched: 1 of 12 heads alarmed at step 300; logits and W_Q have not fallen yet"
        assert text(page, "h1") == said
        assert "outcome switched" in page.get_attribute("h1", "class")
        # What has come stands in its order, and what a reader has folded stays so.
        assert (
            page.locator("nav a").all_inner_texts() == page.locator("summary h2").all_inner_texts()
        )
        assert page.locator(".alarms b").all_inner_texts() == ["layer 1, head 2"]
        assert page.get_attribute("#section-timeline", "open") is None
        page.locator("summary", has_text="Timeline").click()
        (first,) = page.locator(".alarms details[open] p").all_inner_texts()
        assert first.startswith("h.1.attn: ") and first.count("left</b> its trend") == 1
        assert "its trend" not in text(page, "#lede"), "no line twice"
        assert guardbit.load(run).judgement.advice in text(page, "#lede")
        # What the data says stays text.
        assert "<b>left</b> its trend" in text(page, "#events")
        assert max(colour(page, 1, 2)) < 60 and min(colour(page, 0, 0)) > 220
        assert "layer 1, head 2" in text(page, "#worst tbody tr:first-child")
        assert page.get_attribute("#worst tbody tr:first-child", "class") == "alarmed"

        # Click through to the head's history, and close it.
        assert page.locator("#detail").is_hidden()
        click_cell(page, 1, 2)
        page.wait_for_selector("#detail .uplot")
        assert "layer 1, head 2" in text(page, "#detail-title")
        assert "First alarm at step 300" in text(page, "#detail-note")
        titles = page.locator("#detail h3").all_inner_texts()
        assert titles == ["W_Q spectral norm", "max logit"]
        logits = page.evaluate("document.querySelector('#detail-charts').charts[1].plot.data[2]")
        assert logits[0] == pytest.approx(1, abs=0.02) and logits[-1] == pytest.approx(
            200, rel=0.02
        )
        page.click("#detail-close")
        assert page.locator("#detail").is_hidden()

        # The map at an earlier step knows nothing of what came later.
        page.evaluate(
            """() => { const slider = document.querySelector('#step');
            slider.value = view.state.steps.findLastIndex((step) => step >= 0 && step <= 200);
            slider.dispatchEvent(new Event('input')); }"""
        )
        wait(page, "view.state.map.step === 200")
        assert min(colour(page, 1, 2)) > 220
        # Nor do the heads to watch.
        assert page.locator("#worst .alarmed").count() == 0
        assert "200" not in text(page, "#worst tbody")


def test_zoom_and_scale(page, serve, recorder, tmp_path):
    with recorder(tmp_path) as writer:
        writer.record(range(0, 400, 10))
        with serve(tmp_path) as server:
            show(page, server)
            place = "document.querySelector('#story-charts')"
            scale = f"{place}.charts[0].plot.scales"
            whole = page.evaluate(f"[{scale}.x.min, {scale}.x.max]")
            assert whole == [0, 390]
            box = page.locator("#story-charts .u-over").first.bounding_box()
            y = box["y"] + box["height"] / 2
            page.mouse.move(box["x"] + box["width"] * 0.25, y)
            page.mouse.down()
            page.mouse.move(box["x"] + box["width"] * 0.75, y, steps=4)
            page.mouse.up()
            zoomed = page.evaluate(f"[{scale}.x.min, {scale}.x.max]")
            assert zoomed == pytest.approx([97, 293], abs=8)
            # The other charts follow.
            of_others = f"{place}.charts.map(({{ plot }}) => plot.scales.x.min)"
            assert page.evaluate(of_others) == pytest.approx([zoomed[0]] * 3)
            # New data leaves the zoom alone.
            writer.record(range(400, 500, 10))
            wait(page, "view.state.last_step === 490")
            wait_until_drawn(page)
            assert page.evaluate(f"[{scale}.x.min, {scale}.x.max]") == pytest.approx(zoomed)
            page.mouse.dblclick(box["x"] + box["width"] * 0.5, y)
            assert page.evaluate(f"[{scale}.x.min, {scale}.x.max]") == [0, 490]
            assert page.evaluate(f"{scale}.y.distr") == 3
            page.uncheck("#log")
            wait(page, f"{scale}.y.distr !== 3")


def test_a_killed_run_keeps_its_picture_and_says_so(page, serve, tmp_path):
    run = tmp_path / "run"
    script = (
        "import sys, time\n"
        "from guardbit.records import Sample\n"
        "from guardbit.store import RunWriter\n"
        "writer = RunWriter(sys.argv[1])\n"
        "for step in range(10**6):\n"
        "    writer.add([Sample(step, 'h.0.attn', 0, 'max_logit', (1.0, 2.0))])\n"
        "    writer.flush()\n"
        "    time.sleep(0.01)\n"
    )
    with serve(run) as server:
        page.goto(server.address)
        with subprocess.Popen([sys.executable, "-c", script, str(run)]) as process:
            wait(page, "view.state?.last_step > 20")
            process.send_signal(signal.SIGKILL)
        wait(page, "document.querySelector('#status').className === 'alive'")
        # As if minutes had gone by since.
        for path in run.iterdir():
            os.utime(path, (path.stat().st_atime, path.stat().st_mtime - 600))
        wait(page, "document.querySelector('#status').className === 'silent'")
        assert "killed" in text(page, "#status")
        wait(page, "document.querySelector('h1').textContent.startsWith('Healthy: no alarm up to')")
        assert page.get_attribute("#map", "data-cells") == "2"
    # The server is gone too: the page keeps what it has and says so.
    wait(page, "document.querySelector('#status').className === 'lost'")
    assert page.get_attribute("#map", "data-cells") == "2"


@pytest.mark.parametrize("width, scheme", [(1280, "light"), (390, "dark")])
def test_the_list_leads_to_each_run_and_draws_those_that_are_ticked(
    open_page, serve, recorder, tmp_path, width, scheme
):
    with recorder(tmp_path / "one") as writer:
        writer.record(range(0, 400, 10))
    ill = recorder(tmp_path / "two", ill_from=200)
    ill.record(range(0, 300, 10))
    ill.alarm(220)
    page = open_page(viewport={"width": width, "height": 900}, color_scheme=scheme)
    with serve(tmp_path) as server:
        page.goto(server.address)
        # Runs are in the list before their journals have been read.
        wait(page, "document.querySelector('h1').innerText === '2 runs: 1 running, 1 with alarms'")
        assert set(page.locator("#runs a").all_inner_texts()) == {"one", "two"}
        assert page.locator("#runs .chip.finished").count() == 1
        assert page.locator("#runs .chip.alive").count() == 1
        assert "step 220: h.1.attn, head 2" in text(page, "#runs")
        assert page.locator("#over").is_hidden()
        wait(page, "document.querySelector('#runs').innerText.includes('Running, switched: 1 of')")
        page.select_option("#sort", "name")
        assert page.locator("#runs a").all_inner_texts() == ["one", "two"]
        page.select_option("#sort", "outcome")
        assert page.locator("#runs a").all_inner_texts() == ["two", "one"], "the worst first"
        page.fill("#filter", "HEALTHY")
        assert page.locator("#runs a").all_inner_texts() == ["one"]
        page.fill("#filter", "")
        for name in ("one", "two"):
            # The list is drawn anew all the time: what was found may be gone when it is clicked.
            page.evaluate(f"""document.querySelector('[aria-label="draw {name}"]').click()""")
            wait(page, f"view.drawn?.runs.some((run) => run.name === '{name}' && run.steps.length)")
        wait(page, "document.querySelectorAll('#overlays .uplot').length === 3")
        charts = "document.querySelector('#overlays').charts"
        wait(page, f"{charts}[2].plot.data.length === 3")
        # What was ill is the second line alone, by its own last value.
        lasts = page.evaluate(
            f"{charts}[2].plot.data.slice(1).map((line) => line.filter((x) => x != null).at(-1))"
        )
        assert lasts == pytest.approx([1, 200], rel=0.02)
        loss = page.evaluate(f"{charts}[0].plot.data[1][0]")
        page.evaluate(
            "() => { const at = document.querySelector('#smoothing');"
            " at.value = 3; at.dispatchEvent(new Event('input')); }"
        )
        assert text(page, "#smoothing-label") == "median of 7"
        assert page.evaluate(f"{charts}[0].plot.data[1][0]") != loss
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
        paper = page.evaluate("getComputedStyle(document.body).backgroundColor")
        assert paper == ("rgb(255, 255, 255)" if scheme == "light" else "rgb(20, 22, 26)")
        page.evaluate("[...document.links].find((link) => link.textContent === 'two').click()")
        page.wait_for_selector("#story-charts .uplot")
        wait(page, "document.querySelector('h1').textContent.startsWith('Running')")
        assert text(page, "#title") == "two"
