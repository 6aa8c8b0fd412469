"""Figures of a run: pure functions from (frame, events) to a matplotlib Figure.

Each returns None where the run recorded nothing it could draw. All share one style, one range of
steps and one way to mark events (`style`). `CHARTS` are those of a report, in their order.
"""

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
    return model_map(frame, events, first_step(frame, events, "alarm"))


CHARTS: tuple[Chart, ...] = (
    Chart("story", "What happened", tuple(name for name, _ in STORY_PANELS), story),
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
        tuple(indicator for indicator, _ in SWITCH_PANELS),
        before_and_after,
    ),
)
