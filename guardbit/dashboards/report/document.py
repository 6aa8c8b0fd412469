"""What a report says, before it is written in any format."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from matplotlib.figure import Figure

#: A cell of two texts shows the second small below the first.
Cell = str | tuple[str, str]


@dataclass(frozen=True, slots=True)
class Heading:
    """The title of a section."""

    text: str
    level: int = 2


@dataclass(frozen=True, slots=True)
class Paragraph:
    """A paragraph; a quiet one explains and may be passed over."""

    text: str
    quiet: bool = True


@dataclass(frozen=True, slots=True)
class Bullets:
    """A list of lines."""

    lines: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Table:
    """A table.

    Attributes:
        header: Names of the columns; none for a table without a header.
        rows: The cells.
        numbers_from: First of the columns that hold numbers, set flush right.
        kinds: A kind for each row ("alarmed" or ""), or none.
    """

    header: Sequence[str]
    rows: Sequence[Sequence[Cell]]
    numbers_from: int | None = None
    kinds: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class Moment:
    """An event of the timeline; its kind is that of `frames.what_of`."""

    step: int
    kind: str
    what: str
    why: str


@dataclass(frozen=True, slots=True)
class Timeline:
    """The events in their order."""

    moments: tuple[Moment, ...]


@dataclass(frozen=True, slots=True)
class Picture:
    """A figure with its caption; the name is the stem of its file."""

    name: str
    title: str
    caption: str
    figure: Figure


@dataclass(frozen=True, slots=True)
class Alarmed:
    """The alarms of one head, or of the whole run.

    Attributes:
        name: The head.
        site: Its attention module.
        rules: Each rule that fired, and how often.
        first: Step of the first alarm.
        last: Step of the last one.
        stabilizer: What the head runs on now, "none" for its own attention.
        why: The sentence of the first alarm.
    """

    name: str
    site: str
    rules: tuple[tuple[str, int], ...]
    first: int
    last: int
    stabilizer: str
    why: str


@dataclass(frozen=True, slots=True)
class Alarms:
    """The alarms of a run, one row a head, in the order of the first one."""

    rows: tuple[Alarmed, ...]


@dataclass(frozen=True, slots=True)
class Appendix:
    """What follows is looked up, not read."""


Block = Heading | Paragraph | Bullets | Table | Timeline | Picture | Alarms | Appendix


@dataclass(frozen=True, slots=True)
class Tile:
    """A figure to be seen first, with what it is and a note; an outcome gives it a colour."""

    name: str
    value: str
    note: str
    outcome: str = ""


@dataclass(frozen=True, slots=True)
class Document:
    """A report.

    Attributes:
        title: What the run is called.
        extent: Which steps, layers and heads it holds.
        headline: What became of it, in a sentence.
        outcome: The same in a word, which gives the headline its colour.
        lede: What happened, most important first.
        tiles: The few numbers to be seen first.
        blocks: Everything else, in order.
        answers: What the interactive page draws, JSON-able; None where nothing was recorded.
    """

    title: str
    extent: str
    headline: str
    outcome: str
    lede: tuple[str, ...]
    tiles: tuple[Tile, ...]
    blocks: list[Block] = field(default_factory=list)
    answers: Mapping[str, Any] | None = None

    @property
    def pictures(self) -> list[Picture]:
        """The figures, in order."""
        return [block for block in self.blocks if isinstance(block, Picture)]
