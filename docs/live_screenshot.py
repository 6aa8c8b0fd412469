"""Takes a picture of a run's live page, with its worst head opened.

python docs/live_screenshot.py runs/demo docs/images/live.png
"""

from __future__ import annotations

import argparse
import threading
from pathlib import Path

from playwright.sync_api import sync_playwright

from guardbit.dashboards.live import LiveServer, RunWatcher


def main() -> None:
    """Serves the run, looks at it in Debian's chromium, and writes the picture."""
    parser = argparse.ArgumentParser(description="A picture of a run's live page.")
    parser.add_argument("run", type=Path)
    parser.add_argument("picture", type=Path)
    settings = parser.parse_args()
    server = LiveServer(RunWatcher(settings.run))
    thread = threading.Thread(target=server.run)
    thread.start()
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path="/usr/bin/chromium", args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 1280, "height": 1000})
        page.goto(server.address)
        page.locator("#worst tbody tr").first.click()
        page.wait_for_selector("#detail .uplot")
        page.wait_for_timeout(1500)
        whole = page.evaluate("document.documentElement.scrollHeight")
        page.screenshot(
            path=settings.picture,
            full_page=True,
            clip={"x": 0, "y": 0, "width": 1280, "height": min(whole, 1350)},
        )
        browser.close()
    server.stop()
    thread.join()


if __name__ == "__main__":
    main()
