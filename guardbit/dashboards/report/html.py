"""A report as one page that opens without a network.

Its figures are inline SVG that take the page's text colour, so they read on light and dark alike.
"""

from __future__ import annotations

import io
import re
import sys
from collections.abc import Sequence
from html import escape
from importlib import resources
from string import Template

import matplotlib

from guardbit.dashboards.figures.style import STYLE
from guardbit.dashboards.palette import HIGHLIGHTS, INK, PAPER
from guardbit.dashboards.report.document import (
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


def to_html(document: Document) -> str:
    """Returns the page."""
    template = resources.files("guardbit.dashboards.report").joinpath("page.html")
    return Template(template.read_text(encoding="utf-8")).substitute(
        title=escape(document.title),
        extent=escape(document.extent),
        headline=escape(document.headline),
        lede="".join(_block(Paragraph(text, quiet=False)) for text in document.lede),
        tiles="".join(
            f"<div><dt>{escape(tile.name)}</dt><dd>{escape(tile.value)}</dd>"
            f"<dd>{escape(tile.note)}</dd></div>"
            for tile in document.tiles
        ),
        sections="\n".join(map(_block, document.blocks)),
    )


def _block(block: Block) -> str:
    match block:
        case Heading(text, level):
            return f"<h{level}>{escape(text)}</h{level}>"
        case Paragraph(text, quiet):
            return f'<p class="{"quiet" if quiet else "lede"}">{escape(text)}</p>'
        case Bullets(lines):
            items = "".join(f"<li>{escape(line)}</li>" for line in lines)
            return f'<ul class="quiet">{items}</ul>'
        case Table():
            return _table(block)
        case Timeline(moments):
            items = "".join(
                f'<li class="{escape(moment.kind)}"><time>{moment.step:,}</time>'
                f"<b>{escape(moment.what)}</b><p>{escape(moment.why)}</p></li>"
                for moment in moments
            )
            return f'<ol class="timeline">{items}</ol>'
        case Picture():
            return (
                f"<figure>{_inline_svg(block)}<figcaption>{escape(block.caption)}"
                "</figcaption></figure>"
            )


def _table(table: Table) -> str:
    flush = sys.maxsize if table.numbers_from is None else table.numbers_from

    def row(cells: Sequence[Cell], tag: str, kind: str = "") -> str:
        opened = [
            f'<{tag} class="number">' if i >= flush else f"<{tag}>" for i in range(len(cells))
        ]
        inner = "".join(
            f"{start}{_cell(cell)}</{tag}>" for start, cell in zip(opened, cells, strict=True)
        )
        return f'<tr class="{kind}">{inner}</tr>' if kind else f"<tr>{inner}</tr>"

    head = f"<thead>{row(table.header, 'th')}</thead>" if table.header else ""
    kinds = table.kinds or [""] * len(table.rows)
    body = "".join(row(cells, "td", kind) for cells, kind in zip(table.rows, kinds, strict=True))
    return f'<div class="scroll"><table>{head}<tbody>{body}</tbody></table></div>'


def _cell(cell: Cell) -> str:
    if isinstance(cell, tuple):
        return f"{escape(cell[0])}<small>{escape(cell[1])}</small>"
    return escape(cell)


def _inline_svg(picture: Picture) -> str:
    """The figure as an SVG element that takes colours and typeface from the page."""
    buffer = io.StringIO()
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": picture.name}):
        picture.figure.savefig(
            buffer,
            format="svg",
            transparent=True,
            dpi=STYLE["savefig.dpi"],
            metadata={"Date": None},
        )
    svg = buffer.getvalue()
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    # Inside HTML the parser knows the name spaces; without them the page names no address at all.
    svg = re.sub(r'\s(xmlns(:xlink)?|version)="[^"]*"', "", svg)
    opening, rest = svg.split(">", 1)
    opening = re.sub(r'\s(width|height)="[^"]*"', "", opening)
    # Names of elements are unique within a figure at best: those in use get the figure's name.
    used = set(re.findall(r'(?:url\(|href=")#([^)"]+)', rest))
    rest = re.sub(r' id="([^"]*)"', lambda m: m[0] if m[1] in used else "", rest)
    rest = re.sub(r'( id="|url\(#|href="#)', rf"\g<1>{picture.name}-", rest)
    rest = re.sub(r"font-family: [^;\"]*;? ?", "", rest)
    rest = rest.replace(INK, "currentColor").replace(PAPER, "var(--paper)")
    for index, (colour, _) in enumerate(HIGHLIGHTS):
        rest = rest.replace(colour, f"var(--highlight-{index})")
    return f'{opening} role="img" aria-label="{escape(picture.title)}">{rest}'
