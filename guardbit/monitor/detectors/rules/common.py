"""What several rules need: checks of thresholds, and the past of each head."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from guardbit.monitor.detectors.values import State, Values, from_plain, to_plain


def heads_where(mask: np.ndarray) -> tuple[int, ...]:
    """Returns the numbers of the heads for which a mask, (heads,), is true."""
    return tuple(np.flatnonzero(mask).tolist())


def check_thresholds(rule: Any, **smallest: int) -> None:
    """Refuses thresholds that are no numbers, or too small."""
    for field in dataclasses.fields(rule):
        if field.name == "name":
            continue
        value, bound = getattr(rule, field.name), smallest.get(field.name, 0)
        for number in value if isinstance(value, tuple) else (value,):
            if isinstance(number, bool) or not isinstance(number, int | float):
                raise ValueError(f"{rule.name}.{field.name} is {number!r}; it must be a number")
            if not number >= bound:
                raise ValueError(f"{rule.name}.{field.name} is {number}; it must be >= {bound}")


def smaller_of_last_two(state: State, site: str, values: Values) -> Values:
    """Returns each head's smaller value of this sample and its last one; NaN for the first."""
    previous = from_plain(state.get(site, []), len(values))
    state[site] = to_plain(np.where(np.isnan(values), previous, values))
    return np.minimum(previous, values)
