"""Whole runs: the story of one, its loss and gradient norm, and several over one another."""

from collections.abc import Mapping
from typing import cast

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from guardbit.dashboards.figures import style
from guardbit.dashboards.palette import CONTEXT, HIGHLIGHTS, INK
from guardbit.dashboards.tables import Recorded

#: What is shown of the heads below the loss, with the labels of the axes.
STORY_PANELS = (("w_q_spectral_norm", "W_Q spectral norm"), ("max_logit", "max logit"))
LOW_PANEL = 1.9  # inches
#: The runs' colours and line styles; a report refuses more runs than these.
RUN_LINES: tuple[tuple[str, str], ...] = (*HIGHLIGHTS, (INK, ":"))


@style.styled
def story(run: Recorded) -> Figure | None:
    """Loss, and below it norm and logits of the worst heads; its title is the judgement."""
    loss = style.finite(run.of_run("loss"))
    shown = {
        name: style.finite(table)
        for name, _ in STORY_PANELS
        if style.has_finite(table := run.by_head(name).mask(lambda values: values <= 0))
    }
    has_loss = style.has_finite(loss)
    if not shown:
        return None
    panels = has_loss + len(shown)
    figure, all_axes = style.canvas(run.judgement.sentence, panels, panel_height=LOW_PANEL)
    if has_loss:
        _draw_loss(all_axes[0], loss)
    notable, named = style.styles_of(run.story, run.story), {}
    for axes, (name, table) in zip(all_axes[has_loss:], shown.items(), strict=True):
        named |= {line.get_label(): line for line in style.draw_heads(axes, run, table, notable)}
        scale = style.scale(axes, table.to_numpy()).removesuffix(" scale")
        axes.set_ylabel(dict(STORY_PANELS)[name] + scale)
        style.end_at_departure(axes, table, run.departed)
    style.finish(all_axes, run)
    # Beside the key, in the line below the title.
    place = style.above(all_axes[0], style.KEY_HEIGHT, all_axes[0].transAxes)
    limits = "; ".join(run.judgement.limits)
    all_axes[0].text(1, 1, limits, ha="right", transform=place, in_layout=False)
    style.name_lines(figure, [*named.values()])
    return figure


def _draw_loss(axes: Axes, loss: pd.Series) -> None:
    axes.plot(loss, color=CONTEXT, alpha=0.45, linewidth=0.8, rasterized=True)
    axes.plot(style.smooth(loss), color=INK, linewidth=1.4)
    axes.set_ylabel("training loss" + style.scale(axes, loss.to_numpy()).removesuffix(" scale"))
    later = cast(np.ndarray, loss.iloc[len(loss) // 10 :].dropna().to_numpy())
    if later.size and later.min() < later.max():
        # The first steps fall from the loss of an untrained model: they need not all be seen.
        style.fit(axes, later)


@style.styled
def loss_and_gradient(run: Recorded) -> Figure | None:
    """Training loss and gradient norm over steps, each with its running median."""
    panels = {
        label: series
        for label, name in (("training loss", "loss"), ("gradient norm", "grad_norm"))
        if style.has_finite(series := style.finite(run.of_run(name)))
    }
    if not panels:
        return None
    figure, all_axes = style.canvas(" and ".join(panels).capitalize(), len(panels))
    for axes, (label, series) in zip(all_axes, panels.items(), strict=True):
        axes.plot(series, color=CONTEXT, alpha=0.45, linewidth=0.8, rasterized=True)
        axes.plot(style.smooth(series), color=HIGHLIGHTS[1][0], label=label)
        axes.set_ylabel(label + style.scale(axes, series.to_numpy()))
    style.finish(all_axes, run)
    return figure


@style.styled
def runs_over_steps(
    runs: Mapping[str, Recorded],
    indicator: str,
    title: str,
    label: str,
    marked: Mapping[str, Mapping[str, int]] | None = None,
    first: int = 0,
) -> Figure | None:
    """One indicator of several runs from a step on, and what is `marked` of each run."""
    drawn = of_runs_or_worst_heads(runs, indicator, first).items()
    series = {name: style.finite(values) for name, values in drawn}
    series = {name: values for name, values in series.items() if style.has_finite(values)}
    if not series:
        return None
    figure, (axes,) = style.canvas(title)
    colours = dict(zip(runs, RUN_LINES, strict=False))
    for name, values in series.items():
        colour, line_style = colours[name]
        axes.plot(values, color=colour, linestyle=line_style, label=name, gid=style.NAMED)
    axes.set_ylabel(label + style.scale(axes, pd.concat(list(series.values())).to_numpy()))
    begins, ends = zip(*(run.steps for run in runs.values() if run.evidence.steps), strict=True)
    style.set_steps(axes, max(first, min(begins)), max(ends))
    rows = [(name, steps) for name, steps in (marked or {}).items() if steps]
    for row, (name, steps) in enumerate(reversed(rows)):
        _mark_run(axes, steps, colours[name][0], 0.06 + 0.17 * row)
    # Not at the ends of the lines: runs end at different steps and have long names.
    lines = [line for line in axes.get_lines() if line.get_gid() == style.NAMED]
    axes.legend(lines, [*series], handlelength=2.6)  # by itself it leaves out names such as "_a"
    return figure


def _mark_run(axes: Axes, marked: Mapping[str, int], colour: str, height: float) -> None:
    """A line at each marked step; above it what happened, in one row a run."""
    first, last = axes.get_xlim()
    said: dict[int, list[str]] = {}
    for what, step in marked.items():
        # A switch comes a step after its alarm.
        at = next((one for one in said if abs(step - one) < (last - first) / 100), step)
        said.setdefault(at, []).append(what)
    for step, what in said.items():
        if not first <= step <= last:
            continue
        dashes = "--" if what == ["alarm"] else "-"
        axes.axvline(step, color=colour, linestyle=dashes, linewidth=1.2, zorder=1.2, gid="marked")
        axes.text(
            step,
            1,
            ", ".join(what),
            transform=style.above(axes, height),
            color=colour,
            ha="right" if step > last - 0.15 * (last - first) else "left",
            fontsize=9.5,
        )


def of_runs_or_worst_heads(
    runs: Mapping[str, Recorded], indicator: str, first: int
) -> dict[str, pd.Series]:
    """An indicator of each run as its running median, of heads the largest magnitude, by step."""
    series = {name: style.finite(run.of_run(indicator).loc[first:]) for name, run in runs.items()}
    longest = max(map(len, series.values()), default=0)
    return {
        name: style.smooth(series[name], longest)
        if len(series[name])
        else run.by_head(indicator).loc[first:].abs().max(axis=1)
        for name, run in runs.items()
    }
