"""Figures of a run: pure functions from (frame, events) to a matplotlib Figure.

Each returns None where the run recorded nothing it could draw. All share one style, one range of
steps and one way to mark events (`style`). `CHARTS` are those of a report, in their order.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import pandas as pd
from matplotlib.figure import Figure

from guardbit.dashboards.figures.heads import (
    attention_entropy,
    delta_bias,
    max_logit,
    multiple_maxima,
    multiple_maxima_bf16,
    spectral_norm_of_heads,
)
from guardbit.dashboards.figures.maps import model_map, spectral_norm_by_layer
from guardbit.dashboards.figures.run import loss_and_gradient, runs_over_steps, story
from guardbit.dashboards.figures.switch import before_and_after
from guardbit.dashboards.marks import first_step

__all__ = [
    "CHARTS",
    "Chart",
    "attention_entropy",
    "before_and_after",
    "delta_bias",
    "loss_and_gradient",
    "max_logit",
    "model_map",
    "multiple_maxima",
    "multiple_maxima_bf16",
    "runs_over_steps",
    "spectral_norm_by_layer",
    "spectral_norm_of_heads",
    "story",
]

Draw = Callable[[pd.DataFrame, pd.DataFrame | None], Figure | None]


class Chart(NamedTuple):
    """A figure of the report."""

    name: str  # stem of its PNG
    draw: Draw  # the function that draws it


def _map_that_tells(frame: pd.DataFrame, events: pd.DataFrame | None) -> Figure | None:
    return model_map(frame, events, first_step(frame, events, "alarm"))


CHARTS = (
    Chart("story", story),
    Chart("model_map", _map_that_tells),
    Chart("loss", loss_and_gradient),
    Chart("w_q_spectral_norm_layers", spectral_norm_by_layer),
    Chart("w_q_spectral_norm_heads", spectral_norm_of_heads),
    Chart("max_logit", max_logit),
    Chart("attention_entropy", attention_entropy),
    Chart("multiple_maxima", multiple_maxima),
    Chart("multiple_maxima_bf16", multiple_maxima_bf16),
    Chart("delta_bias_cumulative", delta_bias),
    Chart("switch_before_and_after", before_and_after),
)
