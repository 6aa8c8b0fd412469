"""What `guardbit diagnose` has found of one head, in one figure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

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
    row: Any = None,
) -> Figure:
    """What each operation and remedy leaves, and which rows, keys and columns of V push.

    `row` is a `guardbit.doctor.diagnose.RowError`: a row taken apart.
    """
    panels = 4 if row is None else 7
    figure = Figure(figsize=(WIDTH, panels * _PANEL + 1.2), layout="constrained")
    parts, rows, keys, columns, *of_row = figure.subplots(
        panels, 1, height_ratios=[1.4] + [1] * (panels - 1)
    )
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
    if row is not None:
        _draw_row(of_row, row)
    for axes in (rows, keys, columns, *of_row):
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


def _draw_row(all_axes: Sequence[Axes], row: Any) -> None:
    """The paper's figures 5b and 5c in one panel, 6a, and 6b and 6c."""
    signs, values, adding = all_axes
    at = np.arange(len(row.d_out)) - 0.2
    for place, (name, drawn, gid) in enumerate(
        (("dO", row.d_out, "d_out"), ("O − exact O", row.out_error, "out_error"))
    ):
        # Their signs are compared, so each is drawn in parts of its own largest.
        largest = float(np.abs(drawn).max()) or 1.0
        heights = np.asarray(drawn) / largest
        label, colour = f"{name}, of {largest:.2g}", HIGHLIGHTS[place][0]
        signs.bar(at + 0.4 * place, heights, width=0.4, color=colour, label=label, gid=gid)
    signs.legend(loc="upper right", ncols=2)
    pushes = f"The row that pushes most, {row.position:,}: delta errs by the sum of the products"
    _name(signs, f"{pushes} (paper, figures 5b and c)", "column of V")
    keys = row.first + np.arange(len(row.values))
    ones = np.asarray(row.weights) == 1.0
    values.vlines(keys, 0, row.values, color=CONTEXT, linewidth=0.8, gid="values")
    values.plot(
        keys[ones],
        np.asarray(row.values)[ones],
        linestyle="none",
        marker="o",
        markersize=4,
        color=_ORANGE,
        label="weight exactly 1",
        gid="ones",
    )
    values.legend(loc="lower right", bbox_to_anchor=(1, 1), borderpad=0.2)
    _name(values, f"Column {row.column} of V by key (paper, figure 6a)", "position of the key")
    adding.step(keys, row.adding_up, where="post", color=_BLUE, gid="adding_up")
    so_far = "Error of the sum of weights times that column so far (paper, figures 6b and c)"
    _name(adding, so_far, "position of the key", "error")


def _name(axes: Axes, title: str, across: str = "", up: str = "") -> None:
    axes.set_title(title, fontweight="normal")
    axes.set_xlabel(across)
    axes.set_ylabel(up)
