"""Before and after a switch: what it did to the heads that were switched, and to the run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from guardbit.dashboards import marks, ranking, tables
from guardbit.dashboards.figures import style
from guardbit.dashboards.palette import HIGHLIGHTS, INK
from guardbit.dashboards.tables import Head

#: What the switch is meant to change, then what it must not harm.
SWITCH_PANELS: tuple[tuple[str, str], ...] = (
    ("delta_bias_abs", "Σ |δ_lp − δ_hp|"),
    ("w_q_spectral_norm", "W_Q norm"),
    ("max_logit", "max logit"),
    ("loss", "loss"),
)
#: Samples shown on either side of the switch.
SAMPLES_AROUND = 40
#: Inches: a panel, and the numbers above it, which clear the marks of events and the curves.
LOW_PANEL = 1.7
NUMBERS_HEIGHT = style.MARK_HEIGHTS["switch"] + 0.08
#: So that the numbers stand nearer to their own panel than to the one above.
BETWEEN_PANELS = 0.65


@style.styled
def before_and_after(frame: pd.DataFrame, events: pd.DataFrame | None = None) -> Figure | None:
    """The switched heads' indicators and the loss around the first switch."""
    switched = marks.first_events(frame, events, "switch")
    if not switched:
        return None
    step = min(event.step for event in switched.values())
    together = [head for head, event in switched.items() if event.step == step]
    heads = _worst_first(frame, events, together, step)[: len(HIGHLIGHTS)]
    styles = style.styles_of(ranking.heads_of_story(frame, events), heads)
    first, last = _window(frame, step)
    panels = {
        indicator: table
        for indicator, _ in SWITCH_PANELS
        if style.has_finite(_of_heads(table := _table(frame, indicator).loc[first:last], heads))
    }
    if not panels:
        return None
    figure, all_axes = style.canvas(
        f"Before and after the switch at step {step:,}",
        len(panels),
        panel_height=LOW_PANEL,
        between=BETWEEN_PANELS,
    )
    for axes, (indicator, table) in zip(all_axes, panels.items(), strict=True):
        shown = _of_heads(table, heads)
        if indicator == "loss":
            loss = style.smooth(shown.iloc[:, 0])
            axes.plot(loss, color=INK, linewidth=1.1, label="loss", gid=style.NAMED)
        else:
            style.draw_heads(axes, table, styles, context=False)
        scale = style.scale(axes, shown.to_numpy()).removesuffix(" scale")
        axes.set_ylabel(dict(SWITCH_PANELS)[indicator] + scale)
        axes.margins(y=0.2)
        if indicator != "loss":  # whose samples are too noisy for one to tell anything
            _draw_change(axes, shown.iloc[:, 0].dropna(), step)
    style.finish(all_axes, frame, events, (first, last))
    for axes in all_axes:
        style.label_ends(axes)
    return figure


def _worst_first(
    frame: pd.DataFrame, events: pd.DataFrame | None, heads: Sequence[Head], step: int
) -> list[Head]:
    alarms = marks.first_events(frame, events, "alarm")
    alarmed = [head for head, event in alarms.items() if event.step <= step and head in heads]
    excess = ranking.excess(frame, events, step).fillna(0.0).to_dict()
    # A switch may name heads without samples, as where a layer has one value only.
    others = [head for head in heads if head not in alarmed]
    return [*alarmed, *sorted(others, key=lambda head: -excess.get(head, 0.0))]


def _window(frame: pd.DataFrame, step: int) -> tuple[int, int]:
    """The steps of at most `SAMPLES_AROUND` samples of heads on either side."""
    samples = tables.check_samples(frame)
    steps = np.unique(samples["step"].to_numpy()[(samples["site"] != "").to_numpy()])
    before, after = steps[steps <= step][-SAMPLES_AROUND:], steps[steps > step][:SAMPLES_AROUND]
    around = np.concatenate([before, after])
    return int(around[0]), int(around[-1])


def _table(frame: pd.DataFrame, indicator: str) -> pd.DataFrame:
    if indicator == "loss":
        return style.finite(tables.of_run(frame, indicator)).to_frame()
    return style.finite(tables.by_head(frame, indicator))


def _of_heads(table: pd.DataFrame, heads: Sequence[Head]) -> pd.DataFrame:
    if not isinstance(table.columns, pd.MultiIndex):
        return table
    return cast(pd.DataFrame, table[[head for head in heads if head in table.columns]])


def _draw_change(axes: Axes, series: pd.Series, step: int) -> None:
    """Draws the last value before the step, dotted, and writes it and the last of all above."""
    # The sample of the switch's own step was measured before the switch took effect.
    before, after = series.loc[:step], series.loc[step + 1 :]
    if len(before):
        steps = before.index[-1], series.index[-1]
        axes.hlines(before.iloc[-1], *steps, color=INK, linewidth=1, linestyle=":", gid="before")
    numbers = [
        style.plain(float(f"{part.iloc[-1]:.3g}")) if len(part) else "–" for part in (before, after)
    ]
    axes.text(
        1,
        style.above(axes, NUMBERS_HEIGHT),
        f"last sample {' → '.join(numbers)}",
        transform=axes.transAxes,
        ha="right",
        fontsize=9,
    )
