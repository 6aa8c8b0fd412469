"""The story of a run in one figure: its loss above, the heads that matter below."""

from __future__ import annotations

from typing import cast

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from guardbit.dashboards import ranking, tables
from guardbit.dashboards.figures.lines import NAMED, draw_heads, label_ends, styles_of
from guardbit.dashboards.figures.scales import end_at_departure, finite, has_finite, scale, smooth
from guardbit.dashboards.figures.style import KEY_HEIGHT, above, canvas, finish, styled
from guardbit.dashboards.outcome import Outcome, limits, outcome_of, what_became
from guardbit.dashboards.palette import CONTEXT, INK

#: What is shown of the heads below the loss, with the labels of the axes.
PANELS = (("w_q_spectral_norm", "W_Q spectral norm"), ("max_logit", "max logit"))
#: Inches.
LOW_PANEL = 1.9


@styled
def story(
    frame: pd.DataFrame, events: pd.DataFrame | None = None, outcome: Outcome | None = None
) -> Figure | None:
    """Loss, and below it norm and logits of the worst heads; its title is the outcome.

    The first heads to alarm stand out, else those farthest above their baseline.

    Args:
        frame: The samples.
        events: The events.
        outcome: What became of the run; None to derive it from these alone.
    """
    loss = finite(tables.of_run(frame, "loss"))
    shown = {
        name: finite(table)
        for name, _ in PANELS
        if has_finite(table := tables.by_head(frame, name).mask(lambda values: values <= 0))
    }
    has_loss = has_finite(loss)
    if not shown:
        return None
    outcome = outcome or outcome_of(frame, events)
    figure, all_axes = canvas(what_became(outcome), has_loss + len(shown), panel_height=LOW_PANEL)
    if has_loss:
        _draw_loss(all_axes[0], loss)
    heads = ranking.heads_of_story(frame, events)
    notable = styles_of(heads, heads)
    for axes, (name, table) in zip(all_axes[has_loss:], shown.items(), strict=True):
        draw_heads(axes, table, notable)
        axes.set_ylabel(dict(PANELS)[name] + scale(axes, table.to_numpy()).removesuffix(" scale"))
        end_at_departure(axes, table, frame, events)
    finish(all_axes, frame, events)
    # Beside the key, in the line below the title.
    all_axes[0].text(
        1,
        above(all_axes[0], KEY_HEIGHT),
        "; ".join(limits(outcome)),
        ha="right",
        transform=all_axes[0].transAxes,
    )
    for axes in all_axes:
        label_ends(axes)
    return figure


def _draw_loss(axes: Axes, loss: pd.Series) -> None:
    axes.plot(loss, color=CONTEXT, alpha=0.45, linewidth=0.8, rasterized=True)
    axes.plot(smooth(loss), color=INK, linewidth=1.4, label="loss", gid=NAMED)
    axes.set_ylabel("training loss" + scale(axes, loss.to_numpy()).removesuffix(" scale"))
    later = cast(np.ndarray, loss.iloc[len(loss) // 10 :].dropna().to_numpy())
    if later.size and later.min() < later.max():
        # The first steps fall from the loss of an untrained model: they need not all be seen.
        low, high = float(later.min()), float(later.max())
        axes.set_ylim(low - 0.05 * (high - low), high + 0.05 * (high - low))
