"""Takes a picture of a run's live page with its worst head opened, or of a list with runs ticked.

python docs/live_screenshot.py runs/demo docs/images/live.png
python docs/live_screenshot.py guardbit/recorded/lost docs/images/live.png [--dark] [--width 390]
"""

from __future__ import annotations

import argparse
import threading
from pathlib import Path

from playwright.sync_api import Page, sync_playwright

from guardbit.dashboards.live import LiveRuns, LiveServer


def main() -> None:
    """Serves the run or the runs, looks in Debian's chromium, and writes the picture."""
    parser = argparse.ArgumentParser(description="A picture of a live page.")
    parser.add_argument("run", type=Path)
    parser.add_argument("picture", type=Path)
    parser.add_argument("--dark", action="store_true")
    parser.add_argument("--width", type=int, default=1280)
    settings = parser.parse_args()
    runs = LiveRuns(settings.run)
    server = LiveServer(runs)
    threading.Thread(target=server.run, daemon=True).start()
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path="/usr/bin/chromium", args=["--no-sandbox"])
        page = browser.new_page(
            viewport={"width": settings.width, "height": 1000},
            color_scheme="dark" if settings.dark else "light",
        )
        page.goto(server.address)
        (_tick_runs if runs.is_list else _open_worst_head)(page)
        page.wait_for_timeout(1500)
        whole = page.evaluate("document.documentElement.scrollHeight")
        page.screenshot(
            path=settings.picture,
            full_page=True,
            clip={"x": 0, "y": 0, "width": settings.width, "height": min(whole, 1350)},
        )
        browser.close()
    server.stop()


def _open_worst_head(page: Page) -> None:
    page.locator("#worst tbody tr").first.click()
    page.wait_for_selector("#detail .uplot")


def _tick_runs(page: Page) -> None:
    page.wait_for_selector("#runs tbody tr")
    for number in range(min(page.locator("#runs tbody tr").count(), 4)):
        page.locator("#runs tbody input").nth(number).check()
        page.wait_for_timeout(2500)
    page.wait_for_selector("#overlays .uplot")
    page.wait_for_timeout(2500)


if __name__ == "__main__":
    main()
