"""Rows with more than one maximum over the loss; the paper's figure 13."""

from __future__ import annotations

import pandas as pd
from matplotlib.figure import Figure

from guardbit.dashboards import ranking, tables
from guardbit.dashboards.figures.lines import draw_heads, styles_of
from guardbit.dashboards.figures.scales import finite, has_finite, scale, smooth
from guardbit.dashboards.figures.style import LEFT, LEGEND, WIDTH, canvas, finish, styled
from guardbit.dashboards.palette import INK


def multiple_maxima(frame: pd.DataFrame, events: pd.DataFrame | None = None) -> Figure | None:
    """Share of rows with more than one maximum over the loss, FP32 scores; the paper's figure 13.

    The twin of `multiple_maxima_bf16`; the two never share an axis, as they measure different
    things under similar names.
    """
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
