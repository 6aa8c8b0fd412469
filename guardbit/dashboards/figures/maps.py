"""Heat maps: layers by steps, and the whole model at one step."""

import math
from collections.abc import Sequence
from typing import Any, cast

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Rectangle
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from guardbit.dashboards.figures import style
from guardbit.dashboards.palette import INK, MOST_EXCESS, PAPER
from guardbit.dashboards.tables import Head, Recorded, of_heads
from guardbit.records import from_zero

#: The end of the heat map's colours, in times the median head's norm. The largest in the recorded
#: stable runs of single heads (`studies/rescue/results`) are 3.3 times it.
MOST_TYPICAL = 30.0
#: Light within ink, so that it is seen on any colour of the ramp.
DOT: dict[str, Any] = {
    "linestyle": "none",
    "marker": "o",
    "color": INK,
    "markerfacecolor": PAPER,
    "markeredgewidth": 1.2,
}


@style.styled
def spectral_norm_by_layer(run: Recorded) -> Figure | None:
    """W_Q spectral norm, layers x steps: a heat map of each layer's largest head."""
    norms = run.by_head("w_q_spectral_norm")
    largest = style.finite(cast(pd.DataFrame, norms.T.groupby(level="layer").max()).T)
    table = style.finite(largest.div(style.finite(norms).median(axis=1), axis=0))
    if not style.has_finite(table):
        return None
    figure, (axes,) = style.canvas("W_Q spectral norm of the largest head of each layer")
    mesh = axes.pcolormesh(
        style.edges(table.index.to_numpy(dtype=float)),
        np.arange(len(table.columns) + 1) - 0.5,
        np.ma.masked_invalid(table.to_numpy().T),
        cmap=style.HEAT,
        norm=LogNorm(1, MOST_TYPICAL),
        rasterized=True,
        gid="map",
    )
    _name_rows(axes, table.columns.to_list())
    axes.set_ylabel("layer")
    axes.grid(False)
    _colour_bar(figure, axes, mesh, "times the median head's norm", (1, 3, 10, MOST_TYPICAL))
    style.finish([axes], run)
    return figure


@style.styled
def model_map(run: Recorded, step: int | None = None) -> Figure | None:
    """Layers x heads, one cell a head: how far its worst indicator is above its baseline.

    By default at the first alarm, or at the end. A step before the first sample, as of an alarm
    that a resumed run brought along, is drawn at it, and one after the end at the end.
    """
    if step is None:
        step = next((event.step for event in run.first("alarm").values()), None)
    last = max(run.steps[1], *(event.step for event in run.events), 0)
    step = run.steps[1] if step is None else min(from_zero(step, "step"), last)
    if run.history.heads:
        step = max(step, int(of_heads(run.samples)["step"].to_numpy().min()))
    cells, _, _ = run.excess(run.history.bucket_of(step))
    if not np.isfinite(cells).any():
        return None
    current = run.stabilizers(step)
    stabilized = [head for head, stabilizer in current.items() if stabilizer != "none"]
    return draw_model_map(cells, step, list(run.first("alarm", until=step)), stabilized)


@style.styled
def draw_model_map(
    cells: np.ndarray, step: int, alarmed: Sequence[Head], stabilized: Sequence[Head]
) -> Figure:
    height = float(np.clip(0.115 * len(cells), style.PANEL_HEIGHT, 9.2))
    figure, (axes,) = style.canvas(f"Model map at step {step:,}", panel_height=height)
    mesh = axes.pcolormesh(
        np.arange(cells.shape[1] + 1) - 0.5,
        np.arange(len(cells) + 1) - 0.5,
        np.ma.masked_invalid(np.clip(cells, 1, MOST_EXCESS)),
        cmap=style.HEAT,
        norm=LogNorm(1, MOST_EXCESS),
        edgecolors=PAPER,
        linewidth=min(1.5, 40 / max(cells.shape)),
        gid="map",
    )
    _name_rows(axes, list(range(len(cells))))
    axes.set_ylabel("layer")
    # One value a layer may be the largest over its heads: their numbers are then not known.
    one_value = cells.shape[1] == 1
    axes.set_xlabel("one value a layer" if one_value else "head")
    axes.set_xticks([] if one_value else range(0, cells.shape[1], math.ceil(cells.shape[1] / 16)))
    axes.grid(False)
    key = _mark_heads(axes, alarmed, stabilized, cells.shape)
    if key:
        style.place_key(axes, key)
    label = "worst indicator, times its baseline"
    _colour_bar(figure, axes, mesh, label, (1, 3, 10, 30, MOST_EXCESS))
    return figure


def _mark_heads(
    axes: Axes, alarmed: Sequence[Head], stabilized: Sequence[Head], shape: tuple[int, ...]
) -> list[Line2D]:
    """Frames the alarmed heads and dots the stabilized ones; returns the key."""
    for layer, head in alarmed:
        frame = Rectangle((head - 0.5, layer - 0.5), 1, 1, fill=False, edgecolor=INK, linewidth=2)
        frame.set(clip_on=False, gid="alarm")
        axes.add_patch(frame)
    if stabilized:
        layers, heads = zip(*stabilized, strict=True)
        inches = min(0.7 * style.WIDTH / shape[1], style.PANEL_HEIGHT / shape[0])
        axes.plot(
            heads,
            layers,
            **DOT,
            markersize=float(np.clip(0.35 * inches * 72, 2.5, 9)),
            clip_on=False,
            gid="stabilized",
        )
    frames = {"linestyle": "none", "color": INK, "marker": "s", "markerfacecolor": "none"}
    return [
        Line2D(
            [], [], **look, markersize=7, label=f"{len(heads)} head{'s' * (len(heads) > 1)} {what}"
        )
        for heads, what, look in (
            (alarmed, "had an alarm", {**frames, "markeredgewidth": 1.6}),
            (stabilized, "stabilized now", DOT),
        )
        if heads
    ]


def _name_rows(axes: Axes, layers: list[int]) -> None:
    every = math.ceil(len(layers) / 16)
    axes.set_yticks(range(0, len(layers), every), [str(layer) for layer in layers[::every]])


def _colour_bar(figure: Figure, axes: Axes, mesh: Any, label: str, ticks: Sequence[float]) -> None:
    """A bar of multiples beside a map, of which the last tick stands for all that is larger."""
    bar = figure.colorbar(mesh, ax=axes, pad=0.015, aspect=30)
    bar.outline.set_visible(False)  # pyright: ignore[reportCallIssue]
    bar.set_label(label)
    bar.ax.yaxis.set_major_locator(FixedLocator(ticks))
    bar.ax.yaxis.set_minor_locator(NullLocator())
    bar.ax.yaxis.set_major_formatter(
        FuncFormatter(lambda value, _: f"{'≥ ' if value >= ticks[-1] else ''}{value:g}×")
    )
