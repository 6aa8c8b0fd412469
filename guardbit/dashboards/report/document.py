"""What a report says: one record, which the template `page.html` renders."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from matplotlib.figure import Figure

#: A cell of two texts shows the second small below the first.
Cell = str | tuple[str, str]


class Table(NamedTuple):
    """A table, without a header if that is empty.

    Attributes:
        header: Names of the columns.
        rows: The cells.
        numbers_from: First of the columns that hold numbers, set flush right.
        kinds: A kind for each row ("alarmed" or ""), or none.
    """

    header: Sequence[str]
    rows: Sequence[Sequence[Cell]]
    numbers_from: int = sys.maxsize
    kinds: Sequence[str] = ()


class Tile(NamedTuple):
    """A number to be seen first, with its name and a note; an outcome gives it a colour."""

    name: str
    value: str
    note: str
    outcome: str = ""


class Alarmed(NamedTuple):
    """The alarms of one head, or of the whole run.

    Attributes:
        name: The head.
        site: Its attention module.
        rules: Each rule that fired, and how often.
        when: Steps of the first alarm and of the last one.
        stabilizer: What the head runs on now, "none" for its own attention.
        why: The sentence of the first alarm.
    """

    name: str
    site: str
    rules: Sequence[str]
    when: str
    stabilizer: str
    why: str


class Heads(NamedTuple):
    """What became of the heads of a run.

    Attributes:
        run: What the run is called.
        summary: What happened, most important first.
        alarms: One row a head, in the order of the first alarm.
        alarms_note: How many rows were left out.
        watched: The heads to worry about, worst first; None where none was measured.
        watched_note: Which they are.
    """

    run: str
    summary: Sequence[str]
    alarms: Sequence[Alarmed]
    alarms_note: str
    watched: Table | None
    watched_note: str


class Moment(NamedTuple):
    """An event of the timeline; its kind is that of `marks.what_of`."""

    step: int
    kind: str
    what: str
    why: str


class Diagnosed(NamedTuple):
    """What `guardbit diagnose` has found: each head with its answer, and what remedies leave."""

    said: str = ""
    heads: Sequence[tuple[str, str]] = ()
    note: str = ""
    left: Table | None = None


class Picture(NamedTuple):
    """A figure; the name is the stem of its file."""

    name: str
    figure: Figure


@dataclass(frozen=True, slots=True)
class Document:
    """A report of one run, or of several side by side.

    Attributes:
        title: What the run is called.
        extent: Which steps, layers and heads it holds.
        headline: What became of it, in a sentence.
        outcome: The same in a word, which gives the headline its colour.
        lede: What happened, most important first.
        tiles: The few numbers to be seen first.
        pictures: The figures.
        answers: What the interactive page draws, JSON-able; None where nothing was recorded.
        runs: The heads of each run.
        settings: Tables of settings, each with its title.
        side_by_side: Of several runs: the numbers of each.
        effect: What switches did, of one run as all below.
        diagnosed: Why heads diverge.
        not_drawn: Figures that the run has no samples for.
        timeline: The events in their order.
        timeline_note: How many were left out.
    """

    title: str
    extent: str
    headline: str
    outcome: str
    lede: Sequence[str]
    tiles: Sequence[Tile]
    pictures: Sequence[Picture]
    answers: Mapping[str, Any] | None
    runs: Sequence[Heads]
    settings: Sequence[tuple[str, Table]]
    side_by_side: Table | None = None
    effect: Table | None = None
    diagnosed: Diagnosed | None = None
    not_drawn: Sequence[str] = ()
    timeline: Sequence[Moment] = ()
    timeline_note: str = ""
