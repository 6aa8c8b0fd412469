"""Runs a rule over series of samples."""

import numpy as np

from guardbit.monitor.detectors import Detectors
from guardbit.records import Sample


def training(index, indicator):
    """By what a norm has changed that stands still but for an optimizer's last digits."""
    return 1 + 2e-6 * index if indicator == "w_q_spectral_norm" else 1.0


def alarms_in(rule, series, steps=None, normalised=()):
    """Alarms of series, (site, indicator) -> a value or a row of heads for each step."""
    detectors = Detectors((rule,))
    detectors.normalised = frozenset(normalised)
    length = len(next(iter(series.values())))
    return [
        alarm
        for index, step in enumerate(range(0, 10 * length, 10) if steps is None else steps)
        for alarm in detectors.update(
            Sample(
                step,
                site,
                0,
                indicator,
                tuple((np.atleast_1d(rows[index]) * training(index, indicator)).tolist()),
            )
            for (site, indicator), rows in series.items()
        )
    ]


def beside(indicator, own, peers):
    """Module a has a series of its own, b and c have that of their peers."""
    return {(site, indicator): rows for site, rows in zip("abc", (own, peers, peers), strict=True)}
