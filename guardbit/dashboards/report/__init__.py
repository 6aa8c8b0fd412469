"""Reports about runs: what happened first, the evidence after it.

A report is one page that opens without a network, with its figures as PNGs beside it. What it
draws, and the scripts that draw it, are part of the page; a policy of its own lets no other script
run and nothing be fetched.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import jinja2

from guardbit.dashboards.figures import CHARTS
from guardbit.dashboards.figures.style import STYLE
from guardbit.dashboards.loading import LoadedRun
from guardbit.dashboards.page import SAMPLES_AVERAGED, asset
from guardbit.dashboards.report.comparison import PICTURES, compared
from guardbit.dashboards.report.contents import Document, document_of

Format = Literal["html", "png"]
FORMATS: tuple[Format, ...] = ("html", "png")

__all__ = ["FORMATS", "Format", "write_reports"]


def write_reports(
    runs: Sequence[LoadedRun], output: str | Path, *, format: Format = "html"
) -> Path:
    """Writes the report of one run, or of two to four side by side."""
    output = Path(output)
    if not runs:
        raise ValueError("A report needs at least one run, got none.")
    _check_place(output, format)
    document = document_of(runs[0]) if len(runs) == 1 else compared(runs)
    if format == "png" and not document["pictures"]:
        raise ValueError("The run recorded nothing that a figure shows.")
    folder = output if format == "png" else output.with_name(f"{output.stem}_figures")
    pictures = {folder / f"{name}.png": figure for name, figure in document["pictures"].items()}
    _refuse_links(output, folder, *pictures)
    folder.mkdir(parents=True, exist_ok=True)
    # Figures of an earlier report that this one does not have.
    for name in (*CHARTS, *PICTURES):
        if folder / f"{name}.png" not in pictures:
            (folder / f"{name}.png").unlink(missing_ok=True)
    for path, figure in pictures.items():
        figure.savefig(path, dpi=STYLE["savefig.dpi"])
    if format == "html":
        output.write_text(_page(document, folder.name), encoding="utf-8")
    return output


def _check_place(output: Path, format: Format) -> None:
    if format == "png" and output.is_file():
        raise ValueError(f"PNGs need a folder to be written to, but {output} is a file.")
    if format == "html" and output.is_dir():
        raise ValueError(f"The report needs the path of an HTML file, but {output} is a folder.")
    meant = output.suffix.lower().removeprefix(".")
    if meant in FORMATS and meant != format:
        raise ValueError(
            f"The report's format is {format!r}, but {output} is named as a {meant.upper()}; give"
            f" the format {meant!r}, or another name."
        )
    if format == "html" and meant not in ("", "html"):
        raise ValueError(
            f"{output} is named as none of the formats of a report (.html, or a folder of PNGs)."
        )


def _refuse_links(*paths: Path) -> None:
    """A run's folder may be another person's, and what lies in it point at the reader's files."""
    for path in paths:
        if path.is_symlink():
            raise ValueError(
                f"The report is not written through the link {path} to {path.readlink()}: remove "
                "it, or give another output."
            )


def _page(document: Document, folder: str) -> str:
    script = "\n".join((asset("uPlot.iife.min.js"), asset("charts.js"), asset("report.js")))
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.policies["json.dumps_kwargs"] = {"separators": (",", ":")}
    return environment.from_string(asset("report.html")).render(
        document=document,
        folder=folder,
        averaged=SAMPLES_AVERAGED,
        style=asset("uPlot.min.css") + asset("theme.css"),
        policy=f"default-src 'none'; script-src 'sha256-{digest}'; style-src 'unsafe-inline'; "
        "img-src data:; base-uri 'none'; form-action 'none'",
        script=script,
    )
