"""Figures of a run: pure functions from (frame, events) to a matplotlib Figure.

Each returns None where the run recorded nothing it could draw. All share one style, one range of
steps and one way to mark events (`style`). `CHARTS` are those of a report, in their order.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import pandas as pd
from matplotlib.figure import Figure

from guardbit.dashboards.excess import EXCESS_INDICATORS
from guardbit.dashboards.figures.heads import (
    attention_entropy,
    delta_bias,
    max_logit,
    multiple_maxima,
    multiple_maxima_bf16,
    spectral_norm_of_heads,
)
from guardbit.dashboards.figures.maps import model_map, spectral_norm_by_layer
from guardbit.dashboards.figures.run import STORY_PANELS, loss_and_gradient, runs_over_steps, story
from guardbit.dashboards.figures.switch import SWITCH_PANELS, before_and_after
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
    title: str  # what it shows, in a few words
    draw: Draw  # the function that draws it
    needs: tuple[str, ...]  # the indicators of which it needs at least one


def _map_that_tells(frame: pd.DataFrame, events: pd.DataFrame | None) -> Figure | None:
    return model_map(frame, events, first_step(frame, events, "alarm"))


_NORM = ("w_q_spectral_norm",)
CHARTS: tuple[Chart, ...] = (
    Chart("story", "What happened", story, tuple(dict(STORY_PANELS))),
    Chart("model_map", "Model map", _map_that_tells, tuple(EXCESS_INDICATORS)),
    Chart("loss", "Loss and gradient norm", loss_and_gradient, ("loss", "grad_norm")),
    Chart("w_q_spectral_norm_layers", "W_Q spectral norm by layer", spectral_norm_by_layer, _NORM),
    Chart("w_q_spectral_norm_heads", "W_Q spectral norm by head", spectral_norm_of_heads, _NORM),
    *(
        Chart(name, title, draw, (name,))
        for name, title, draw in (
            ("max_logit", "Max logit", max_logit),
            ("attention_entropy", "Attention entropy", attention_entropy),
            ("multiple_maxima", "Multiple maxima, FP32 scores", multiple_maxima),
            ("multiple_maxima_bf16", "Multiple maxima, BF16-rounded scores", multiple_maxima_bf16),
            ("delta_bias_cumulative", "Cumulative delta bias", delta_bias),
        )
    ),
    Chart(
        "switch_before_and_after",
        "Before and after the switch",
        before_and_after,
        tuple(dict(SWITCH_PANELS)),
    ),
)
