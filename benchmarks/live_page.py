"""How long the live page of a long, large run takes: first answer, later answers, memory.

    python benchmarks/live_page.py --layers 80 --heads 64 --samples 5000 --browser

writes a run of that size (two indicators) into a temporary folder, reads it as `guardbit live`
does, and prints one line a figure. Times are of the server, without network and browser; with
`--browser` also what a person waits for in Debian's chromium, from opening the address on.
"""

from __future__ import annotations

import argparse
import resource
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from guardbit.dashboards.live import LiveRuns, LiveServer
from guardbit.records import Sample
from guardbit.store import RunWriter

#: Notes when the model map has reached the screen: two frames after it was drawn.
MAP_ON_SCREEN = """
new MutationObserver((_, observer) => {
  if (!document.querySelector("#map[data-cells]")) return;
  observer.disconnect();
  const note = () => { window.onScreen = performance.now(); };
  requestAnimationFrame(() => requestAnimationFrame(note));
}).observe(document, { subtree: true, childList: true, attributes: true });
"""
INDICATORS = ("w_q_spectral_norm", "max_logit")


def made_up_samples(layers: int, heads: int, step: int) -> Iterator[Sample]:
    """One sampled step."""
    generator = np.random.default_rng(step)
    for layer in range(layers):
        for indicator in INDICATORS:
            values = (1 + step / 1e5) * generator.lognormal(0, 0.1, heads)
            yield Sample(step, f"h.{layer}.attn", layer, indicator, tuple(values.tolist()))
    yield Sample(step, "", -1, "loss", (2.0 + 8 / (1 + step / 1000),))


def milliseconds(answer: Callable[[], object]) -> float:
    """How long an answer takes."""
    start = time.perf_counter()
    answer()
    return 1000 * (time.perf_counter() - start)


def in_the_browser(folder: str, last_step: int) -> None:
    """Opens the page of a server just started, and again when all of the run is read."""
    from playwright.sync_api import sync_playwright

    runs = LiveRuns(folder)
    server, watcher = LiveServer(runs), runs.opened()
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        with sync_playwright() as driver:
            browser = driver.chromium.launch(
                executable_path="/usr/bin/chromium", args=["--no-sandbox"]
            )
            for moment in ("while it is read", "when it is read"):
                page = browser.new_page(viewport={"width": 1280, "height": 1000})
                page.add_init_script(MAP_ON_SCREEN)
                page.goto(server.address, wait_until="commit")
                while not (painted := page.evaluate("window.onScreen")):
                    page.wait_for_timeout(20)
                (first,) = page.evaluate(
                    "performance.getEntriesByName('first-contentful-paint')"
                    ".map((entry) => entry.startTime)"
                )
                print(f"first paint, {moment:16} {first:8.0f} ms, its map {painted:8.0f} ms")
                while watcher.state(-1, None)["last_step"] < last_step:
                    time.sleep(0.1)
                page.close()
            browser.close()
    finally:
        server.stop()
        thread.join()


def main() -> None:
    """Writes the run, reads it, and prints the figures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=80)
    parser.add_argument("--heads", type=int, default=64)
    parser.add_argument("--samples", type=int, default=5000)
    parser.add_argument("--browser", action="store_true")
    settings = parser.parse_args()
    last_step = 50 * (settings.samples - 1)
    with tempfile.TemporaryDirectory() as folder:
        with RunWriter(folder) as writer:
            for sample in range(settings.samples):
                writer.add(made_up_samples(settings.layers, settings.heads, 50 * sample))
                writer.flush()
        size = sum(path.stat().st_size for path in Path(folder).iterdir())
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        print(f"on disk                   {size / 2**20:8.0f} MiB")
        runs = LiveRuns(folder)
        runs.start()
        watcher = runs.opened()
        print(f"first answer              {milliseconds(lambda: watcher.state(-1, None)):8.1f} ms")
        start, slowest = time.perf_counter(), 0.0
        while watcher.state(-1, None)["last_step"] < last_step:
            slowest = max(slowest, milliseconds(lambda: watcher.state(-1, None)))
            time.sleep(0.05)
        print(f"whole run read            {time.perf_counter() - start:8.1f} s")
        print(f"slowest answer meanwhile  {slowest:8.1f} ms")
        time.sleep(2)
        middle = 25 * settings.samples
        for name, answer in {
            "newest state": lambda: watcher.state(-1, None),
            "map of another step": lambda: watcher.state(-1, middle),
            "one head": lambda: watcher.head(settings.layers // 2, 3),
            "curves of all heads": lambda: watcher.curves("max_logit"),
        }.items():
            print(f"{name:25} {milliseconds(answer):8.1f} ms")
        after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        print(f"memory above the writer's {max(after - before, 0) / 2**10:8.0f} MiB (at most)")
        runs.stop()
        if settings.browser:
            in_the_browser(folder, last_step)


if __name__ == "__main__":
    main()
