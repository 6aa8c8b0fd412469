"""How reports call things and write numbers."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence

from guardbit.dashboards import frames
from guardbit.records import Event

HEADLINES = {
    "rounding": "Single heads show the signs of a rounding failure",
    "learning-rate": "The whole model diverges, as at too high a learning rate",
    "stable": "This run is stable",
    "unclear": "Something is wrong in this run, and its signs disagree",
}
LABELS = {
    "w_q_spectral_norm": "W_Q spectral norm",
    "w_k_spectral_norm": "W_K spectral norm",
    "qk_spectral_norm": "W_Q^T W_K spectral norm",
    "multiple_maxima": "Multiple maxima, FP32 (% of rows)",
    "multiple_maxima_bf16": "Multiple maxima, BF16 (% of rows)",
    "max_logit": "Max logit",
    "attention_entropy": "Entropy (nats)",
    "delta_bias": "Delta bias",
    "delta_bias_abs": "Delta bias, absolute",
    "delta_bias_cumulative": "Cumulative delta bias",
    "dq_relative_error": "dQ relative error",
    "dq_coherent_error": "dQ coherent error",
    "loss": "Training loss",
    "grad_norm": "Gradient norm",
}
PERCENTAGES = ("multiple_maxima", "multiple_maxima_bf16")


def what(event: Event) -> str:
    """An event in a few words."""
    happened = {
        "alarm": f"Alarm: {event.rule}" if event.rule else "Alarm",
        "switch": f"Switched to {event.stabilizer}",
        "undo": "Switched back to plain attention",
        "verdict": f"Verdict: {event.rule}",
        "monitor_error": "Error in the monitor",
    }[frames.mark_of(event) or event.kind]
    return f"{happened} · {where(event)}" if event.site else happened


def where(event: Event) -> str:
    """The heads an event concerns."""
    if not event.site:
        return "the whole run"
    if not event.heads:
        return event.site
    return f"{event.site}, head{'s' * (len(event.heads) > 1)} {', '.join(map(str, event.heads))}"


def count(number: int, noun: str) -> str:
    """A number of things."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def total(heads: Mapping[int, Sequence[int]]) -> str:
    """The number of heads of all layers."""
    return f"{sum(map(len, heads.values())):,}"


def value(indicator: str, number_: float) -> str:
    """An indicator's value, shares in percent."""
    return number(100 * number_ if indicator in PERCENTAGES else number_)


def number(value: float) -> str:
    """Three significant digits, without an exponent where that stays short."""
    if math.isnan(value):
        return "–"
    if math.isinf(value):
        return "∞" if value > 0 else "−∞"
    if value == 0 or 1e-3 <= abs(value) < 1e3:
        text = f"{value:.3g}"
    elif 1e3 <= abs(value) < 1e7:
        text = f"{value:,.0f}"
    else:
        text = f"{value:.2e}"
    return text.replace("-", "−") if value < 0 else text


def setting(value: object) -> str:
    """A setting as it was given."""
    if value is None:
        return "–"
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)


def title(name: object) -> str:
    """A key as a title."""
    words = str(name).replace("_", " ")
    return words[:1].upper() + words[1:]
