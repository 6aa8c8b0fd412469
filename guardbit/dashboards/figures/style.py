"""One style for all figures: canvas, lines of heads, marks of events, scales and ticks.

No pyplot, hence no global state: the figures show in a notebook and nowhere else by themselves.
"""

import io
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar, cast

import matplotlib
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter
from matplotlib.transforms import ScaledTranslation, Transform

from guardbit.dashboards.palette import CONTEXT, HEAT_STOPS, HIGHLIGHTS, INK, OUTCOME_COLOURS, PAPER
from guardbit.dashboards.tables import Head, Recorded, marked

HEAT = LinearSegmentedColormap.from_list("guardbit-heat", HEAT_STOPS)

#: The mark of the step at which the loss diverged, as the key calls it.
DIVERGED = "loss diverged"
#: Marker, line style and colour of each mark, which are never taken for data, and its height in
#: inches above the panel: an alarm and the switch it causes share a step.
MARK_STYLES: dict[str, tuple[str, str, str, float]] = {
    "alarm": ("v", "--", INK, 0.06),
    "switch": ("D", "-", INK, 0.185),
    "undo": ("D", ":", INK, 0.185),
    DIVERGED: ("X", "-", OUTCOME_COLOURS["lost"], 0.185),
}
KEY_HEIGHT = 0.3
#: Beyond this many, vertical lines would hide the data: only the first keeps its line.
MOST_LINES = 6

#: Inches: 1,000 pixels at 100 dots an inch; 10 points are then 14 pixels.
WIDTH = 10.0
PANEL_HEIGHT = 3.0
#: Above, below and between panels.
AROUND, BETWEEN = 1.5, 0.45

#: Marks the lines that a legend names.
NAMED = "named"

STYLE: Any = {
    "font.family": "DejaVu Sans",
    "font.size": 10,
    # What a run or a site is called is no formula, whatever dollar signs it has.
    "text.parse_math": False,
    "axes.titlesize": 12.5,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.linewidth": 0.7,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "axes.axisbelow": True,
    "grid.alpha": 0.12,
    "grid.linewidth": 0.7,
    "text.color": INK,
    **dict.fromkeys(("axes.labelcolor", "axes.edgecolor", "grid.color"), INK),
    **dict.fromkeys(("xtick.color", "ytick.color"), INK),
    "lines.linewidth": 1.8,
    "legend.frameon": False,
    "legend.fontsize": 9.5,
    "figure.facecolor": PAPER,
    "figure.dpi": 100,
    "savefig.dpi": 150,
}


#: Decorates what draws in the style, and leaves the caller's own settings as they are.
styled = matplotlib.rc_context(STYLE)


class ShownFigure(Figure):
    """A figure that a notebook shows, with `%matplotlib inline` or without."""

    def _repr_png_(self) -> bytes:
        buffer = io.BytesIO()
        self.savefig(buffer, format="png", dpi=STYLE["figure.dpi"])
        return buffer.getvalue()


def canvas(
    title: str, panels: int = 1, panel_height: float = PANEL_HEIGHT
) -> tuple[Figure, list[Axes]]:
    """Panels one above the other that share their steps; lengths in inches."""
    height = AROUND + panels * panel_height + (panels - 1) * BETWEEN
    figure = ShownFigure(figsize=(WIDTH, height), layout="constrained")
    grid = figure.subplots(panels, 1, sharex=True, squeeze=False)
    grid[0, 0].set_title(textwrap.fill(title, 80), pad=40)
    return figure, list(grid[:, 0])


def finish(all_axes: Sequence[Axes], run: Recorded) -> None:
    """Sets the range of steps, and marks the run's events."""
    first, last = run.steps
    set_steps(all_axes[-1], first, last)
    found: list[tuple[int, str]] = [(event.step, mark) for event, mark in marked(run.events)]
    if run.departed is not None:
        found.append((run.departed, DIVERGED))
    shown = {
        mark: sorted({at for at, of in found if of == mark and first <= at <= last})
        for mark in MARK_STYLES
    }
    keys = [_mark_events(axes, shown) for axes in all_axes]
    if keys[0]:
        place_key(all_axes[0], keys[0])


def set_steps(axes: Axes, first: int, last: int) -> None:
    axes.set_xlim(first, max(last, first + 1))
    axes.set_xlabel("optimizer step")
    axes.xaxis.set_major_locator(MaxNLocator(8, steps=[1, 2, 2.5, 5, 10], integer=True))
    axes.xaxis.set_major_formatter(FuncFormatter(plain))


def place_key(axes: Axes, key: Sequence[Line2D]) -> None:
    axes.legend(
        handles=list(key),
        loc="lower left",
        bbox_to_anchor=(0, 1),
        bbox_transform=above(axes, KEY_HEIGHT, axes.transAxes),
        ncols=len(key),
        handlelength=0.8,
        handletextpad=0.5,
        borderpad=0,
        borderaxespad=0,
    )


def name_lines(figure: Figure, lines: Sequence[Line2D]) -> None:
    if lines:
        figure.legend(handles=list(lines), loc="outside right center", handlelength=2.6)


def above(axes: Axes, inches: float, places: Transform | None = None) -> Transform:
    """Steps, and parts of the panel's height, raised by inches."""
    raised = ScaledTranslation(0, inches, axes.figure.dpi_scale_trans)
    return (places or axes.get_xaxis_transform()) + raised


def _mark_events(axes: Axes, shown: Mapping[str, Sequence[int]]) -> list[Line2D]:
    """Draws a line at each step and a marker above it; returns the markers, one line a kind."""
    markers: list[Line2D] = []
    for mark, steps in shown.items():
        marker, line_style, colour, height = MARK_STYLES[mark]
        for step in steps if len(steps) <= MOST_LINES else steps[:1]:
            axes.axvline(
                step, color=colour, linestyle=line_style, linewidth=1.0, zorder=1.2, gid=mark
            )
        if steps:
            markers += axes.plot(
                steps,
                [1] * len(steps),
                transform=above(axes, height),
                linestyle="none",
                marker=marker,
                markersize=5.5,
                color=colour,
                markerfacecolor=PAPER if mark == "undo" else colour,
                clip_on=False,
                label=f"{mark}, {'first at ' * (len(steps) > 1)}step {steps[0]:,}",
                gid=f"{mark}-markers",
            )
    return markers


def pixels(figure: Figure) -> np.ndarray:
    """The figure as it looks on a screen, uint8 (height, width, 3)."""
    drawn = FigureCanvasAgg(figure)
    drawn.draw()
    return np.asarray(drawn.buffer_rgba())[..., :3].copy()


Table = TypeVar("Table", pd.DataFrame, pd.Series)

#: Loss and the like span a decade at the start of a run; below this ratio a log axis lacks ticks.
LOG_FROM_RATIO = 4.0

#: Samples in the running median laid over loss and gradient norm, which are noisy by batch.
MEDIAN_WINDOW = 25


def finite(table: Table) -> Table:
    """Replaces infinite values by NaN, so that they leave a gap in the line."""
    return table.where(~np.isinf(table))  # `replace` takes longer the more other heads there are


def has_finite(table: pd.DataFrame | pd.Series) -> bool:
    return bool(np.isfinite(table.to_numpy(dtype=float)).any())


def smooth(series: pd.Series, longest: int = 0) -> pd.Series:
    """Running median, centred; series are left as they are if all that are compared are short."""
    if max(len(series), longest) < 4 * MEDIAN_WINDOW:
        return series
    median = series.rolling(MEDIAN_WINDOW, center=True, min_periods=1).median()
    return cast(pd.Series, median.where(series.notna()))


def scale(axes: Axes, values: np.ndarray) -> str:
    """Sets a log axis where positive values span a wide range; returns what the label adds."""
    measured = values[np.isfinite(values)]
    low, high = float(measured.min()), float(measured.max())
    if low <= 0 or high / low <= LOG_FROM_RATIO:
        axes.yaxis.set_major_formatter(FuncFormatter(plain))
        return ""
    axes.set_yscale("log")
    log_ticks(axes.yaxis, high / low)
    return ", log scale"


def end_at_departure(axes: Axes, table: pd.DataFrame, departed: int | None) -> None:
    """Limits an axis to the values before the loss diverged; later ones leave the panel."""
    until = table.loc[:departed].to_numpy(dtype=float)
    until = until[np.isfinite(until)]
    if departed is None or not until.size:
        return
    fit(axes, until)
    if axes.get_yscale() != "log" and until.min() >= 0:
        axes.set_ylim(bottom=0)


def fit(axes: Axes, values: np.ndarray) -> None:
    """Limits an axis to values, with a margin and ticks as its scale needs them."""
    low, high = float(values.min()), float(values.max())
    if axes.get_yscale() == "log":
        log_ticks(axes.yaxis, high / low)
        margin = float(np.clip((high / low) ** 0.06, 1.01, 1.2))
        axes.set_ylim(low / margin, high * margin)
    else:
        margin = 0.06 * (high - low) or 1.0  # an axis needs a height
        axes.set_ylim(low - margin, high + margin)


def log_ticks(axis: Any, ratio: float) -> None:
    """Sets ticks at round numbers, as many as fit the range."""
    subs = (1.0,) if ratio > 1e3 else (1.0, 3.0) if ratio > 100 else (1.0, 2.0, 5.0)
    if ratio < 20:
        subs = (1.0, 1.5, 2.0, 3.0, 5.0, 7.0)
    axis.set_major_locator(LogLocator(subs=subs))
    axis.set_major_formatter(FuncFormatter(plain))
    axis.set_minor_formatter(NullFormatter())


def plain(value: float, _position: int | None = None) -> str:
    """A number as a tick shows it."""
    if value == 0 or 1e-3 <= abs(value) < 1e6 or not np.isfinite(value):
        return f"{value:,.10g}"
    mantissa, exponent = f"{value:.6e}".split("e")
    return f"{float(mantissa):g}e{int(exponent)}"


def edges(centres: np.ndarray) -> np.ndarray:
    """Cell borders half way between neighbouring steps, which need not be evenly spaced."""
    if len(centres) == 1:
        return centres[0] + np.array([-0.5, 0.5])
    return np.concatenate([[centres[0]], (centres[1:] + centres[:-1]) / 2, [centres[-1]]])


# --- lines of heads: grey for all, coloured and named for the few that matter ---------------------


def styles_of(story: Sequence[Head], notable: Sequence[Head]) -> dict[Head, tuple[str, str]]:
    """Colour and line style of notable heads: in all figures of a run a colour is one head."""
    colours = dict(zip(story, HIGHLIGHTS, strict=False))
    return {head: colours.get(head, (INK, ":")) for head in notable}


def draw_heads(
    axes: Axes, run: Recorded, table: pd.DataFrame, notable: Mapping[Head, tuple[str, str]]
) -> list[Line2D]:
    """A grey line for every head, and one on top that stands out for the notable ones."""
    # A head's line spans the steps at which only other heads were measured.
    lines = {head: finite(cast(pd.Series, table[head]).dropna()) for head in table.columns}
    lines = {head: line for head, line in lines.items() if has_finite(line)}
    others = [head for head in lines if head not in notable]
    # Hundreds of lines are a texture, in which a single one must still be seen.
    alpha = float(np.clip(12 / max(len(others), 1), 0.08, 0.4))
    # An underscore keeps a line out of legends; rasterized, hundreds of lines stay a small file.
    grey: Any = {"color": CONTEXT, "alpha": alpha, "linewidth": 0.9, "rasterized": True}
    for head in others:
        axes.plot(lines[head], **grey, label=f"_{run.label(head)}")
    return [
        axes.plot(lines[at], color=colour, linestyle=dashes, gid=NAMED, label=run.label(at))[0]
        for at, (colour, dashes) in notable.items()
        if at in lines
    ]
