"""A report as pages of A4: text drawn by matplotlib, then one figure after the other."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path

import matplotlib
from matplotlib.backends.backend_pdf import PdfPages
from matplotlib.figure import Figure

from guardbit.dashboards.figures.style import STYLE
from guardbit.dashboards.palette import CONTEXT, INK
from guardbit.dashboards.report.document import (
    Alarms,
    Block,
    Bullets,
    Cell,
    Document,
    Heading,
    Paragraph,
    Picture,
    Table,
    Timeline,
)
from guardbit.dashboards.report.words import table_of_alarms

#: Inches.
PAGE = (8.27, 11.69)
MARGIN = 0.75
#: Characters that fit a line of each size in points; DejaVu Sans is 0.6 as wide as high, its
#: monospaced sister 0.602.
_LINE_WIDTH = PAGE[0] - 2 * MARGIN
_LEADING = 1.45


@dataclass(frozen=True, slots=True)
class _Line:
    text: str
    size: float = 9.0
    bold: bool = False
    quiet: bool = False
    mono: bool = False
    space: float = 0.0  # points above


def write_pdf(document: Document, output: Path) -> None:
    """Writes the report as a PDF; the same report gives the same file."""
    with matplotlib.rc_context({**STYLE, "pdf.fonttype": 42}):
        metadata = {"Title": f"GuardBit: {document.title}", "CreationDate": None}
        with PdfPages(output, metadata=metadata) as pdf:
            for page in text_pages(document):
                pdf.savefig(page)
            for picture in document.pictures:
                pdf.savefig(picture.figure)


def text_pages(document: Document) -> list[Figure]:
    """Everything but the figures, the summary on the first page."""
    with matplotlib.rc_context(STYLE):
        pages: list[Figure] = []
        height = 0.0
        for line in _lines(document):
            step = (line.size * _LEADING + line.space) / 72
            if not pages or height + step > PAGE[1] - MARGIN:
                pages.append(Figure(figsize=PAGE))
                height = MARGIN
            height += step
            pages[-1].text(
                MARGIN / PAGE[0],
                1 - height / PAGE[1],
                line.text,
                fontsize=line.size,
                fontweight="bold" if line.bold else "normal",
                family="DejaVu Sans Mono" if line.mono else "DejaVu Sans",
                color=CONTEXT if line.quiet else INK,
                parse_math=False,
            )
        return pages


def _lines(document: Document) -> Iterator[_Line]:
    yield from _wrapped(f"GuardBit · {document.title} · {document.extent}", quiet=True)
    yield from _wrapped(document.headline, 19, bold=True, space=14)
    for text in document.lede:
        yield from _wrapped(text, 10.5, space=6)
    for tile in document.tiles:
        note = f"   ({tile.note})" if tile.note else ""
        yield from _wrapped(f"{tile.name}: {tile.value}{note}", 10.5, space=5)
    blocks = [block for block in document.blocks if not isinstance(block, Picture)]
    for block, following in zip_longest(blocks, blocks[1:]):
        # A section of figures alone has nothing to say on the pages of text.
        if isinstance(block, Heading) and _ends(block, following):
            continue
        yield from _of_block(block)


def _ends(heading: Heading, following: Block | None) -> bool:
    """Whether a section has ended before it has begun."""
    return following is None or (
        isinstance(following, Heading) and following.level <= heading.level
    )


def _of_block(block: Block) -> Iterator[_Line]:
    match block:
        case Heading(text, level):
            yield from _wrapped(text, 14 if level == 2 else 10.5, bold=True, space=18)
        case Paragraph(text, quiet):
            yield from _wrapped(text, quiet=quiet, space=3)
        case Bullets(lines):
            for line in lines:
                yield from _wrapped(f"· {line}", quiet=True)
        case Table():
            yield from _of_table(block)
        case Alarms(rows):
            yield from _of_table(table_of_alarms(rows))
        case Timeline(moments):
            for moment in moments:
                yield from _wrapped(f"{moment.step:,}   {moment.what}", bold=True, space=4)
                yield from _wrapped(moment.why, quiet=True)
        case _:
            return


def _of_table(table: Table) -> Iterator[_Line]:
    """Columns side by side where they fit, else a record a row."""
    rows = [[_text(cell) for cell in row] for row in ([table.header] if table.header else [])]
    rows += [[_text(cell) for cell in row] for row in table.rows]
    if not rows:
        return
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    size = 7.5
    if sum(widths) + 2 * len(widths) <= _characters(size):
        for number, row in enumerate(rows):
            text = "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True))
            yield _Line(text, size, bold=bool(table.header) and number == 0, mono=True)
        return
    header = rows.pop(0) if table.header else [""] * len(widths)
    for row in rows:
        yield from _wrapped(row[0], bold=True, space=4)
        named = [f"{name} {cell}" for name, cell in zip(header[1:], row[1:], strict=True) if cell]
        # Cells that contain dots are not separated by dots.
        apart = named if any("·" in cell for cell in row[1:]) else [" · ".join(named)]
        for text in apart:
            yield from _wrapped(text, 8)


def _text(cell: Cell) -> str:
    return ", ".join(filter(None, cell)) if isinstance(cell, tuple) else cell


def _characters(size: float) -> int:
    return int(_LINE_WIDTH * 72 / (0.603 * size))


def _wrapped(
    text: str, size: float = 9.0, *, bold: bool = False, quiet: bool = False, space: float = 0.0
) -> Sequence[_Line]:
    # Bold letters are a tenth wider.
    lines = textwrap.wrap(text, int(_characters(size) / (1.1 if bold else 1.0))) or [""]
    return [
        _Line(line, size, bold, quiet, space=space if number == 0 else 0.0)
        for number, line in enumerate(lines)
    ]
