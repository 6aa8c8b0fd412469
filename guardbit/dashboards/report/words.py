"""How reports call things and write numbers."""

from __future__ import annotations

import json
import math

from guardbit.catalog import BY_NAME, CATALOG, SHARE_OF_ROWS, Indicator
from guardbit.records import Event, named

#: Key of the metadata -> its title, where that is another word.
TITLES = {"sites": "attention modules"}


def _label(indicator: Indicator) -> str:
    """What a column of an indicator's values is headed; shares are shown in percent."""
    unit = "% of rows" if indicator.unit == SHARE_OF_ROWS else indicator.unit
    return f"{indicator.title} ({unit})" if unit else indicator.title


LABELS = {indicator.name: _label(indicator) for indicator in CATALOG}


def where(event: Event) -> str:
    if not event.site:
        return "the whole run"
    return f"{event.site}, {named(event.heads)}" if event.heads else event.site


def count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def span(first: int, last: int) -> str:
    return f"step {first:,}" if first == last else f"steps {first:,} to {last:,}"


def value(indicator: str, number_: float) -> str:
    return number(100 * number_ if BY_NAME[indicator].unit == SHARE_OF_ROWS else number_)


def percent(part: float) -> str:
    """A part in percent; beyond ten times the whole its size says nothing more."""
    return "over 1,000 %" if part > 10 else f"{100 * part:.3g} %"


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
    if value is None:
        return "–"
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)


def title(name: object) -> str:
    words = TITLES.get(str(name), str(name)).replace("_", " ")
    return words[:1].upper() + words[1:]
