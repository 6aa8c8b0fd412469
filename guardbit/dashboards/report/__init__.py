"""Reports about runs: what happened first, the evidence after it; in four formats."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import pandas as pd

from guardbit.dashboards.figures import CHARTS
from guardbit.dashboards.figures.style import STYLE
from guardbit.dashboards.report.comparison import PICTURES, compared
from guardbit.dashboards.report.contents import Run, document_of
from guardbit.dashboards.report.document import Document
from guardbit.dashboards.report.html import to_html
from guardbit.dashboards.report.markdown import to_markdown
from guardbit.dashboards.report.pages import text_pages, write_pdf
from guardbit.dashboards.report.places import refuse_links
from guardbit.dashboards.report.sharing import SUFFIXES, Shared, write_shared

Format = Literal["html", "png", "pdf", "md"]
FORMATS: tuple[Format, ...] = ("html", "png", "pdf", "md")

__all__ = [
    "FORMATS",
    "SUFFIXES",
    "Format",
    "Run",
    "Shared",
    "write_report",
    "write_reports",
    "write_shared",
]


def write_report(
    frame: pd.DataFrame,
    events: pd.DataFrame | None,
    metadata: Mapping[str, Any] | None,
    output: str | Path,
    *,
    title: str = "Training run",
    format: Format = "html",
) -> Path:
    """Writes the report of one run.

    Args:
        frame: Samples, as `guardbit.read_run` returns them.
        events: Events, as `guardbit.read_events` returns them.
        metadata: Settings, versions and sites of the run; JSON-able.
        output: Path of the file, or, for "png", of the folder; missing folders are made, an old
            report is replaced.
        title: What the run is called.
        format: "html": one page that opens offline, and its figures as PNGs in the folder
            `<stem>_figures` beside it. "md": Markdown, with the same folder. "pdf": pages. "png":
            a folder with the figures and `summary.png`.

    Returns:
        The path written to.

    Raises:
        ValueError: `output` is a folder where a file is needed, or the reverse, or is named as a
            file of another format, or is a symbolic link, as any of the pictures; the format is
            unknown; a table lacks a column.
    """
    return write_reports([Run(title, frame, events, metadata or {})], output, format=format)


def write_reports(runs: Sequence[Run], output: str | Path, *, format: Format = "html") -> Path:
    """Writes the report of one run, or of two to four side by side.

    Args:
        runs: The runs.
        output: As in `write_report`.
        format: As in `write_report`.

    Returns:
        The path written to.

    Raises:
        ValueError: As in `write_report`; there is no run, or there are more than four.
    """
    output = Path(output)
    if format not in FORMATS:
        raise ValueError(f"A report's format is one of {', '.join(FORMATS)}, got {format!r}.")
    if not runs:
        raise ValueError("A report needs at least one run, got none.")
    if format == "png" and output.is_file():
        raise ValueError(f"PNGs need a folder to be written to, but {output} is a file.")
    if format != "png" and output.is_dir():
        raise ValueError(
            f"The report needs the path of an {format.upper()} file, but {output} is a folder."
        )
    meant = output.suffix.lower().removeprefix(".")
    if format != "png" and meant and meant not in FORMATS:
        raise ValueError(
            f"{output} is named as none of the formats of a report (.html, .pdf, .md, or a folder "
            "of PNGs)."
        )
    if meant in FORMATS and meant != format:
        raise ValueError(
            f"The report's format is {format!r}, but {output} is named as a {meant.upper()}; give"
            f" the format {meant!r}, or another name."
        )
    refuse_links(output)
    document = document_of(runs[0]) if len(runs) == 1 else compared(runs)
    folder = output if format == "png" else output.with_name(f"{output.stem}_figures")
    output.parent.mkdir(parents=True, exist_ok=True)
    if format == "pdf":
        write_pdf(document, output)
        return output
    refuse_links(folder, *[folder / f"{name}.png" for name in ("summary", *_names(document))])
    _write_pictures(document, folder)
    if format == "html":
        output.write_text(to_html(document, folder.name), encoding="utf-8")
    elif format == "md":
        output.write_text(to_markdown(document, folder.name), encoding="utf-8")
    else:
        text_pages(document)[0].savefig(folder / "summary.png", dpi=STYLE["savefig.dpi"])
    return output


def _names(document: Document) -> list[str]:
    return [picture.name for picture in document.pictures]


def _write_pictures(document: Document, folder: Path) -> None:
    """Writes the figures, and removes those of an earlier report that this one does not have."""
    folder.mkdir(parents=True, exist_ok=True)
    drawn = {picture.name for picture in document.pictures}
    for name in {*[chart.name for chart in CHARTS], *PICTURES} - drawn:
        (folder / f"{name}.png").unlink(missing_ok=True)
    for picture in document.pictures:
        picture.figure.savefig(folder / f"{picture.name}.png", dpi=STYLE["savefig.dpi"])
