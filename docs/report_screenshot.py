"""Takes a picture of the top of a report's page.

python docs/report_screenshot.py runs/recorded/lost.html docs/images/reports/lost.png [--dark]
"""

from __future__ import annotations

import argparse
from pathlib import Path

from playwright.sync_api import sync_playwright


def main() -> None:
    """Opens the page in Debian's chromium, and writes what is seen first."""
    parser = argparse.ArgumentParser(description="A picture of a report.")
    parser.add_argument("page", type=Path)
    parser.add_argument("picture", type=Path)
    parser.add_argument("--dark", action="store_true")
    parser.add_argument("--width", type=int, default=1280)
    settings = parser.parse_args()
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path="/usr/bin/chromium", args=["--no-sandbox"])
        page = browser.new_page(
            viewport={"width": settings.width, "height": 900},
            color_scheme="dark" if settings.dark else "light",
        )
        page.goto(settings.page.resolve().as_uri())
        page.wait_for_selector(".uplot")
        page.wait_for_timeout(1000)
        page.screenshot(path=settings.picture)
        browser.close()


if __name__ == "__main__":
    main()
