"""Figures of a run: pure functions from (frame, events) to a matplotlib Figure.

Each returns None where the run recorded nothing it could draw. All share one style, one range of
steps and one way to mark events. Colours are Okabe and Ito's, told apart by people with any colour
vision; line styles and direct labels tell the lines apart in grey. No pyplot, hence no global
state: the figures show in a notebook and nowhere else by themselves.
"""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import matplotlib
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.colors import LogNorm, Normalize
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patheffects import withStroke
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter

from guardbit.dashboards import frames
from guardbit.dashboards.frames import MARKS, Head, Mark

Table = TypeVar("Table", pd.DataFrame, pd.Series)
Draw = Callable[[pd.DataFrame, pd.DataFrame | None], Figure | None]

INK = "#20242c"
PAPER = "#ffffff"
CONTEXT = "#8c939e"
HIGHLIGHTS: tuple[tuple[str, str], ...] = (
    ("#d55e00", "-"),
    ("#0072b2", "--"),
    ("#009e73", "-."),
)
#: Marker and line style of each mark; drawn in ink, so that they are never taken for data.
MARK_STYLES: dict[Mark, tuple[str, str, str]] = {
    "alarm": ("v", "--", INK),
    "switch": ("D", "-", INK),
    "undo": ("D", ":", PAPER),
}
#: Heights above the panel, in parts of it: an alarm and the switch it causes share a step.
MARK_HEIGHTS: dict[Mark, float] = {"alarm": 1.02, "switch": 1.062, "undo": 1.062}
#: Beyond this many, vertical lines would hide the data: only the first keeps its line.
MOST_LINES = 6

#: Samples in the running median laid over loss and gradient norm, which are noisy by batch.
MEDIAN_WINDOW = 25

#: 1,000 pixels wide at 100 dots an inch; 10 points are then 14 pixels.
WIDTH, PANEL_HEIGHT = 10.0, 3.0
#: Inches around the panels, the same in every figure, so that steps stand below one another; the
#: right margin holds the names of the lines, a colour bar or a second axis.
LEFT, RIGHT, TOP, BOTTOM, BETWEEN, LEGEND = 1.15, 1.5, 0.9, 0.6, 0.45, 0.3

STYLE: Any = {
    "font.family": "DejaVu Sans",
    "font.size": 10,
    "axes.titlesize": 12.5,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.labelcolor": INK,
    "axes.titlecolor": INK,
    "axes.edgecolor": INK,
    "axes.linewidth": 0.7,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "axes.axisbelow": True,
    "grid.color": INK,
    "grid.alpha": 0.12,
    "grid.linewidth": 0.7,
    "text.color": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "xtick.direction": "out",
    "lines.linewidth": 1.8,
    "legend.frameon": False,
    "legend.fontsize": 9.5,
    "figure.facecolor": PAPER,
    "figure.dpi": 100,
    "savefig.dpi": 150,
}

#: Loss and the like span a decade at the start of a run; below this ratio a log axis lacks ticks.
LOG_FROM_RATIO = 4.0


@dataclass(frozen=True, slots=True)
class Chart:
    """A figure of the report.

    Attributes:
        name: Stem of its PNG.
        title: What it shows, in a few words.
        caption: One sentence: what to look for, and the paper's figure where there is one.
        needs: The indicators of which it needs at least one.
        draw: The function that draws it.
    """

    name: str
    title: str
    caption: str
    needs: tuple[str, ...]
    draw: Draw


def _styled(draw: Callable[..., Figure | None]) -> Callable[..., Figure | None]:
    @functools.wraps(draw)
    def styled(*arguments: Any, **options: Any) -> Figure | None:
        with matplotlib.rc_context(STYLE):
            return draw(*arguments, **options)

    return styled


@_styled
def spectral_norm_by_layer(
    frame: pd.DataFrame, events: pd.DataFrame | None = None
) -> Figure | None:
    """W_Q spectral norm, layers x steps: a heat map of each layer's largest head.

    The paper's figure 11. The colour scale is logarithmic, as healthy norms grow tenfold too.
    Cells without a finite value stay blank.
    """
    table = frames.by_layer(frame, "w_q_spectral_norm")
    if not _has_finite(table):
        return None
    table = _finite(table)
    figure, (axes,) = _canvas("W_Q spectral norm of the largest head of each layer")
    low, high = float(np.nanmin(table)), float(np.nanmax(table))
    logarithmic = low > 0 and high / low > LOG_FROM_RATIO
    mesh = axes.pcolormesh(
        _edges(table.index.to_numpy(dtype=float)),
        np.arange(len(table.columns) + 1) - 0.5,
        np.ma.masked_invalid(table.to_numpy().T),
        cmap="viridis",
        norm=LogNorm(low, high) if logarithmic else Normalize(low, high),
        rasterized=True,
    )
    layers = table.columns.to_list()
    every = math.ceil(len(layers) / 16)
    axes.set_yticks(range(0, len(layers), every), [str(layer) for layer in layers[::every]])
    axes.set_ylabel("layer")
    axes.grid(False)
    place = axes.get_position()
    bar = figure.colorbar(
        mesh, cax=figure.add_axes((place.x1 + 0.015, place.y0, 0.014, place.height))
    )
    bar.set_label("largest singular value" + (", log scale" if logarithmic else ""))
    if logarithmic:
        _log_ticks(bar.ax.yaxis, high / low)
    bar.outline.set_visible(False)  # pyright: ignore[reportCallIssue]
    _finish([axes], frame, events)
    return figure


@_styled
def spectral_norm_of_heads(
    frame: pd.DataFrame, events: pd.DataFrame | None = None, layer: int | None = None
) -> Figure | None:
    """W_Q spectral norm of all heads of one layer over steps; the paper's figure 3.

    Args:
        frame: The samples.
        events: The journal.
        layer: The layer; by default the first to alarm, else the one with the largest norm.
    """
    if layer is None:
        layer = next((head[0] for head in frames.first_events(frame, events, "alarm")), None)
    if layer is None:
        layer = frames.worst_layer(frame)
    samples = frames.check_samples(frame)
    of_layer = cast(pd.DataFrame, samples[samples["layer"] == layer])
    table = frames.by_head(of_layer, "w_q_spectral_norm")
    if not _has_finite(table):
        return None
    figure, (axes,) = _canvas(
        f"W_Q spectral norm of layer {layer}" + (", every head" if len(table.columns) > 1 else "")
    )
    axes.set_ylabel("largest singular value")
    _draw_heads(axes, table, frames.notable_heads(of_layer, events, "w_q_spectral_norm"))
    axes.set_ylim(bottom=0)
    _finish([axes], frame, events)
    _label_ends(axes)
    return figure


@_styled
def max_logit(frame: pd.DataFrame, events: pd.DataFrame | None = None) -> Figure | None:
    """Largest attention score of every head over steps, after scaling, on a log axis.

    Values at or below zero have no place on a log axis and are left out.
    """
    table = frames.by_head(frame, "max_logit")
    table = table.where(table > 0)
    if not _has_finite(table):
        return None
    figure, (axes,) = _canvas("Max logit of every head")
    _draw_heads(axes, table, frames.notable_heads(frame, events, "max_logit"))
    axes.set_ylabel("largest attention score" + _scale(axes, table.to_numpy()))
    _finish([axes], frame, events)
    _label_ends(axes)
    return figure


def multiple_maxima(frame: pd.DataFrame, events: pd.DataFrame | None = None) -> Figure | None:
    """Share of rows with more than one maximum over the loss, FP32 scores; the paper's figure 13.

    The twin of `multiple_maxima_bf16`; the two never share an axis, as they measure different
    things under similar names.
    """
    return _maxima_over_loss(frame, events, "multiple_maxima", "FP32 scores")


def multiple_maxima_bf16(frame: pd.DataFrame, events: pd.DataFrame | None = None) -> Figure | None:
    """The same as `multiple_maxima` with the scores rounded to BF16, as in the paper's code."""
    return _maxima_over_loss(frame, events, "multiple_maxima_bf16", "BF16-rounded scores")


@_styled
def _maxima_over_loss(
    frame: pd.DataFrame, events: pd.DataFrame | None, indicator: str, scores: str
) -> Figure | None:
    table = 100 * frames.by_head(frame, indicator)
    if not _has_finite(table):
        return None
    figure, (axes,) = _canvas(f"Multiple maxima ({scores}) over the loss", below=LEGEND)
    axes.set_ylabel("rows with more than one\nmaximum (% of rows)")
    named = _draw_heads(axes, table, frames.notable_heads(frame, events, indicator))
    axes.set_ylim(bottom=0)
    loss = _finite(frames.of_run(frame, "loss"))
    if _has_finite(loss):
        twin = axes.twinx()
        twin.spines["right"].set_visible(True)
        twin.grid(False)
        (line,) = twin.plot(_smooth(loss), color=INK, linewidth=1.1, label="loss (right)")
        named.append(line)
        twin.set_ylabel("training loss" + _scale(twin, loss.to_numpy()))
    figure.legend(
        handles=named,
        loc="lower left",
        bbox_to_anchor=(LEFT / WIDTH, 0),
        ncols=len(named),
        handlelength=2.6,
    )
    _finish([axes], frame, events)
    return figure


@_styled
def delta_bias(frame: pd.DataFrame, events: pd.DataFrame | None = None) -> Figure | None:
    """Cumulative delta bias of every head over steps, with its sign; the paper's figure 5(a)."""
    table = frames.by_head(frame, "delta_bias_cumulative")
    if not _has_finite(table):
        return None
    figure, (axes,) = _canvas("Cumulative delta bias of every head")
    axes.axhline(0, color=INK, linewidth=0.9)
    axes.set_ylabel("sum of δ_lp − δ_hp\nover the sampled steps")
    _draw_heads(axes, table, frames.notable_heads(frame, events, "delta_bias_cumulative"))
    axes.yaxis.set_major_formatter(FuncFormatter(_plain))
    _finish([axes], frame, events)
    _label_ends(axes)
    return figure


@_styled
def loss_and_gradient(frame: pd.DataFrame, events: pd.DataFrame | None = None) -> Figure | None:
    """Training loss and gradient norm over steps, each with its running median."""
    panels = {
        label: series
        for label, name in (("training loss", "loss"), ("gradient norm", "grad_norm"))
        if _has_finite(series := _finite(frames.of_run(frame, name)))
    }
    if not panels:
        return None
    figure, all_axes = _canvas(" and ".join(panels).capitalize(), len(panels))
    for axes, (label, series) in zip(all_axes, panels.items(), strict=True):
        axes.plot(series, color=CONTEXT, alpha=0.45, linewidth=0.8, rasterized=True)
        axes.plot(_smooth(series), color=HIGHLIGHTS[1][0], label=label)
        axes.set_ylabel(label + _scale(axes, series.to_numpy()))
    _finish(all_axes, frame, events)
    return figure


def _canvas(title: str, panels: int = 1, below: float = 0.0) -> tuple[Figure, list[Axes]]:
    """Panels one above the other that share their steps, with `below` inches spare under them."""
    bottom = BOTTOM + below
    height = TOP + panels * PANEL_HEIGHT + (panels - 1) * BETWEEN + bottom
    figure = Figure(figsize=(WIDTH, height))
    grid = figure.subplots(panels, 1, sharex=True, squeeze=False)
    figure.subplots_adjust(
        left=LEFT / WIDTH,
        right=1 - RIGHT / WIDTH,
        top=1 - TOP / height,
        bottom=bottom / height,
        hspace=BETWEEN / PANEL_HEIGHT,
    )
    grid[0, 0].set_title(title, pad=40)
    return figure, list(grid[:, 0])


def _finish(all_axes: Sequence[Axes], frame: pd.DataFrame, events: pd.DataFrame | None) -> None:
    """The run's range of steps, the same in every figure of a run, and the marks of its events."""
    steps = frames.check_samples(frame)["step"].to_numpy()
    first, last = int(steps.min()), int(steps.max())
    all_axes[-1].set_xlim(first, max(last, first + 1))
    all_axes[-1].set_xlabel("optimizer step")
    all_axes[-1].xaxis.set_major_locator(MaxNLocator(8, steps=[1, 2, 2.5, 5, 10], integer=True))
    all_axes[-1].xaxis.set_major_formatter(FuncFormatter(_plain))
    for axes in all_axes:
        _mark_events(axes, events)
    key = _event_key(events)
    if key:
        all_axes[0].legend(
            handles=key,
            loc="lower left",
            bbox_to_anchor=(0, 1.1),
            ncols=len(key),
            handlelength=0.8,
            handletextpad=0.5,
            borderpad=0,
            borderaxespad=0,
        )


def _mark_events(axes: Axes, events: pd.DataFrame | None) -> None:
    halo = [withStroke(linewidth=3, foreground=PAPER, alpha=0.8)]
    for mark in MARKS:
        marker, line_style, face = MARK_STYLES[mark]
        steps = frames.marked_steps(events, mark)
        for step in steps if len(steps) <= MOST_LINES else steps[:1]:
            axes.axvline(
                step, color=INK, linestyle=line_style, linewidth=1.0, path_effects=halo, gid=mark
            )
        axes.plot(
            steps,
            [MARK_HEIGHTS[mark]] * len(steps),
            transform=axes.get_xaxis_transform(),
            linestyle="none",
            marker=marker,
            markersize=5.5,
            color=INK,
            markerfacecolor=face,
            clip_on=False,
            gid=f"{mark}-markers",
        )


def _event_key(events: pd.DataFrame | None) -> list[Line2D]:
    key: list[Line2D] = []
    for mark in MARKS:
        steps = frames.marked_steps(events, mark)
        if steps:
            marker, _, face = MARK_STYLES[mark]
            where = f"step {steps[0]:,}" if len(steps) == 1 else f"first at step {steps[0]:,}"
            key.append(
                Line2D(
                    [],
                    [],
                    linestyle="none",
                    marker=marker,
                    markersize=5.5,
                    color=INK,
                    markerfacecolor=face,
                    label=f"{mark}, {where}",
                )
            )
    return key


def _draw_heads(axes: Axes, table: pd.DataFrame, notable: Sequence[Head]) -> list[Line2D]:
    """A grey line for every head, and a coloured one on top for the notable ones.

    Returns:
        The coloured lines, labelled with their heads.
    """
    in_layer = Counter(layer for layer, _ in table.columns)
    drawable = [head for head in table.columns if _has_finite(cast(pd.Series, table[head]))]
    context = [head for head in drawable if head not in notable]
    notable = [head for head in notable if head in drawable]
    # An underscore keeps a line out of legends; rasterized, hundreds of lines stay a small file.
    for layer, head in context:
        axes.plot(
            _points(table, (layer, head)),
            color=CONTEXT,
            alpha=0.4,
            linewidth=0.9,
            rasterized=True,
            label="_" + frames.head_label(layer, head, in_layer[layer]),
        )
    named: list[Line2D] = []
    for (layer, head), (colour, line_style) in zip(notable, HIGHLIGHTS, strict=False):
        (line,) = axes.plot(
            _points(table, (layer, head)),
            color=colour,
            linestyle=line_style,
            label=frames.head_label(layer, head, in_layer[layer]),
        )
        named.append(line)
    return named


def _label_ends(axes: Axes) -> None:
    """Names each highlighted line at its last point, moved apart where the names would touch."""
    lines = [line for line in axes.get_lines() if line.get_color() in dict(HIGHLIGHTS)]
    axes.autoscale_view(scaley=False)
    low, high = axes.get_ylim()
    to_axes = axes.transScale + axes.transLimits
    ends = [_last_point(line) for line in lines]
    order = sorted(range(len(lines)), key=lambda index: ends[index][1])
    heights = [float(to_axes.transform(ends[index])[1]) for index in order]
    for index, height in zip(order, _apart(heights, gap=0.065), strict=True):
        line = lines[index]
        axes.annotate(
            str(line.get_label()),
            xy=ends[index],
            xytext=(1.025, height),
            textcoords="axes fraction",
            va="center",
            annotation_clip=False,
            arrowprops={
                "arrowstyle": "-",
                "color": line.get_color(),
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


def _apart(heights: Sequence[float], gap: float) -> list[float]:
    """Moves ascending heights at least `gap` apart, and below 1 as far as they fit."""
    moved: list[float] = []
    for height in heights:
        moved.append(max(height, moved[-1] + gap) if moved else height)
    ceiling = 1.0
    for index in reversed(range(len(moved))):
        moved[index] = min(moved[index], ceiling)
        ceiling = moved[index] - gap
    return moved


def _finite(table: Table) -> Table:
    """Infinite values have no place on an axis: as NaN they leave a gap in the line."""
    return table.replace([np.inf, -np.inf], np.nan)


def _has_finite(table: pd.DataFrame | pd.Series) -> bool:
    return bool(np.isfinite(table.to_numpy(dtype=float)).any())


def _points(table: pd.DataFrame, head: Head) -> pd.Series:
    """A head's points; its line spans the steps at which only other heads were measured."""
    return _finite(cast(pd.Series, table[head]).dropna())


def _smooth(series: pd.Series) -> pd.Series:
    """Running median, centred; short series are left as they are."""
    if len(series) < 4 * MEDIAN_WINDOW:
        return series
    median = series.rolling(MEDIAN_WINDOW, center=True, min_periods=1).median()
    return cast(pd.Series, median.where(series.notna()))


def _scale(axes: Axes, values: np.ndarray) -> str:
    """Sets a log axis where positive values span a wide range; returns what the label adds."""
    measured = values[np.isfinite(values)]
    low, high = float(measured.min()), float(measured.max())
    if low <= 0 or high / low <= LOG_FROM_RATIO:
        axes.yaxis.set_major_formatter(FuncFormatter(_plain))
        return ""
    axes.set_yscale("log")
    _log_ticks(axes.yaxis, high / low)
    return ", log scale"


def _log_ticks(axis: Any, ratio: float) -> None:
    subs = (
        (1.0,) if ratio > 1e3 else (1.0, 2.0, 5.0) if ratio > 20 else (1.0, 1.5, 2.0, 3.0, 5.0, 7.0)
    )
    axis.set_major_locator(LogLocator(subs=subs))
    axis.set_major_formatter(FuncFormatter(_plain))
    axis.set_minor_formatter(NullFormatter())


def _plain(value: float, _position: int | None = None) -> str:
    if value == 0 or 1e-3 <= abs(value) < 1e7:
        return f"{value:,.10g}"
    return f"{value:.0e}"


def _edges(centres: np.ndarray) -> np.ndarray:
    """Cell borders half way between neighbouring steps, which need not be evenly spaced."""
    if len(centres) == 1:
        return centres[0] + np.array([-0.5, 0.5])
    middles = (centres[1:] + centres[:-1]) / 2
    return np.concatenate([[centres[0]], middles, [centres[-1]]])


CHARTS: tuple[Chart, ...] = (
    Chart(
        "loss",
        "Loss and gradient norm",
        f"Grey: every recorded step; blue: running median of {MEDIAN_WINDOW}. Look for a loss "
        "that leaves its trend after the first alarm: the alarm should come well before it.",
        ("loss", "grad_norm"),
        loss_and_gradient,
    ),
    Chart(
        "w_q_spectral_norm_layers",
        "W_Q spectral norm by layer",
        "Look for a single row that turns bright while its neighbours stay dark: the failure "
        "starts in one layer (paper, figure 11).",
        ("w_q_spectral_norm",),
        spectral_norm_by_layer,
    ),
    Chart(
        "w_q_spectral_norm_heads",
        "W_Q spectral norm by head",
        "Look for one head that leaves the bundle of its layer (paper, figure 3).",
        ("w_q_spectral_norm",),
        spectral_norm_of_heads,
    ),
    Chart(
        "max_logit",
        "Max logit",
        "Large scores are healthy: look for a jump by a factor of ten within a few hundred steps, "
        "not for a level.",
        ("max_logit",),
        max_logit,
    ),
    Chart(
        "multiple_maxima",
        "Multiple maxima, FP32 scores",
        "Look for a share that rises before the loss does (paper, figure 13); exact ties are rare "
        "in FP32.",
        ("multiple_maxima",),
        multiple_maxima,
    ),
    Chart(
        "multiple_maxima_bf16",
        "Multiple maxima, BF16-rounded scores",
        "The paper's own count (figure 13): look for heads that climb towards 100 % and stay; "
        "not to be compared with the share in FP32.",
        ("multiple_maxima_bf16",),
        multiple_maxima_bf16,
    ),
    Chart(
        "delta_bias_cumulative",
        "Cumulative delta bias",
        "Errors that cancel wander around zero; look for a head that moves away to one side and "
        "keeps going (paper, figure 5a).",
        ("delta_bias_cumulative",),
        delta_bias,
    ),
)
