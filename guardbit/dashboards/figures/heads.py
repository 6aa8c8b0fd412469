"""One indicator of every head, such as its spectral norm, and the diagnosis of one head."""

from collections.abc import Mapping, Sequence

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter

from guardbit.dashboards.figures import style
from guardbit.dashboards.palette import CONTEXT, HIGHLIGHTS, INK
from guardbit.dashboards.tables import Recorded
from guardbit.records import from_zero

_PANEL = 2.7  # inches
_LEAST = 1e-5  # the part below which nothing can be told apart
_ORANGE, _BLUE, _ = (colour for colour, _ in HIGHLIGHTS)


def _draw(
    run: Recorded,
    table: pd.DataFrame,
    title: str,
    label: str,
    *,
    is_log: bool = False,
    smallest: bool = False,
    loss: pd.Series | None = None,
) -> Figure | None:
    """A line for every head; those of the story and the figure's own extreme stand out."""
    if not style.has_finite(table):
        return None
    figure, (axes,) = style.canvas(title)
    notable = run.notable(table, smallest=smallest)
    named = style.draw_heads(axes, run, table, style.styles_of(run.story, notable))
    if is_log:
        label += style.scale(axes, table.to_numpy())
    else:
        axes.yaxis.set_major_formatter(FuncFormatter(style.plain))
        if (table < 0).to_numpy().any():
            axes.axhline(0, color=INK, linewidth=0.9)
        else:
            axes.set_ylim(bottom=0)
    axes.set_ylabel(label)
    style.end_at_departure(axes, table, run.departed)
    if loss is not None:
        named += _draw_loss(axes, loss)
    style.finish([axes], run)
    style.name_lines(figure, named)
    return figure


@style.styled
def spectral_norm_of_heads(run: Recorded, layer: int | None = None) -> Figure | None:
    """W_Q spectral norm of all heads of one layer over steps; the paper's figure 3."""
    table = run.by_head("w_q_spectral_norm")
    if layer is None:
        layer = next((at for at, _ in [*run.story, *run.notable(table)]), 0)
    layer = from_zero(layer, "layer")
    table = table.loc[:, table.columns.get_level_values("layer") == layer]
    title = f"W_Q spectral norm of layer {layer}" + ", every head" * (len(table.columns) > 1)
    return _draw(run, table, title, "largest singular value")


@style.styled
def max_logit(run: Recorded) -> Figure | None:
    """Largest attention score of every head over steps, after scaling, on a log axis."""
    table = run.by_head("max_logit")
    table = table.mask(table <= 0, np.inf)
    return _draw(run, table, "Max logit of every head", "largest logit", is_log=True)


@style.styled
def attention_entropy(run: Recorded) -> Figure | None:
    """Mean entropy of the attention rows of every head over steps, in nats."""
    table = run.by_head("attention_entropy")
    title, label = "Attention entropy of every head", "mean entropy of a row (nats)"
    return _draw(run, table, title, label, smallest=True)


@style.styled
def multiple_maxima(run: Recorded) -> Figure | None:
    """Share of rows with several FP32 maxima over the loss; the paper's figure 13."""
    return _maxima_over_loss(run, "multiple_maxima", "FP32 scores")


@style.styled
def multiple_maxima_bf16(run: Recorded) -> Figure | None:
    """The same as `multiple_maxima` with the scores rounded to BF16, as in the paper's code."""
    return _maxima_over_loss(run, "multiple_maxima_bf16", "BF16-rounded scores")


def _maxima_over_loss(run: Recorded, indicator: str, scores: str) -> Figure | None:
    table = 100 * run.by_head(indicator)
    title = f"Multiple maxima ({scores}) over the loss"
    label = "rows with more than one\nmaximum (% of rows)"
    return _draw(run, table, title, label, loss=style.finite(run.of_run("loss")))


def _draw_loss(axes: Axes, loss: pd.Series) -> list[Line2D]:
    if not style.has_finite(loss):
        return []
    twin = axes.twinx()
    twin.spines["right"].set_visible(True)
    twin.grid(False)
    twin.set_ylabel("training loss" + style.scale(twin, loss.to_numpy()))
    return twin.plot(style.smooth(loss), color=INK, linewidth=1.1, label="loss (right)")


@style.styled
def delta_bias(run: Recorded) -> Figure | None:
    """Cumulative delta bias of every head over steps, with its sign; the paper's figure 5(a)."""
    table = run.by_head("delta_bias_cumulative")
    title = "Cumulative delta bias of every head"
    return _draw(run, table, title, "sum of δ_lp − δ_hp\nover the sampled steps")


@style.styled
def head_diagnosis(title: str, left: Mapping[str, float], row_push: Sequence[float]) -> Figure:
    """What each operation and remedy leaves, and which rows push."""
    figure = Figure(figsize=(style.WIDTH, 2 * _PANEL + 1.2), layout="constrained")
    parts, rows = figure.subplots(2, 1, height_ratios=[1.4, 1])
    figure.suptitle(title, x=0.01, ha="left", fontweight="bold")
    values, places = np.maximum(list(left.values()), _LEAST), np.arange(len(left))[::-1]
    parts.barh(places, values, height=0.6, color=_BLUE, gid="left")
    parts.set_yticks(places, list(left))
    parts.set_xscale("log")
    parts.set_xlim(_LEAST, max(2.0, values.max() * 1.2))
    parts.axvline(1, color=INK, linewidth=0.8)
    parts.grid(visible=False, axis="y")
    parts.set_title("What is left of the summed error of dQ, as a part of it", fontweight="normal")
    rows.plot(np.cumsum(np.asarray(row_push)), color=_ORANGE, gid="rows")
    climb = "Pushes of the rows on W_Q, added up: a straight climb is a bias, a walk is noise"
    rows.set_title(climb, fontweight="normal")
    rows.set(xlabel="row, sequences one after the other", ylabel="push")
    rows.axhline(0, color=CONTEXT, linewidth=0.8)
    rows.margins(x=0.01)
    return figure
