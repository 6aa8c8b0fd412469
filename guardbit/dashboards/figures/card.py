"""A card to share: what became of a run, in 1,200 x 630 pixels."""

from __future__ import annotations

import textwrap
from typing import cast

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

from guardbit.dashboards import marks, ranking, tables
from guardbit.dashboards.figures.lines import draw_heads, styles_of
from guardbit.dashboards.figures.maps import draw_cells, known_at
from guardbit.dashboards.figures.scales import (
    end_at_departure,
    finite,
    has_finite,
    plain,
    scale,
    smooth,
)
from guardbit.dashboards.figures.style import ShownFigure, styled
from guardbit.dashboards.names import fitted
from guardbit.dashboards.outcome import Outcome, facts, limits, outcome_of, what_became
from guardbit.dashboards.palette import CONTEXT, INK, OUTCOME_COLOURS

#: Inches and dots an inch: 1,200 x 630 pixels, which pages show of a link to them.
SIZE, DPI = (12.0, 6.3), 100
QUIET = "#626a76"
#: Characters in a line of the headline and of the facts; lines of each.
HEADLINE_WIDTH, FACTS_WIDTH, MOST_LINES = 56, 120, 2
#: Left, bottom, width and height in parts of the card.
LOSS, LOGITS, MAP = (0.075, 0.415, 0.5, 0.2), (0.075, 0.12, 0.5, 0.22), (0.665, 0.12, 0.29, 0.495)


@styled
def card(
    frame: pd.DataFrame,
    events: pd.DataFrame | None = None,
    name: str = "",
    outcome: Outcome | None = None,
) -> Figure | None:
    """Outcome, loss, largest logits and the model map at the first alarm, to be shared as it is.

    Args:
        frame: The samples.
        events: The events.
        name: Of the run.
        outcome: What became of the run; None to derive it from samples and events alone.

    Returns:
        A figure of 1,200 x 630 pixels; None where no head was measured.
    """
    frame = tables.check_samples(frame)
    if frame.empty or not has_finite(ranking.excess(frame)["excess"]):
        return None
    figure = ShownFigure(figsize=SIZE, dpi=DPI)
    _write(figure, outcome or outcome_of(frame, events), name)
    loss = finite(tables.of_run(frame, "loss"))
    logits = finite(tables.by_head(frame, "max_logit").mask(lambda values: values <= 0))
    if has_finite(loss):
        _draw_loss(_axes(figure, LOSS, "training loss"), loss, frame, events)
    if has_finite(logits):
        _draw_logits(_axes(figure, LOGITS, "max logit"), logits, frame, events)
    _draw_map(figure, frame, events)
    return figure


def _write(figure: Figure, outcome: Outcome, name: str) -> None:
    figure.text(0.045, 0.925, "GuardBit", weight="bold", fontsize=13, color="#b84a00")
    (short,) = fitted([name])
    figure.text(0.955, 0.925, short, ha="right", fontsize=12, color=QUIET)
    lines = textwrap.wrap(what_became(outcome), HEADLINE_WIDTH)[:MOST_LINES]
    height = 0.895 if len(lines) > 1 else 0.865
    figure.text(0.045, height, "●", fontsize=19, va="top", color=OUTCOME_COLOURS[outcome.kind])
    figure.text(
        0.075, height, "\n".join(lines), fontsize=22, weight="bold", va="top", linespacing=1.15
    )
    told = textwrap.wrap(" · ".join([*limits(outcome), *facts(outcome)]), FACTS_WIDTH)[:MOST_LINES]
    figure.text(0.075, 0.735, "\n".join(told), fontsize=11.5, va="top", color=QUIET)


def _axes(figure: Figure, place: tuple[float, float, float, float], title: str) -> Axes:
    axes = figure.add_axes(place)
    axes.set_title(title, fontsize=11, weight="normal", pad=4)
    axes.yaxis.set_major_locator(MaxNLocator(3))
    return axes


def _draw_loss(
    axes: Axes, loss: pd.Series, frame: pd.DataFrame, events: pd.DataFrame | None
) -> None:
    axes.plot(loss, color=CONTEXT, alpha=0.45, linewidth=0.8)
    axes.plot(smooth(loss), color=INK, linewidth=1.5)
    later = cast(np.ndarray, loss.iloc[len(loss) // 10 :].dropna().to_numpy())
    if later.size and later.min() < later.max():
        margin = 0.06 * float(later.max() - later.min())
        axes.set_ylim(float(later.min()) - margin, float(later.max()) + margin)
    for mark, step in _mark(axes, frame, events).items():
        # An alarm and the switch that it causes share a step.
        is_switch = mark == "switch"
        axes.annotate(
            "switched" if is_switch else "first alarm",
            (step, 1),
            (5 if is_switch else -5, -2),
            xycoords=axes.get_xaxis_transform(),
            textcoords="offset points",
            ha="left" if is_switch else "right",
            va="top",
            fontsize=9.5,
        )
    axes.tick_params(labelbottom=False)


def _draw_logits(
    axes: Axes, logits: pd.DataFrame, frame: pd.DataFrame, events: pd.DataFrame | None
) -> None:
    story = ranking.heads_of_story(frame, events)
    named = draw_heads(axes, logits, styles_of(story, story))
    scale(axes, logits.to_numpy())
    end_at_departure(axes, logits, frame, events)
    _mark(axes, frame, events)
    axes.set_xlabel("optimizer step")
    axes.legend(
        handles=named,
        loc="lower right",
        bbox_to_anchor=(1.01, 0.99),
        ncols=len(named),
        fontsize=9,
        handlelength=1.6,
        columnspacing=1.2,
        borderpad=0,
    )


def _mark(axes: Axes, frame: pd.DataFrame, events: pd.DataFrame | None) -> dict[marks.Mark, int]:
    """Draws a line at the first alarm and the first switch; returns their steps."""
    first, last = tables.steps(frame)
    axes.set_xlim(first, max(last, first + 1))
    axes.xaxis.set_major_locator(MaxNLocator(6, steps=[1, 2, 2.5, 5, 10], integer=True))
    axes.xaxis.set_major_formatter(FuncFormatter(plain))
    steps: dict[marks.Mark, int] = {}
    styles: tuple[tuple[marks.Mark, str], ...] = (("alarm", "--"), ("switch", "-"))
    for mark, style in styles:
        for step in marks.marked_steps(events, mark)[:1]:
            axes.axvline(step, color=INK, linewidth=1.1, linestyle=style)
            steps[mark] = step
    return steps


def _draw_map(figure: Figure, frame: pd.DataFrame, events: pd.DataFrame | None) -> None:
    first = marks.first_events(frame, events, "alarm")
    at = min((event.step for event in first.values()), default=tables.steps(frame)[1])
    cells, alarmed, stabilized = known_at(frame, events, at)
    axes = figure.add_axes(MAP)
    _, key = draw_cells(axes, cells, alarmed, stabilized)
    what = "the first alarm" if first else "the end"
    axes.set_title(f"all heads at {what}, step {at:,}", fontsize=11, weight="normal", pad=4)
    axes.set_ylabel("layer")
    axes.set_xlabel("head")
    if key:
        axes.legend(
            handles=key,
            loc="upper right",
            bbox_to_anchor=(1.01, -0.13),
            ncols=2,
            fontsize=9,
            handlelength=1,
            columnspacing=1.2,
            borderpad=0,
        )
