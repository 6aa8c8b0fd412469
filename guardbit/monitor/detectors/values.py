"""The values of heads: FP64 arrays while rules compute, plain lists in their states."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

Values = NDArray[np.float64]
State = dict[str, Any]

#: Stands for inf, which JSON has not: the largest FP32 number.
OVERFLOW = float(np.finfo(np.float32).max)


def finite(values: Values) -> list[float]:
    """Returns the values that are no NaN, as plain floats."""
    return values[~np.isnan(values)].tolist()


def to_plain(values: Values) -> list[float | None]:
    """Returns one plain float a head, None for NaN, as JSON has no NaN."""
    if not np.isnan(values).any():  # by far the most
        return values.tolist()
    return [None if math.isnan(value) else value for value in values.tolist()]


def from_plain(values: list[float | None], heads: int = 0) -> Values:
    """Undoes `to_plain`; pads with NaN up to `heads` heads."""
    # NumPy reads None as NaN.
    return np.array(values + [None] * (heads - len(values)), np.float64)
