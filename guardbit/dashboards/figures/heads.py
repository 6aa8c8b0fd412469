"""One indicator of every head: spectral norm, max logit, entropy, maxima, delta bias."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter

from guardbit.dashboards import marks, ranking, tables
from guardbit.dashboards.figures.lines import draw_heads, label_ends, styles_of
from guardbit.dashboards.figures.style import (
    LEFT,
    LEGEND,
    WIDTH,
    canvas,
    end_at_departure,
    finish,
    finite,
    has_finite,
    plain,
    scale,
    smooth,
    styled,
)
from guardbit.dashboards.palette import INK

#: Half width of the band in standard deviations: 95 % of a normal distribution.
BAND = 1.96


@styled
def spectral_norm_of_heads(
    frame: pd.DataFrame, events: pd.DataFrame | None = None, layer: int | None = None
) -> Figure | None:
    """W_Q spectral norm of all heads of one layer over steps; the paper's figure 3."""
    if layer is None:
        layer = next((head[0] for head in marks.first_events(frame, events, "alarm")), None)
    if layer is None:
        layer = ranking.worst_layer(frame)
    samples = tables.check_samples(frame)
    of_layer = cast(pd.DataFrame, samples[samples["layer"] == layer])
    table = tables.by_head(of_layer, "w_q_spectral_norm")
    if not has_finite(table):
        return None
    figure, (axes,) = canvas(
        f"W_Q spectral norm of layer {layer}" + (", every head" if len(table.columns) > 1 else "")
    )
    axes.set_ylabel("largest singular value")
    story = ranking.heads_of_story(frame, events)
    notable = ranking.notable_heads(frame, story, "w_q_spectral_norm", layer=layer)
    draw_heads(axes, table, styles_of(story, notable))
    axes.set_ylim(bottom=0)
    end_at_departure(axes, table, frame, events)
    finish([axes], frame, events)
    label_ends(axes)
    return figure


@styled
def max_logit(frame: pd.DataFrame, events: pd.DataFrame | None = None) -> Figure | None:
    """Largest attention score of every head over steps, after scaling, on a log axis."""
    table = tables.by_head(frame, "max_logit")
    table = table.mask(table <= 0, np.inf)
    if not has_finite(table):
        return None
    figure, (axes,) = canvas("Max logit of every head")
    story = ranking.heads_of_story(frame, events)
    notable = ranking.notable_heads(frame, story, "max_logit")
    draw_heads(axes, table, styles_of(story, notable))
    axes.set_ylabel("largest logit" + scale(axes, table.to_numpy()))
    end_at_departure(axes, table, frame, events)
    finish([axes], frame, events)
    label_ends(axes)
    return figure


@styled
def attention_entropy(frame: pd.DataFrame, events: pd.DataFrame | None = None) -> Figure | None:
    """Mean entropy of the attention rows of every head over steps, in nats."""
    table = tables.by_head(frame, "attention_entropy")
    if not has_finite(table):
        return None
    figure, (axes,) = canvas("Attention entropy of every head")
    story = ranking.heads_of_story(frame, events)
    notable = ranking.notable_heads(frame, story, "attention_entropy", smallest=True)
    draw_heads(axes, table, styles_of(story, notable))
    axes.set_ylabel("mean entropy of a row (nats)")
    axes.set_ylim(bottom=0)
    finish([axes], frame, events)
    label_ends(axes)
    return figure


def multiple_maxima(frame: pd.DataFrame, events: pd.DataFrame | None = None) -> Figure | None:
    """Share of rows with several FP32 maxima over the loss; the paper's figure 13."""
    return _maxima_over_loss(frame, events, "multiple_maxima", "FP32 scores")


def multiple_maxima_bf16(frame: pd.DataFrame, events: pd.DataFrame | None = None) -> Figure | None:
    """The same as `multiple_maxima` with the scores rounded to BF16, as in the paper's code."""
    return _maxima_over_loss(frame, events, "multiple_maxima_bf16", "BF16-rounded scores")


@styled
def _maxima_over_loss(
    frame: pd.DataFrame, events: pd.DataFrame | None, indicator: str, scores: str
) -> Figure | None:
    table = 100 * tables.by_head(frame, indicator)
    if not has_finite(table):
        return None
    figure, (axes,) = canvas(f"Multiple maxima ({scores}) over the loss", below=LEGEND)
    axes.set_ylabel("rows with more than one\nmaximum (% of rows)")
    story = ranking.heads_of_story(frame, events)
    notable = ranking.notable_heads(frame, story, indicator)
    named = draw_heads(axes, table, styles_of(story, notable))
    axes.set_ylim(bottom=0)
    loss = finite(tables.of_run(frame, "loss"))
    if has_finite(loss):
        twin = axes.twinx()
        twin.spines["right"].set_visible(True)
        twin.grid(False)
        (line,) = twin.plot(smooth(loss), color=INK, linewidth=1.1, label="loss (right)")
        named.append(line)
        twin.set_ylabel("training loss" + scale(twin, loss.to_numpy()))
    figure.legend(
        handles=named,
        loc="lower left",
        bbox_to_anchor=(LEFT / WIDTH, 0),
        ncols=len(named),
        handlelength=2.6,
    )
    finish([axes], frame, events)
    return figure


@styled
def delta_bias(frame: pd.DataFrame, events: pd.DataFrame | None = None) -> Figure | None:
    """Cumulative delta bias of every head over steps, with its sign; the paper's figure 5(a)."""
    table = tables.by_head(frame, "delta_bias_cumulative")
    if not has_finite(table):
        return None
    figure, (axes,) = canvas("Cumulative delta bias of every head")
    axes.axhline(0, color=INK, linewidth=0.9)
    axes.set_ylabel("sum of δ_lp − δ_hp\nover the sampled steps")
    story = ranking.heads_of_story(frame, events)
    notable = ranking.notable_heads(frame, story, "delta_bias_cumulative")
    named = draw_heads(axes, table, styles_of(story, notable))
    if named:
        _draw_band(axes, named)
    end_at_departure(axes, table, frame, events)
    axes.yaxis.set_major_formatter(FuncFormatter(plain))
    finish([axes], frame, events)
    label_ends(axes)
    return figure


def _draw_band(axes: Axes, named: Sequence[Line2D]) -> None:
    bands: list[tuple[float, Line2D, np.ndarray, np.ndarray]] = []
    for line in named:
        steps, sums = (np.asarray(data, dtype=float) for data in line.get_data())
        measured = np.isfinite(sums)
        steps, sums = steps[measured], sums[measured]
        width = BAND * np.sqrt(np.cumsum(np.diff(sums, prepend=0.0) ** 2))
        beyond = abs(sums[-1]) / width[-1] if width[-1] > 0 else 0.0
        bands.append((beyond, line, steps, width))
    _, line, steps, width = max(bands, key=lambda band: band[0])
    axes.fill_between(
        steps, -width, width, color=line.get_color(), alpha=0.16, linewidth=0, zorder=1.1
    )
    axes.annotate(
        f"band: 95 % of where the errors of\n{line.get_label()} stay if they cancel",
        xy=(0.012, 0.97),
        xycoords="axes fraction",
        va="top",
        fontsize=9,
    )
