"""A report as one page that opens without a network.

What it draws, and the scripts that draw it, are part of the page; a policy of its own lets no other
script run and nothing be fetched.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import sys
from collections.abc import Iterator, Sequence
from html import escape
from importlib import resources
from string import Template

from guardbit.dashboards.report import words
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
    Tile,
    Timeline,
)
from guardbit.dashboards.web import asset

#: Rows of alarms that are seen at once.
_UNFOLDED = 10


def to_html(document: Document, folder: str) -> str:
    """Returns the page.

    Args:
        document: The report.
        folder: Where its figures lie as PNGs, relative to the page.
    """
    script = "\n".join((asset("uPlot.iife.min.js"), asset("charts.js"), _own("report.js")))
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    sections = list(_sections(document))
    return Template(_own("page.html")).substitute(
        title=escape(document.title),
        extent=escape(document.extent),
        outcome=escape(document.outcome),
        headline=escape(document.headline),
        lede="".join(_block(Paragraph(text, quiet=False)) for text in document.lede),
        tiles="".join(map(_tile, document.tiles)),
        story=_story(document),
        contents="".join(f'<a href="#{slug}">{escape(name)}</a>' for slug, name, _ in sections),
        sections="\n".join(text for *_, text in sections),
        pictures=f"{escape(folder)}/" if document.pictures else "",
        style=asset("uPlot.min.css") + asset("theme.css"),
        policy=f"default-src 'none'; script-src 'sha256-{digest}'; style-src 'unsafe-inline'; "
        "img-src data:; base-uri 'none'; form-action 'none'",
        # Within a script element nothing but its end is markup.
        data=json.dumps(document.answers or {}, separators=(",", ":")).replace("<", "\\u003c"),
        script=script,
    )


def _own(name: str) -> str:
    return resources.files("guardbit.dashboards.report").joinpath(name).read_text(encoding="utf-8")


def _tile(tile: Tile) -> str:
    colour = f' class="outcome {tile.outcome}"' if tile.outcome else ""
    return (
        f"<div><dt>{escape(tile.name)}</dt><dd{colour}>{escape(tile.value)}</dd>"
        f"<dd>{escape(tile.note)}</dd></div>"
    )


def _story(document: Document) -> str:
    """The charts and the map at the top, where there is anything to draw."""
    if document.answers is None:
        return ""
    return _own("side_by_side.html" if "overlays" in document.answers else "story.html")


def _sections(document: Document) -> Iterator[tuple[str, str, str]]:
    """Yields each section: its name in addresses, its title, and its HTML.

    The charts of the page stand in place of the figures. The appendix is folded.
    """
    is_open, blocks = True, document.blocks
    starts = [
        i for i, block in enumerate(blocks) if isinstance(block, Heading) and block.level == 2
    ]
    for start, end in zip(starts, [*starts[1:], len(blocks)], strict=True):
        if any(isinstance(block, Appendix) for block in blocks[:start]):
            is_open = False
        inner = [block for block in blocks[start + 1 : end] if not isinstance(block, Appendix)]
        title = getattr(blocks[start], "text", "")
        content = "".join(map(_block, inner))
        if document.answers is not None and any(isinstance(block, Picture) for block in inner):
            content = _own("charts.html") + content
        slug = f"section-{start}-{re.sub('[^a-z]+', '-', title.lower()).strip('-')}"
        fold = f'<details{" open" if is_open else ""} id="{slug}">'
        yield slug, title, f"{fold}<summary><h2>{escape(title)}</h2></summary>{content}</details>"


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
        case Alarms():
            return _alarms(block)
        case Timeline(moments):
            items = "".join(
                f'<li class="{escape(moment.kind)}"><time>{moment.step:,}</time>'
                f"<b>{escape(moment.what)}</b><p>{escape(moment.why)}</p></li>"
                for moment in moments
            )
            return f'<ol class="timeline">{items}</ol>'
        case Picture() | Appendix():
            return ""


def _alarms(alarms: Alarms) -> str:
    rows: list[str] = []
    for row in alarms.rows:
        chips = "".join(f"<i>{escape(words.chip(*rule))}</i>" for rule in row.rules)
        now = "" if row.stabilizer == "none" else f"<em>{escape(row.stabilizer)} now</em>"
        rows.append(
            f"<details><summary><b>{escape(row.name)}</b>{chips}"
            f"<span>{words.span(row.first, row.last)}</span>{now}</summary>"
            f"<p>{escape(row.site)}{': ' if row.site else ''}{escape(row.why)}</p></details>"
        )
    first, more = "".join(rows[:_UNFOLDED]), rows[_UNFOLDED:]
    if more:
        folded = f"<summary>{words.count(len(more), 'more row')}</summary>{''.join(more)}"
        first += f"<details>{folded}</details>"
    return f'<div class="alarms">{first}</div>'


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
