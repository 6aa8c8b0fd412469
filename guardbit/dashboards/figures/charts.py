"""The figures of a report, in their order."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pandas as pd
from matplotlib.figure import Figure

from guardbit.dashboards.excess import EXCESS_INDICATORS
from guardbit.dashboards.figures.heads import (
    attention_entropy,
    delta_bias,
    max_logit,
    spectral_norm_of_heads,
)
from guardbit.dashboards.figures.maps import model_map, spectral_norm_by_layer
from guardbit.dashboards.figures.maxima import multiple_maxima, multiple_maxima_bf16
from guardbit.dashboards.figures.run import loss_and_gradient
from guardbit.dashboards.figures.story import PANELS as STORY
from guardbit.dashboards.figures.story import story
from guardbit.dashboards.figures.switch import PANELS, before_and_after
from guardbit.dashboards.marks import first_events

Draw = Callable[[pd.DataFrame, pd.DataFrame | None], Figure | None]

EXCESS_NEEDS = tuple(EXCESS_INDICATORS)


@dataclass(frozen=True, slots=True)
class Chart:
    """A figure of the report.

    Attributes:
        name: Stem of its PNG.
        title: What it shows, in a few words.
        needs: The indicators of which it needs at least one.
        draw: The function that draws it.
    """

    name: str
    title: str
    needs: tuple[str, ...]
    draw: Draw


def _map_that_tells(frame: pd.DataFrame, events: pd.DataFrame | None) -> Figure | None:
    """The map at the first alarm: later, heads that were drawn along hide the first one."""
    first = first_events(frame, events, "alarm")
    return model_map(frame, events, min((event.step for event in first.values()), default=None))


CHARTS: tuple[Chart, ...] = (
    Chart("story", "What happened", tuple(name for name, _ in STORY), story),
    Chart("model_map", "Model map", EXCESS_NEEDS, _map_that_tells),
    Chart("loss", "Loss and gradient norm", ("loss", "grad_norm"), loss_and_gradient),
    Chart(
        "w_q_spectral_norm_layers",
        "W_Q spectral norm by layer",
        ("w_q_spectral_norm",),
        spectral_norm_by_layer,
    ),
    Chart(
        "w_q_spectral_norm_heads",
        "W_Q spectral norm by head",
        ("w_q_spectral_norm",),
        spectral_norm_of_heads,
    ),
    Chart("max_logit", "Max logit", ("max_logit",), max_logit),
    Chart("attention_entropy", "Attention entropy", ("attention_entropy",), attention_entropy),
    Chart("multiple_maxima", "Multiple maxima, FP32 scores", ("multiple_maxima",), multiple_maxima),
    Chart(
        "multiple_maxima_bf16",
        "Multiple maxima, BF16-rounded scores",
        ("multiple_maxima_bf16",),
        multiple_maxima_bf16,
    ),
    Chart("delta_bias_cumulative", "Cumulative delta bias", ("delta_bias_cumulative",), delta_bias),
    Chart(
        "switch_before_and_after",
        "Before and after the switch",
        tuple(indicator for indicator, _ in PANELS),
        before_and_after,
    ),
)
