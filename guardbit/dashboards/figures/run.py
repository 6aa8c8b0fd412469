"""Curves of whole runs: loss and gradient norm of one, and several runs over one another."""

from __future__ import annotations

from collections.abc import Mapping

import pandas as pd
from matplotlib.figure import Figure

from guardbit.dashboards import tables
from guardbit.dashboards.figures.lines import NAMED
from guardbit.dashboards.figures.scales import finite, has_finite, scale, smooth
from guardbit.dashboards.figures.style import KEY_HEIGHT, above, canvas, finish, styled
from guardbit.dashboards.names import fitted
from guardbit.dashboards.palette import CONTEXT, HIGHLIGHTS, INK

#: The runs' colours and line styles; `runs_over_steps` refuses more runs than these.
RUN_LINES: tuple[tuple[str, str], ...] = (*HIGHLIGHTS, (INK, ":"))


@styled
def loss_and_gradient(frame: pd.DataFrame, events: pd.DataFrame | None = None) -> Figure | None:
    """Training loss and gradient norm over steps, each with its running median."""
    panels = {
        label: series
        for label, name in (("training loss", "loss"), ("gradient norm", "grad_norm"))
        if has_finite(series := finite(tables.of_run(frame, name)))
    }
    if not panels:
        return None
    figure, all_axes = canvas(" and ".join(panels).capitalize(), len(panels))
    for axes, (label, series) in zip(all_axes, panels.items(), strict=True):
        axes.plot(series, color=CONTEXT, alpha=0.45, linewidth=0.8, rasterized=True)
        axes.plot(smooth(series), color=HIGHLIGHTS[1][0], label=label)
        axes.set_ylabel(label + scale(axes, series.to_numpy()))
    finish(all_axes, frame, events)
    return figure


@styled
def runs_over_steps(
    runs: Mapping[str, pd.DataFrame], indicator: str, title: str, label: str
) -> Figure | None:
    """One indicator of several runs over the same steps.

    Args:
        runs: Name of each run -> its samples; at most four.
        indicator: Of the whole run, drawn as its running median; or of heads, of which each run's
            largest magnitude is drawn.
        title: Of the figure.
        label: Of its axis.

    Raises:
        ValueError: There are more runs than lines that can be distinguished.
    """
    if len(runs) > len(RUN_LINES):
        raise ValueError(
            f"At most {len(RUN_LINES)} runs can be distinguished in one figure, got {len(runs)}."
        )
    series = {name: finite(of_run_or_worst_head(frame, indicator)) for name, frame in runs.items()}
    series = {name: values for name, values in series.items() if has_finite(values)}
    if not series:
        return None
    figure, (axes,) = canvas(title)
    colours = dict(zip(runs, RUN_LINES, strict=False))
    for short, (name, values) in zip(fitted(list(series)), series.items(), strict=True):
        colour, line_style = colours[name]
        axes.plot(values, color=colour, linestyle=line_style, label=short, gid=NAMED)
    axes.set_ylabel(label + scale(axes, pd.concat(list(series.values())).to_numpy()))
    finish([axes], pd.concat(list(runs.values()), ignore_index=True), None)
    # Not at the ends of the lines: runs end at different steps and have long names.
    axes.legend(
        loc="lower left",
        bbox_to_anchor=(0, above(axes, KEY_HEIGHT)),
        ncols=len(series),
        handlelength=2.6,
        borderpad=0,
        borderaxespad=0,
    )
    return figure


def of_run_or_worst_head(frame: pd.DataFrame, indicator: str) -> pd.Series:
    """An indicator of the run as its running median, of heads the largest magnitude, by step."""
    series = tables.of_run(frame, indicator)
    return smooth(series) if len(series) else tables.by_head(frame, indicator).abs().max(axis=1)
