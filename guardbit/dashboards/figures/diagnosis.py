"""What `guardbit diagnose` has found of one head, in one figure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from guardbit.dashboards.figures.style import WIDTH, styled
from guardbit.dashboards.palette import CONTEXT, HIGHLIGHTS, INK

_PANEL = 2.7
#: Below this part nothing can be told apart.
_LEAST = 1e-5
_ORANGE, _BLUE, _GREEN = (colour for colour, _ in HIGHLIGHTS)


@styled
def head_diagnosis(
    title: str,
    left: Mapping[str, float],
    row_push: Sequence[float],
    key_push: Sequence[float],
    column_push: Sequence[float],
) -> Figure:
    """What each operation and remedy leaves, and which rows, keys and columns of V push."""
    figure = Figure(figsize=(WIDTH, 4 * _PANEL + 1.2), layout="constrained")
    parts, rows, keys, columns = figure.subplots(4, 1, height_ratios=[1.4, 1, 1, 1])
    figure.suptitle(title, x=0.01, ha="left", fontweight="bold")
    _draw_left(parts, left)
    rows.plot(np.cumsum(np.asarray(row_push)), color=_ORANGE, gid="rows")
    keys.vlines(np.arange(len(key_push)), 0, key_push, color=_BLUE, gid="keys")
    places = np.arange(len(column_push))
    columns.vlines(places, 0, column_push, color=_GREEN, linewidth=3, gid="columns")
    climb = "Pushes of the rows on W_Q, added up: a straight climb is a bias, a walk is noise"
    _name(rows, climb, "row, sequences one after the other", "push")
    _name(keys, "Pushes by key", "position of the key", "push")
    _name(columns, "Pushes by column of V, through delta", "column", "push")
    for axes in (rows, keys, columns):
        axes.axhline(0, color=CONTEXT, linewidth=0.8)
        axes.margins(x=0.01)
    return figure


def _draw_left(axes: Axes, left: Mapping[str, float]) -> None:
    values = np.maximum(list(left.values()), _LEAST)
    places = np.arange(len(left))[::-1]
    axes.barh(places, values, height=0.6, color=_BLUE, gid="left")
    axes.set_yticks(places, list(left))
    axes.set_xscale("log")
    axes.set_xlim(_LEAST, max(2.0, values.max() * 1.2))
    axes.axvline(1, color=INK, linewidth=0.8)
    axes.grid(visible=False, axis="y")
    _name(axes, "What is left of the summed error of dQ, as a part of it")


def _name(axes: Axes, title: str, across: str = "", up: str = "") -> None:
    axes.set_title(title, fontweight="normal")
    axes.set_xlabel(across)
    axes.set_ylabel(up)
