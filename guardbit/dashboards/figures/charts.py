"""What a report shows, in its order: each figure with its caption."""

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
from guardbit.dashboards.figures.scales import MEDIAN_WINDOW
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
        caption: One sentence: what to look for, and the paper's figure where there is one.
        needs: The indicators of which it needs at least one.
        draw: The function that draws it.
    """

    name: str
    title: str
    caption: str
    needs: tuple[str, ...]
    draw: Draw


def _map_that_tells(frame: pd.DataFrame, events: pd.DataFrame | None) -> Figure | None:
    """The map at the first alarm: later, heads that were drawn along hide the first one."""
    first = first_events(frame, events, "alarm")
    return model_map(frame, events, min((event.step for event in first.values()), default=None))


CHARTS: tuple[Chart, ...] = (
    Chart(
        "story",
        "What happened",
        "Above the loss, below the first heads to alarm, or those farthest above their baseline. "
        "An axis ends at what was reached until the loss left.",
        tuple(name for name, _ in STORY),
        story,
    ),
    Chart(
        "model_map",
        "Model map",
        "Every head, at the first alarm, or at the end of a run without. Dark: its worst indicator "
        "is far above its baseline, growth that all heads share taken out; stable runs stay below "
        "12x. A frame: an alarm.",
        EXCESS_NEEDS,
        _map_that_tells,
    ),
    Chart(
        "loss",
        "Loss and gradient norm",
        f"Grey: every recorded step; blue: running median of {MEDIAN_WINDOW}. Look for a loss "
        "that leaves its trend after the first alarm: the alarm should come well before it.",
        ("loss", "grad_norm"),
        loss_and_gradient,
    ),
    Chart(
        "w_q_spectral_norm_layers",
        "W_Q spectral norm by layer",
        "Look for a single row that darkens while its neighbours stay light: the failure "
        "starts in one layer (paper, figure 11). A healthy run is light all over.",
        ("w_q_spectral_norm",),
        spectral_norm_by_layer,
    ),
    Chart(
        "w_q_spectral_norm_heads",
        "W_Q spectral norm by head",
        "Look for one head that leaves the bundle of its layer (paper, figure 3).",
        ("w_q_spectral_norm",),
        spectral_norm_of_heads,
    ),
    Chart(
        "max_logit",
        "Max logit",
        "Large scores are healthy: look for a jump by a factor of ten within a few hundred steps, "
        "not for a level.",
        ("max_logit",),
        max_logit,
    ),
    Chart(
        "attention_entropy",
        "Attention entropy",
        "Look for a head that falls towards 0: all its queries look at one key. A low "
        "entropy alone is healthy.",
        ("attention_entropy",),
        attention_entropy,
    ),
    Chart(
        "multiple_maxima",
        "Multiple maxima, FP32 scores",
        "Look for a share that rises before the loss does (paper, figure 13); exact ties are rare "
        "in FP32.",
        ("multiple_maxima",),
        multiple_maxima,
    ),
    Chart(
        "multiple_maxima_bf16",
        "Multiple maxima, BF16-rounded scores",
        "The paper's own count (figure 13): look for heads that climb towards 100 % and stay; "
        "not to be compared with the share in FP32.",
        ("multiple_maxima_bf16",),
        multiple_maxima_bf16,
    ),
    Chart(
        "delta_bias_cumulative",
        "Cumulative delta bias",
        "Errors that cancel wander around zero, inside the band; look for a head that leaves it to "
        "one side and keeps going (paper, figure 5a).",
        ("delta_bias_cumulative",),
        delta_bias,
    ),
    Chart(
        "switch_before_and_after",
        "Before and after the switch",
        "Delta bias should fall at once; the weights' norm and the logits should stop rising. What "
        "has grown before shrinks slowly, if at all.",
        tuple(indicator for indicator, _ in PANELS),
        before_and_after,
    ),
)
