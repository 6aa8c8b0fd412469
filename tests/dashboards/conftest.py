"""A made-up run whose values are known in closed form, kept as arrays beside its two tables."""

import shutil
from dataclasses import dataclass

import numpy as np
import pandas as pd
import pytest

from tests.dashboards.made import SAMPLES as SAMPLE_COLUMNS
from tests.dashboards.made import journal

LAYERS, HEADS, SAMPLES, EVERY = 12, 12, 100, 50


@dataclass(frozen=True)
class Run:
    steps: np.ndarray  # (samples,)
    values: dict[str, np.ndarray]  # indicator -> (layers, heads, samples)
    loss_steps: np.ndarray
    loss: np.ndarray
    grad_norm: np.ndarray
    frame: pd.DataFrame
    events: pd.DataFrame


def columns(*values):
    """A table of samples from its columns; a single value fills one."""
    return pd.DataFrame(dict(zip(SAMPLE_COLUMNS, values, strict=True)))


@pytest.fixture(scope="session")
def run():
    """Layer 2, heads 3 and 7, go wrong at step 2,500; the delta bias of head 3 is negative."""
    generator = np.random.default_rng(0)
    steps = np.arange(SAMPLES) * EVERY
    shape = (LAYERS, HEADS, SAMPLES)
    sick = np.zeros(shape)
    sick[2, 7] = np.clip(steps - 2500, 0, None) / 1000
    sick[2, 3] = 0.5 * sick[2, 7]
    sign = np.ones((LAYERS, HEADS, 1))
    sign[2, 3] = -1
    noise = generator.uniform(0.9, 1.1, shape)
    values = {
        "w_q_spectral_norm": (1 + steps / 1000) * noise * np.exp(sick),
        "max_logit": 100 * noise * np.exp(3 * sick),
        "multiple_maxima": np.clip(0.004 * noise + 0.01 * sick, 0, 1),
        "multiple_maxima_bf16": np.clip(0.06 * noise + 0.3 * sick, 0, 0.95),
        "delta_bias_cumulative": 0.2 * (noise - 1) + sign * 5 * sick,
        "dq_relative_error": 0.01 * noise,
        "attention_entropy": 4 * noise * np.exp(-sick),
        "delta_bias_abs": 1e-3 * noise * np.where(steps > 3100, 1 / (1 + 9 * (sick > 0)), 1),
    }
    loss_steps = np.arange(0, SAMPLES * EVERY, 20)
    loss = 2 + 8 * np.exp(-loss_steps / 300) + generator.normal(0, 0.05, loss_steps.size)
    grad_norm = 0.3 * np.exp(generator.normal(0, 0.3, loss_steps.size))
    tables = [
        columns(loss_steps, "", -1, -1, "loss", loss),
        columns(loss_steps, "", -1, -1, "grad_norm", grad_norm),
    ]
    layer, head, sample = (index.ravel() for index in np.indices(shape))
    sites = [f"h.{index}.attn" for index in layer]
    for indicator, array in values.items():
        tables.append(columns(steps[sample], sites, layer, head, indicator, array.ravel()))
    events = [
        (2950, "alarm", "h.2.attn", (7,), "Head 7 left its trend.", "norm_trend", "", ""),
        (3100, "alarm", "h.2.attn", (3,), "Head 3 left its trend.", "norm_trend", "", ""),
        (3100, "switch", "h.2.attn", (3, 7), "Two alarms.", "", "compensated", ""),
        (4500, "switch", "h.2.attn", (3,), "Calm for long.", "", "none", ""),
        (4600, "monitor_error", "h.4.attn", (), "RuntimeError: <b>shape</b> & co.", "", "", ""),
        (4950, "verdict", "", (), "One layer, one sign.", "", "", "rounding"),
    ]
    frame = pd.concat(tables, ignore_index=True)
    return Run(steps, values, loss_steps, loss, grad_norm, frame, journal(*events))


@pytest.fixture(scope="module")
def browser():
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    chromium = shutil.which("chromium")
    if chromium is None:
        pytest.skip("chromium is not installed (apt-get install chromium)")
    with playwright.sync_playwright() as driver:
        launched = driver.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        yield launched
        launched.close()


@pytest.fixture
def new_page(browser):
    """Opens pages, and fails the test where a script of one does, or asks another machine."""
    problems, opened = [], []

    def new_page(*allowed, **settings):
        page = browser.new_page(**{"viewport": {"width": 1280, "height": 900}, **settings})
        page.set_default_timeout(20_000)  # a loaded machine is slow, and nothing waits this long
        page.on("pageerror", lambda error: problems.append(str(error)))
        page.on(
            "request",
            lambda asked: None if asked.url.startswith(allowed) else problems.append(asked.url),
        )
        opened.append(page)
        return page

    new_page.problems = problems
    yield new_page
    for page in opened:
        page.close()
    assert problems == []
