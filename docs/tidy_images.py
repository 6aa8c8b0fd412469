r"""Keeps of the docs' images those that a page shows, in 256 colours, which look the same.

These commands make them:

    guardbit demo --run-dir runs/demo
    guardbit report runs/demo/corrected --output docs/images/demo
    guardbit report tests/data/runs/fails-sdpa-lr1.5e-3.csv.gz --output docs/images/failing
    guardbit report guardbit/recorded/lost --output docs/images/lost
    guardbit report guardbit/recorded/{watched,guarded}{,-again} --output docs/images/copies
    guardbit demo --recorded --run-dir runs/recorded
    python docs/report_screenshot.py runs/recorded/lost.html docs/images/reports/lost.png
    python docs/live_screenshot.py guardbit/recorded/lost docs/images/live.png
    python docs/tidy_images.py
"""

from __future__ import annotations

import re
from pathlib import Path

from PIL import Image

DOCS = Path(__file__).parent


def main() -> None:
    """Removes what no page shows, and reduces the rest where that makes it smaller."""
    for path in (DOCS / "images").glob("*/*_figures/*.png"):  # of reports
        path.replace(path.parents[1] / path.name)
    pages = [DOCS.parent / "README.md", *DOCS.glob("*.md")]
    text = "".join(page.read_text(encoding="utf-8") for page in pages)
    shown = {DOCS / name for name in re.findall(r"\]\((?:docs/)?(images/[^)]+)\)", text)}
    for path in sorted((DOCS / "images").rglob("*.*")):
        if path not in shown:
            path.unlink()
            continue
        if path.suffix != ".png":
            continue
        with Image.open(path) as picture:
            if picture.mode != "P":
                picture.convert("RGB").quantize(256).save(path, optimize=True)


if __name__ == "__main__":
    main()
