"""Takes a picture of the top of a report's page.

python docs/report_screenshot.py runs/recorded/lost.html docs/images/reports/lost.png [dark]
"""

from __future__ import annotations

import sys
from pathlib import Path

from playwright.sync_api import sync_playwright


def main() -> None:
    """Opens the page in Debian's chromium, and writes what is seen first."""
    page_path, picture, *scheme = sys.argv[1:]
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path="/usr/bin/chromium", args=["--no-sandbox"])
        page = browser.new_page(
            viewport={"width": 1280, "height": 900},
            color_scheme="dark" if scheme == ["dark"] else "light",
        )
        page.goto(Path(page_path).resolve().as_uri())
        page.wait_for_selector(".uplot")
        page.wait_for_timeout(1000)
        page.screenshot(path=picture)
        browser.close()


if __name__ == "__main__":
    main()
