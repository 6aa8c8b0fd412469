"""What a report says, before it is written in any format."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

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


Block = Heading | Paragraph | Bullets | Table | Timeline | Picture


@dataclass(frozen=True, slots=True)
class Tile:
    """A figure to be seen first, with what it is and a note."""

    name: str
    value: str
    note: str


@dataclass(frozen=True, slots=True)
class Document:
    """A report.

    Attributes:
        title: What the run is called.
        extent: Which steps, layers and heads it holds.
        headline: The verdict in a sentence.
        lede: What happened, most important first.
        tiles: The few numbers to be seen first.
        blocks: Everything else, in order.
    """

    title: str
    extent: str
    headline: str
    lede: tuple[str, ...]
    tiles: tuple[Tile, ...]
    blocks: list[Block] = field(default_factory=list)

    @property
    def pictures(self) -> list[Picture]:
        """The figures, in order."""
        return [block for block in self.blocks if isinstance(block, Picture)]
