"""Lines of heads: grey for all, coloured and named for the few that matter."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import cast

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.lines import Line2D

from guardbit.dashboards import tables
from guardbit.dashboards.figures.style import finite, has_finite, panel_inches
from guardbit.dashboards.palette import CONTEXT, HIGHLIGHTS, INK
from guardbit.dashboards.tables import Head

#: Marks the lines that are named at their ends.
NAMED = "named"
#: Inches between the names of two lines.
NAME_HEIGHT = 0.195


def styles_of(story: Sequence[Head], notable: Sequence[Head]) -> dict[Head, tuple[str, str]]:
    """Colour and line style of notable heads: in all figures of a run a colour is one head."""
    colours = dict(zip(story, HIGHLIGHTS, strict=False))
    return {head: colours.get(head, (INK, ":")) for head in notable}


def draw_heads(
    axes: Axes,
    table: pd.DataFrame,
    notable: Mapping[Head, tuple[str, str]],
    *,
    context: bool = True,
) -> list[Line2D]:
    """A grey line for every head, and one on top that stands out for the notable ones."""
    in_layer = Counter(layer for layer, _ in table.columns)
    drawable = [head for head in table.columns if has_finite(cast(pd.Series, table[head]))]
    others = [head for head in drawable if head not in notable] if context else []
    # Hundreds of lines are a texture, in which a single one must still be seen.
    alpha = float(np.clip(12 / max(len(others), 1), 0.08, 0.4))
    # An underscore keeps a line out of legends; rasterized, hundreds of lines stay a small file.
    for layer, head in others:
        axes.plot(
            points(table, (layer, head)),
            color=CONTEXT,
            alpha=alpha,
            linewidth=0.9,
            rasterized=True,
            label="_" + tables.head_label(layer, head, in_layer[layer]),
        )
    return [
        axes.plot(
            points(table, (layer, head)),
            color=colour,
            linestyle=line_style,
            gid=NAMED,
            label=tables.head_label(layer, head, in_layer[layer]),
        )[0]
        for (layer, head), (colour, line_style) in notable.items()
        if (layer, head) in drawable
    ]


def points(table: pd.DataFrame, head: Head) -> pd.Series:
    """A head's points; its line spans the steps at which only other heads were measured."""
    return finite(cast(pd.Series, table[head]).dropna())


def label_ends(axes: Axes) -> None:
    """Names each highlighted line at its end, with an arrow where that is outside of the panel."""
    lines = [line for line in axes.get_lines() if line.get_gid() == NAMED]
    axes.autoscale_view(scaley=False)
    low, high = axes.get_ylim()
    to_axes = axes.transScale + axes.transLimits
    points = [_last_point(line) for line in lines]
    ends = [(step, min(max(value, low), high)) for step, value in points]
    order = sorted(range(len(lines)), key=lambda index: ends[index][1])
    heights = [float(to_axes.transform(ends[index])[1]) for index in order]
    for index, height in zip(order, apart(heights, NAME_HEIGHT / panel_inches(axes)), strict=True):
        line, value = lines[index], points[index][1]
        beyond = " ↑" if value > high else " ↓" if value < low else ""
        axes.annotate(
            f"{line.get_label()}{beyond}",
            xy=ends[index],
            xytext=(1.025, height),
            textcoords="axes fraction",
            va="center",
            annotation_clip=False,
            arrowprops={
                "arrowstyle": "-",
                "color": line.get_color(),
                # Dotted: a line that ends early must not seem to go on.
                "linestyle": ":",
                "linewidth": 1.2,
                "relpos": (0, 0.5),
                "shrinkA": 1,
                "shrinkB": 0,
            },
        )
    axes.set_ylim(low, high)


def _last_point(line: Line2D) -> tuple[float, float]:
    steps, values = (np.asarray(data, dtype=float) for data in line.get_data())
    measured = np.flatnonzero(np.isfinite(values))
    return float(steps[measured[-1]]), float(values[measured[-1]])


def apart(heights: Sequence[float], gap: float) -> list[float]:
    """Moves ascending heights at least `gap` apart, and below 1 as far as they fit."""
    moved: list[float] = []
    for height in heights:
        moved.append(max(height, moved[-1] + gap) if moved else height)
    ceiling = 1.0
    for index in reversed(range(len(moved))):
        moved[index] = min(moved[index], ceiling)
        ceiling = moved[index] - gap
    return moved
