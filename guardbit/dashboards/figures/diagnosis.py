"""What `guardbit diagnose` has found of one head, in one figure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
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
) -> Figure:
    """What each operation and remedy leaves, and which rows, keys and columns of V push.

    Args:
        title: Of the figure.
        left: What is left of the summed error of dQ, by what was done, as a part of it.
        row_push: Of each row, in order; sequences one after the other.
        key_push: Of each key, all sequences together.
        column_push: Of each column of V, through delta.
    """
    figure = Figure(figsize=(WIDTH, 4 * _PANEL + 1.2), layout="constrained")
    parts, rows, keys, columns = figure.subplots(4, 1, height_ratios=[1.4, 1, 1, 1])
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
        axes.axhline(0, color=CONTEXT, linewidth=0.8)
        axes.margins(x=0.01)
        axes.set_ylabel("push")
    return figure
