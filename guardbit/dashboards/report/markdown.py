"""A report as Markdown, for an issue or a wiki; its figures are files beside it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from urllib.parse import quote

from guardbit.dashboards.report.document import (
    Alarms,
    Appendix,
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


def to_markdown(document: Document, folder: str) -> str:
    """Returns the text.

    Args:
        document: The report.
        folder: Where its figures lie, relative to the text.
    """
    tiles = Table(
        [tile.name for tile in document.tiles],
        [[tile.value for tile in document.tiles], [tile.note for tile in document.tiles]],
    )
    parts = [
        f"# {_escaped(document.headline)}",
        f"{_escaped(document.title)} · {_escaped(document.extent)}",
        *[_escaped(text) for text in document.lede],
        _table(tiles),
        *[_block(block, folder) for block in document.blocks],
    ]
    return "\n\n".join(parts) + "\n"


def _block(block: Block, folder: str) -> str:
    match block:
        case Heading(text, level):
            return f"{'#' * level} {_escaped(text)}"
        case Paragraph(text):
            return _escaped(text)
        case Bullets(lines):
            return "\n".join(f"- {_escaped(line)}" for line in lines)
        case Table():
            return _table(block)
        case Alarms(rows):
            return _table(table_of_alarms(rows))
        case Appendix():
            return "---"
        case Timeline(moments):
            return "\n".join(
                f"- **{moment.step:,}** {_escaped(moment.what)}: {_escaped(moment.why)}"
                for moment in moments
            )
        case Picture(name, title, caption):
            address = quote(f"{folder}/{name}.png")
            return f"![{_escaped(title)}]({address})\n\n*{_escaped(caption)}*"


def _table(table: Table) -> str:
    width = len(table.header) or max((len(row) for row in table.rows), default=0)
    flush = width if table.numbers_from is None else table.numbers_from
    rule = "|".join("---" if index < flush else "---:" for index in range(width))
    rows = [_row(table.header or [""] * width), f"|{rule}|", *map(_row, table.rows)]
    return "\n".join(rows)


def _row(cells: Sequence[Cell]) -> str:
    texts = [cell if isinstance(cell, str) else " · ".join(filter(None, cell)) for cell in cells]
    return f"| {' | '.join(map(_escaped, texts))} |"


def _escaped(text: str) -> str:
    """Keeps what the data says text: no markup, no HTML, one line."""
    return re.sub(r"([\\`*_{}\[\]<>#|~])", r"\\\1", " ".join(text.split()))
