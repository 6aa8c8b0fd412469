import base64
import hashlib
import json
import math
import re
from dataclasses import dataclass, field
from html import unescape
from html.parser import HTMLParser

import numpy as np
import pandas as pd
import pytest
from PIL import Image

from guardbit.dashboards.figures import CHARTS
from guardbit.dashboards.report import fork_of
from tests.dashboards.made import SAMPLES, journal, modules, samples, write_report

VOID = {"meta", "br", "hr", "img", "input", "link", "wbr"}
ATTACK = "</style><script>alert('x')</script><img src=x onerror=\"alert(1)\"> & $title"

METADATA = {
    "precision": "bf16-mixed",
    "settings": {"every_n_train_steps": 50, "indicators": ["max_logit", "loss"]},
    "versions": {"torch": "2.13.0"},
    "sites": {
        "h.0.attn": {"num_heads": 12, "layout": "fused"},
        "h.1.attn": {"num_heads": 12, "reason": "W_Q is frozen"},
    },
}


@dataclass
class Page(HTMLParser):
    """Reads a page, and fails where its elements do not nest."""

    source: str
    tags: list[tuple[str, dict[str, str | None]]] = field(default_factory=list)
    texts: list[tuple[str, str]] = field(default_factory=list)

    def __post_init__(self):
        super().__init__()
        self.open = []
        self.feed(self.source)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open and self.open.pop() == tag, f"</{tag}> closes another element"

    def handle_data(self, data):
        if data.strip():
            self.texts.append((self.open[-1], data.strip()))

    def of(self, *tags):
        return [text for tag, text in self.texts if tag in tags]

    @property
    def lede(self):
        """The sentences below the charts."""
        return [unescape(text) for text in re.findall(r'<p class="lede">(.*?)</p>', self.source)]

    @property
    def answers(self):
        (text,) = re.findall(
            r'<script type="application/json" id="data">(.*?)</script>', self.source
        )
        return json.loads(text)

    def attributes(self, name):
        return [values[name] for _, values in self.tags if name in values]

    @property
    def text(self):
        return " ".join(text for tag, text in self.texts if tag not in ("style", "script"))


def small_run(site="h.0.attn", heads=2):
    steps = range(0, 100, 10)
    rows = [
        (step, site, 0, head, "max_logit", 100.0 + step * head)
        for step in steps
        for head in range(heads)
    ]
    rows += [(step, "", -1, -1, "loss", 3.0 - step / 100) for step in steps]
    return samples(rows)


def run_without_figures():
    """No chart draws a step's delta bias, so that pages about something else are quick to write."""
    frame = small_run()
    return frame[frame["indicator"] != "loss"].assign(indicator="delta_bias")


@pytest.fixture(scope="module")
def report(run, tmp_path_factory):
    output = tmp_path_factory.mktemp("run") / "pages" / "report.html"
    assert write_report(run.frame, run.events, METADATA, output, title="gpt2-seed0") == output
    return output


@pytest.fixture(scope="module")
def page(report):
    return Page(report.read_text(encoding="utf-8"))


def write(tmp_path, *arguments, **options):
    path = write_report(*arguments, tmp_path / "report.html", **options)
    return Page(path.read_text(encoding="utf-8"))


def test_the_page_needs_nothing_but_itself(page):
    markup = re.sub(r"<script.*?</script>", "", page.source, flags=re.DOTALL)
    assert not re.search(r"https?:|@import|url\(", markup)
    assert not {"link", "img", "iframe", "object", "svg"} & {tag for tag, _ in page.tags}
    assert not page.attributes("src")
    # Every reference is to a place in the page, which is there once.
    names, used = page.attributes("id"), page.attributes("href")
    assert len(names) == len(set(names)) and used
    assert all(value.startswith("#") and value[1:] in names for value in used)
    # Nor would a browser let it fetch anything, or run another script.
    (script,) = re.findall(r"<script>(.*?)</script>", page.source, re.DOTALL)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    (policy,) = [value for value in page.attributes("content") if "script-src" in value]
    assert policy.startswith(f"default-src 'none'; script-src 'sha256-{digest}';")
    assert set(re.findall(r"https?://[^\s\"')]+", script)) <= {"https://github.com/leeoniya/uPlot"}


def test_what_happened_comes_first_and_the_settings_last(page):
    assert page.of("h1") == [
        "Alarmed: 2 of 144 heads since step 2,950; 1 still growing after the switch"
    ]
    assert page.of("h2") == [
        "What happened",
        "Model map",
        "Alarms",
        "What the switch did",
        "Figures",
        "Timeline",
        "Settings and versions",
    ]
    order = [tag for tag, _ in page.tags if tag in ("h1", "dl", "canvas", "nav", "details")]
    assert order[:5] == ["h1", "dl", "canvas", "canvas", "nav"]
    folds = [values for tag, values in page.tags if tag == "details" and "id" in values]
    is_open = ["open" in values for values in folds]
    assert is_open == [True, True, True, False, False], "the appendix is folded"
    assert page.of("a") == page.of("h2")[2:]


def test_the_summary_gives_verdict_first_alarm_and_switched_heads(page):
    # The verdict that the run recorded is an earlier version's; nothing measured the cause.
    assert page.lede[0].startswith("Verdict unclear: what rounding adds to W_Q was not measured. ")
    unfolded = [values for tag, values in page.tags if tag == "details" and "id" not in values]
    assert ["open" in values for values in unfolded[:2]] == [True, False], "the first alarm's"
    assert page.of("p").count("h.2.attn: Head 7 left its trend.") == 1, "no line twice"
    assert "One layer, one sign." not in page.text
    assert page.of("dt")[:3] == ["First alarm", "Lead on the loss", "Heads switched"]
    assert page.of("dd")[:6] == [
        "step 2,950",
        "h.2.attn, head 7; 2 alarms in all",
        "–",
        "the loss has not diverged",
        "1",
        "compensated; at step 3,100; 1 undone",
    ]


def test_the_figures_lie_beside_the_page(report, page):
    folder = report.parent / "report_figures"
    assert page.of("code") == ["report_figures/"]
    assert {path.name for path in folder.iterdir()} == {f"{name}.png" for name in CHARTS}
    for path in folder.iterdir():
        with Image.open(path) as picture:
            assert picture.width == 1500
            assert picture.convert("RGB").getpixel((0, 0)) == (255, 255, 255)


def test_the_page_draws_the_runs_own_values(run, page):
    answers = page.answers
    steps = answers["state"]["steps"]
    assert steps[0] < 50 and steps[-1] == 4980
    curve = answers["curves"]["w_q_spectral_norm"]
    heads = [(head["layer"], head["head"]) for head in curve["heads"]]
    assert heads[:2] == [(2, 7), (2, 3)]
    # One colour is one head: in every chart the same heads in the same order.
    for other in answers["curves"].values():
        assert [(head["layer"], head["head"]) for head in other["heads"]] == heads
    recorded = run.values["w_q_spectral_norm"][2, 7]
    shown = dict(zip(steps, curve["heads"][0]["high"], strict=True))
    known = [value for value in shown.values() if value is not None]
    assert (known[0], known[-1]) == pytest.approx((recorded[0], recorded[-1]), rel=1e-3)
    history = answers["heads"]["2,7"]
    assert history["site"] == "h.2.attn" and history["events"][0]["step"] == 2950
    assert set(history["indicators"]) == set(run.values)
    # The map that is shown first, the first with an alarm, is that of the first alarm.
    first = next(one["map"] for one in answers["maps"] if one["map"]["alarmed"])
    assert 2950 <= first["step"] < 3000 and first["alarmed"] == [[2, 7]]
    steps = [one["map"]["step"] for one in answers["maps"]]
    assert steps == sorted(set(steps)) and steps[-1] == 4980


def test_settings_versions_and_sites_are_shown(page):
    cells = page.of("td")
    for name, value in (
        ("Precision", "bf16-mixed"),
        ("Every n train steps", "50"),
        ("Indicators", '["max_logit", "loss"]'),
        ("Torch", "2.13.0"),
    ):
        assert cells[cells.index(name) + 1] == value
    assert cells[cells.index("h.1.attn") :][:4] == ["h.1.attn", "12", "–", "W_Q is frozen"]


def layers(page):
    """Name, with what encloses it -> kinds of the three cells; and the name that is marked."""
    (shown,) = re.findall(r'<div class="layers">(.*?)</div>', page.source, re.DOTALL)
    cells, first = {}, None
    for one in shown.split("<details")[1:]:
        name = re.sub("<.*?>", "", re.findall(r"<b>(.*?)</b>\s*<i", one, re.DOTALL)[0])
        cells[name] = re.findall(r'<i class="(\w+)"', one)
        first = name if 'id="first-module"' in one.partition(">")[0] else first
    return cells, first


def test_the_map_of_layers_marks_the_first_innermost_module_beyond_its_limit(tmp_path):
    far, near = 10.0, 1e-9  # of the limit
    rows = [
        (10, "", "block", "output", "gain", far),
        (10, "h", "block", "output", "gain", near),
        (10, "h.0", "block", "output", "gain", near),
        (10, "h.0.mlp", "activation", "output", "gain", 0.0),
        (10, "h.0.mlp", "activation", "output", "relative_error", 0.0),
        (10, "h.0.attn", "block", "input", "gain", near),
        (10, "h.10", "block", "output", "relative_error", math.nan),
        (10, "h.2", "block", "input", "gain", -far),
        (10, "h.2.ln", "norm", "input", "gain", -far),
        (10, "h.2.ln", "norm", "weight", "slope", near),
        (10, "head", "linear", "output 1", "gain", far),
        (10, "head", "linear", "weight", "relative_error", far, math.inf),
        (10, "later", "optimizer", "weight", "relative_error", far, math.inf),
    ]
    page = write(tmp_path, run_without_figures(), None, None, modules=modules(*rows))
    assert "Layers" in page.of("h2")
    cells, first = layers(page)
    # Siblings in the order of their rows, and numbers in theirs; "h" alone encloses "h.0".
    assert cells == {
        "model": ["beyond", "unmeasured", "unmeasured"],
        "h": ["within", "unmeasured", "unmeasured"],
        "h.0": ["within", "unmeasured", "unmeasured"],
        "h.0.mlp": ["exact", "unmeasured", "unmeasured"],
        "h.0.attn": ["unmeasured", "within", "unmeasured"],
        "h.2": ["unmeasured", "beyond", "unmeasured"],
        "h.2.ln": ["unmeasured", "beyond", "within"],
        "h.10": ["beyond", "unmeasured", "unmeasured"],
        "head": ["beyond", "unmeasured", "unmeasured"],
    }
    assert list(cells)[5:8] == ["h.2", "h.2.ln", "h.10"]
    assert first == "h.2.ln" and "h.2.ln" in page.of("a")
    assert any(text.endswith("gain −1,000 %, limit 0.1 %, step 10") for text in page.of("b"))


def test_the_map_of_layers_shows_the_largest_of_the_latest_audits(tmp_path):
    row = "a", "linear", "output", "gain"
    for audits, shown in ((8, "beyond"), (9, "within")):
        rows = [(0, *row, 10.0), *((step, *row, 1e-9) for step in range(1, audits))]
        page = write(tmp_path, run_without_figures(), None, None, modules=modules(*rows))
        assert layers(page)[0] == {"a": [shown, "unmeasured", "unmeasured"]}


def test_the_map_of_layers_shows_modules_without_numbers_in_their_places_and_why(tmp_path):
    rows = [
        (10, "", "block", "output", "gain", 1e-9),
        (10, "h.0", "linear", "output", "gain", 1e-9),
        (10, "h.2", "optimizer", "second moment of h.2.weight", "gain", -1.0),
        (10, "h.2", "linear", "output", "gain", 1e-9, math.inf),
    ]
    why = {"h.1.drop": "It repeats nothing.", "h.1": "It is compiled."}
    unmeasured = ["unmeasured"] * 3
    metadata = {"unmeasured_modules": why, "sites": {"h.0.attn": {"heads": 2}}}
    page = write(tmp_path, run_without_figures(), None, metadata, modules=modules(*rows))
    cells, first = layers(page)
    assert list(cells.items()) == [
        ("model", ["within", "unmeasured", "unmeasured"]),
        ("h.0", ["within", "unmeasured", "unmeasured"]),
        ("h.1", unmeasured),
        ("h.1.drop", unmeasured),
        ("h.2", ["unmeasured", "unmeasured", "beyond"]),
    ]
    assert first == "h.2"
    # Each beside its name, once in the page.
    for name, said in why.items():
        assert page.source.count(said) == 1
        assert re.search(rf"<p>{name}\s*<br>Not measured: {said}</p>", page.source)
    page = write(tmp_path, run_without_figures(), None, metadata)
    assert layers(page) == (dict.fromkeys(["h.1", "h.1.drop"], unmeasured), None)


def test_whatever_the_data_says_it_stays_text(tmp_path):
    frame = small_run(site=ATTACK)
    events = journal(
        (10, "alarm", ATTACK, (1,), ATTACK, ATTACK, ""),
        (20, "switch", ATTACK, (1,), ATTACK, "", ATTACK),
    )
    metadata = {ATTACK: ATTACK, "sites": {ATTACK: {ATTACK: ATTACK}}, "more": {ATTACK: [ATTACK]}}
    metadata |= {"unmeasured_modules": {f"not {ATTACK}": ATTACK}}
    rows = modules((10, ATTACK, "linear", ATTACK, ATTACK, 1.0))
    page = write(tmp_path, frame, events, metadata, title=ATTACK, modules=rows)
    assert "img" not in {tag for tag, _ in page.tags}
    assert [values for tag, values in page.tags if tag == "script"] == [
        {"type": "application/json", "id": "data"},
        {},
    ]
    assert not page.attributes("onerror")
    assert page.text.count(ATTACK) > 10  # shown as it came, dollar sign included
    assert f"{ATTACK} · GuardBit" in page.of("title")


def test_what_is_not_known_is_not_claimed(tmp_path, said):
    page = write(tmp_path, run_without_figures(), None, None)
    said("no rule", "\n".join([*page.of("h1"), *page.lede]))
    events = journal((10, "alarm", "", (), "The loss rose.", "loss_trend", ""))
    page = write(tmp_path, run_without_figures(), events, None)
    said("no head", "\n".join([*page.of("h1"), *page.lede]))
    assert "The loss rose." in page.of("p") and "the whole run" in page.of("b")
    assert "What the switch did" not in page.of("h2")


def test_an_empty_run_still_has_a_page(tmp_path):
    page = write(tmp_path, pd.DataFrame(columns=SAMPLES), None, None)
    assert page.of("h1") == ["Unclear: no head was watched"]
    assert page.lede == ["The run recorded no samples."]
    assert "canvas" not in {tag for tag, _ in page.tags} and page.answers == {"is_live": False}


def test_the_fork_of_copies_is_the_last_step_in_common():
    steps = np.arange(0, 10_000, 20)

    def loss(seed, fork):
        noise = np.random.default_rng(seed).normal(0, 0.01, steps.size)
        return pd.Series(3 - steps / 5000 + np.where(fork < steps, noise, 0), index=steps)

    assert fork_of({"a": loss(1, 4000), "b": loss(2, 4000), "c": loss(3, 6000)}) == 4000
    # Twenty losses in common are enough, nineteen are not.
    assert fork_of({"a": loss(1, 19 * 20), "b": loss(2, 19 * 20)}) == 19 * 20
    assert fork_of({"a": loss(1, 18 * 20), "b": loss(2, 18 * 20)}) is None
    # What never parts has no fork, nor what shares no beginning.
    assert fork_of({"a": loss(1, 4000), "b": loss(1, 4000).loc[:3000]}) is None
    assert fork_of({"a": loss(1, -1), "b": loss(2, -1)}) is None
    assert fork_of({"a": loss(1, 4000), "b": pd.Series(dtype=float)}) is None
