"""Figures of a run: pure functions from (frame, events) to a matplotlib Figure.

Each returns None where the run recorded nothing it could draw. All share one style, one range of
steps and one way to mark events (`style`).
"""

from guardbit.dashboards.figures.charts import CHARTS, Chart
from guardbit.dashboards.figures.heads import (
    attention_entropy,
    delta_bias,
    max_logit,
    spectral_norm_of_heads,
)
from guardbit.dashboards.figures.maps import model_map, spectral_norm_by_layer
from guardbit.dashboards.figures.maxima import multiple_maxima, multiple_maxima_bf16
from guardbit.dashboards.figures.run import loss_and_gradient, runs_over_steps
from guardbit.dashboards.figures.story import story
from guardbit.dashboards.figures.switch import before_and_after

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
