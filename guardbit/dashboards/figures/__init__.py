"""Figures of a run: pure functions from a `Recorded` run to a matplotlib Figure.

Each returns None where the run recorded nothing it could draw. All share one style, one range of
steps and one way to mark events (`style`). `CHARTS` are those of a report, in their order.
"""

from collections.abc import Callable

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

#: Stem of a figure's PNG -> the function that draws it.
CHARTS: dict[str, Callable[..., Figure | None]] = {
    "story": story,
    "model_map": model_map,
    "loss": loss_and_gradient,
    "w_q_spectral_norm_layers": spectral_norm_by_layer,
    "w_q_spectral_norm_heads": spectral_norm_of_heads,
    "max_logit": max_logit,
    "attention_entropy": attention_entropy,
    "multiple_maxima": multiple_maxima,
    "multiple_maxima_bf16": multiple_maxima_bf16,
    "delta_bias_cumulative": delta_bias,
}

__all__ = ["CHARTS", "runs_over_steps", *(draw.__name__ for draw in CHARTS.values())]  # pyright: ignore[reportUnsupportedDunderAll]
