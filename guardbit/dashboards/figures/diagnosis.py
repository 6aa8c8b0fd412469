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


# Below this part nothing can be told apart.
_LEAST = 1e-5


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

    names, values = list(left), np.maximum(list(left.values()), _LEAST)
    places = np.arange(len(names))[::-1]
    parts.barh(places, values, height=0.6, color=HIGHLIGHTS[1][0], gid="left")
    parts.set_yticks(places, names)
    parts.set_xscale("log")
    parts.set_xlim(_LEAST, max(2.0, values.max() * 1.2))
    parts.axvline(1, color=INK, linewidth=0.8)
    parts.grid(visible=False, axis="y")
    parts.set_title("What is left of the summed error of dQ, as a part of it", fontweight="normal")

    pushes = np.asarray(row_push)
    rows.plot(np.cumsum(pushes), color=HIGHLIGHTS[0][0], gid="rows")
    rows.set_title(
        "Pushes of the rows on W_Q, added up: a straight climb is a bias, a walk is noise",
        fontweight="normal",
    )
    rows.set_xlabel("row, sequences one after the other")
    # One collection of lines, however many keys there are.
    keys.vlines(np.arange(len(key_push)), 0, key_push, color=HIGHLIGHTS[1][0], gid="keys")
    keys.set_title("Pushes by key", fontweight="normal")
    keys.set_xlabel("position of the key")
    columns.vlines(
        np.arange(len(column_push)),
        0,
        column_push,
        color=HIGHLIGHTS[2][0],
        linewidth=3,
        gid="columns",
    )
    columns.set_title("Pushes by column of V, through delta", fontweight="normal")
    columns.set_xlabel("column")
    for axes in (rows, keys, columns):
        axes.set_ylabel("push")
    if row is not None:
        _draw_row(of_row, row)
    for axes in (rows, keys, columns, *of_row):
        axes.axhline(0, color=CONTEXT, linewidth=0.8)
        axes.margins(x=0.01)
    return figure


def _draw_row(all_axes: Sequence[Axes], row: Any) -> None:
    """The paper's figures 5b and 5c in one panel, 6a, and 6b and 6c."""
    signs, values, adding = all_axes
    at = np.arange(len(row.d_out))
    for place, (name, drawn, gid) in enumerate(
        (("dO", row.d_out, "d_out"), ("O − exact O", row.out_error, "out_error"))
    ):
        # Their signs are compared, so each is drawn in parts of its own largest.
        largest = float(np.abs(drawn).max()) or 1.0
        signs.bar(
            at + 0.4 * place - 0.2,
            np.asarray(drawn) / largest,
            width=0.4,
            color=HIGHLIGHTS[place][0],
            label=f"{name}, of {largest:.2g}",
            gid=gid,
        )
    signs.legend(loc="upper right", ncols=2)
    signs.set_title(
        f"The row that pushes most, {row.position:,}: delta errs by the sum of the products "
        "(paper, figures 5b and c)",
        fontweight="normal",
    )
    signs.set_xlabel("column of V")
    keys = row.first + np.arange(len(row.values))
    ones = np.asarray(row.weights) == 1.0
    values.vlines(keys, 0, row.values, color=CONTEXT, linewidth=0.8, gid="values")
    values.plot(
        keys[ones],
        np.asarray(row.values)[ones],
        linestyle="none",
        marker="o",
        markersize=4,
        color=HIGHLIGHTS[0][0],
        label="weight exactly 1",
        gid="ones",
    )
    values.legend(loc="lower right", bbox_to_anchor=(1, 1), borderpad=0.2)
    values.set_title(f"Column {row.column} of V by key (paper, figure 6a)", fontweight="normal")
    adding.step(keys, row.adding_up, where="post", color=HIGHLIGHTS[1][0], gid="adding_up")
    adding.set_title(
        "Error of the sum of weights times that column so far (paper, figures 6b and c)",
        fontweight="normal",
    )
    for axes in (values, adding):
        axes.set_xlabel("position of the key")
    adding.set_ylabel("error")
