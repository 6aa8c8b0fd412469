"""Axes and numbers: which scale an axis has, how its ticks read, what it can show."""

from __future__ import annotations

from typing import Any, TypeVar, cast

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from guardbit.dashboards.outcome import outcome_of

Table = TypeVar("Table", pd.DataFrame, pd.Series)

#: Loss and the like span a decade at the start of a run; below this ratio a log axis lacks ticks.
LOG_FROM_RATIO = 4.0

#: Samples in the running median laid over loss and gradient norm, which are noisy by batch.
MEDIAN_WINDOW = 25


def finite(table: Table) -> Table:
    """Infinite values have no place on an axis: as NaN they leave a gap in the line."""
    return table.replace([np.inf, -np.inf], np.nan)


def has_finite(table: pd.DataFrame | pd.Series) -> bool:
    """Whether there is anything to draw."""
    return bool(np.isfinite(table.to_numpy(dtype=float)).any())


def smooth(series: pd.Series) -> pd.Series:
    """Running median, centred; short series are left as they are."""
    if len(series) < 4 * MEDIAN_WINDOW:
        return series
    median = series.rolling(MEDIAN_WINDOW, center=True, min_periods=1).median()
    return cast(pd.Series, median.where(series.notna()))


def scale(axes: Axes, values: np.ndarray) -> str:
    """Sets a log axis where positive values span a wide range; returns what the label adds."""
    measured = values[np.isfinite(values)]
    low, high = float(measured.min()), float(measured.max())
    if low <= 0 or high / low <= LOG_FROM_RATIO:
        axes.yaxis.set_major_formatter(FuncFormatter(plain))
        return ""
    axes.set_yscale("log")
    log_ticks(axes.yaxis, high / low)
    return ", log scale"


def end_at_departure(
    axes: Axes, table: pd.DataFrame, frame: pd.DataFrame, events: pd.DataFrame | None
) -> None:
    """Ends an axis at what was reached until the loss left; what comes after runs out of it.

    One head that explodes afterwards would press all that led there flat.
    """
    departed = outcome_of(frame, events).departed
    until = table.loc[: departed if departed is not None else None].to_numpy(dtype=float)
    until = until[np.isfinite(until)]
    if departed is None or not until.size:
        return
    low, high = float(until.min()), float(until.max())
    if axes.get_yscale() == "log":
        positive = until[until > 0]
        axes.set_ylim(float(positive.min()) / 1.2, high * 1.2)
    else:
        margin = 0.06 * (high - low)
        axes.set_ylim(min(low - margin, 0) if low < 0 else 0, high + margin)


def log_ticks(axis: Any, ratio: float) -> None:
    """Ticks at round numbers, as many as the range bears."""
    subs = (1.0,) if ratio > 1e3 else (1.0, 3.0) if ratio > 50 else (1.0, 2.0, 5.0)
    axis.set_major_locator(LogLocator(subs=subs))
    axis.set_major_formatter(FuncFormatter(plain))
    axis.set_minor_formatter(NullFormatter())


def plain(value: float, _position: int | None = None) -> str:
    """A number as a tick shows it."""
    if value == 0 or 1e-3 <= abs(value) < 1e6:
        return f"{value:,.10g}"
    mantissa, exponent = f"{value:.6e}".split("e")
    return f"{float(mantissa):g}e{int(exponent)}"


def edges(centres: np.ndarray) -> np.ndarray:
    """Cell borders half way between neighbouring steps, which need not be evenly spaced."""
    if len(centres) == 1:
        return centres[0] + np.array([-0.5, 0.5])
    middles = (centres[1:] + centres[:-1]) / 2
    return np.concatenate([[centres[0]], middles, [centres[-1]]])
