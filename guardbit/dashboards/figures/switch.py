"""Before and after a switch: what it did to the heads that were switched, and to the run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from guardbit.dashboards.figures import style
from guardbit.dashboards.palette import HIGHLIGHTS, INK
from guardbit.dashboards.tables import Head, Recorded, of_heads

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
NUMBERS_HEIGHT = max(height for *_, height in style.MARK_STYLES.values()) + 0.08
#: So that the numbers stand nearer to their own panel than to the one above.
BETWEEN_PANELS = 0.65


@style.of_tables
def before_and_after(run: Recorded) -> Figure | None:
    """The switched heads' indicators and the loss around the first switch."""
    switched = run.first("switch")
    if not switched:
        return None
    step = min(event.step for event in switched.values())
    heads = _worst_first(run, [at for at, event in switched.items() if event.step == step], step)
    first, last = _window(run, step)
    panels: list[tuple[str, pd.DataFrame]] = []
    for indicator, label in SWITCH_PANELS:
        is_loss = indicator == "loss"  # whose samples are too noisy for one to tell anything
        table = run.of_run(indicator).to_frame() if is_loss else run.by_head(indicator)
        table = cast(pd.DataFrame, style.finite(table.loc[first:last]))
        if not is_loss:
            table = cast(pd.DataFrame, table[[head for head in heads if head in table.columns]])
        if style.has_finite(table):
            panels.append((label, table))
    if not panels:
        return None
    figure, all_axes = style.canvas(
        f"Before and after the switch at step {step:,}",
        len(panels),
        panel_height=LOW_PANEL,
        between=BETWEEN_PANELS,
    )
    for axes, (label, table) in zip(all_axes, panels, strict=True):
        if label == "loss":
            loss = style.smooth(table.iloc[:, 0])
            axes.plot(loss, color=INK, linewidth=1.1, label="loss", gid=style.NAMED)
        else:
            style.draw_heads(axes, run, table, style.styles_of(run.story, heads))
        axes.set_ylabel(label + style.scale(axes, table.to_numpy()).removesuffix(" scale"))
        axes.margins(y=0.2)
        if label != "loss":
            _draw_change(axes, table.iloc[:, 0].dropna(), step)
    style.finish(all_axes, run, (first, last))
    for axes in all_axes:
        style.label_ends(axes)
    return figure


def _worst_first(run: Recorded, heads: Sequence[Head], step: int) -> list[Head]:
    """The heads that are drawn: those with an alarm by then, then the farthest above baseline."""
    excess = dict(np.ndenumerate(run.excess(run.history.bucket_of(step))[0]))
    others = sorted(heads, key=lambda head: -np.nan_to_num(excess.get(head, 0.0)))
    alarmed = [head for head in run.first("alarm", until=step) if head in heads]
    return list(dict.fromkeys([*alarmed, *others]))[: len(HIGHLIGHTS)]


def _window(run: Recorded, step: int) -> tuple[int, int]:
    """The steps of at most `SAMPLES_AROUND` samples of heads on either side."""
    steps = np.unique(of_heads(run.samples)["step"].to_numpy())
    before, after = steps[steps <= step][-SAMPLES_AROUND:], steps[steps > step][:SAMPLES_AROUND]
    around = np.concatenate([before, after])
    return int(around[0]), int(around[-1])


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
