"""What rules look at, and what they report: one step of telemetry, and findings in it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from guardbit.records import Role

Values = NDArray[np.float64]
State = dict[str, Any]

#: Stands for inf, which JSON has not: the largest FP32 number.
OVERFLOW = float(np.finfo(np.float32).max)


@dataclass(frozen=True, slots=True)
class Frame:
    """All that was measured at one step.

    Attributes:
        step: Optimizer step.
        now: Indicator -> site -> one FP64 value a head, NaN where it is missing, +-`OVERFLOW`
            for +-inf; what was measured at this very step. All arrays of a site are as long as
            its highest head so far.
        latest: The same, every site with its last known values, this step's included.
        normalised: Sites where the size of W_Q does not reach the scores, as under QK norm.
    """

    step: int
    now: Mapping[str, Mapping[str, Values]]
    latest: Mapping[str, Mapping[str, Values]]
    normalised: frozenset[str] = frozenset()

    def of(self, indicator: str) -> Mapping[str, Values]:
        """Returns site -> this step's values; empty where the indicator was not measured."""
        return self.now.get(indicator, {})

    def last_of(self, indicator: str, site: str, heads: int) -> Values:
        """Returns a site's last known values, `heads` of them, NaN where nothing is known."""
        known = self.latest.get(indicator, {}).get(site, np.empty(0))[:heads]
        return np.concatenate([known, np.full(heads - len(known), math.nan)])

    def typical_top(self, indicator: str, quantile: float = 0.5) -> float:
        """Returns the lower median over the sites of the site's largest head, or a quantile.

        One head that runs away hardly moves it; a model whose layers all move takes it along.
        The lower median keeps one of two sites from being compared with itself. In a model with
        one site it is the lower median of that site's heads.

        Returns:
            The value in the indicator's unit, NaN where nothing is known.
        """
        sites = [known for v in self.latest.get(indicator, {}).values() if (known := finite(v))]
        tops = [max(heads) for heads in sites] if len(sites) > 1 else [v for s in sites for v in s]
        tops.sort()
        return tops[int((len(tops) - 1) * quantile)] if tops else math.nan


@dataclass(frozen=True, slots=True)
class Finding:
    """What a rule sees at one site.

    Attributes:
        site: Name of the site; "" for the whole run.
        heads: The heads concerned, ascending; none for the whole run.
        why: One sentence, or a function that makes it from the heads that the alarm will name:
            those that are not cooling down, () for the whole run.
    """

    site: str
    heads: tuple[int, ...]
    why: str | Callable[[tuple[int, ...]], str]


class Rule(Protocol):
    """One-sided test for one kind of trouble; holds thresholds only, its state is handed in.

    It may have `reads`, the indicators without which it says nothing: what lacks them is then told
    to be not judged by it. And it may have `role`, one of `guardbit.records.ROLES`, which tells the
    policy what it judges; without one it is a rule of heads.
    """

    @property
    def name(self) -> str:
        """Name of the rule in alarms."""
        ...

    def examine(self, frame: Frame, state: State) -> list[Finding]:
        """Updates `state`, a dict of plain JSON values, and returns what is wrong at this step."""
        ...


def role_of(rule: Rule) -> Role:
    """Returns what a rule judges."""
    return getattr(rule, "role", "head")


def finite(values: Values) -> list[float]:
    """Returns the values that are no NaN, as plain floats."""
    return values[~np.isnan(values)].tolist()


def to_plain(values: Values) -> list[float | None]:
    """Returns one plain float a head, None for NaN, as JSON has no NaN."""
    return [None if math.isnan(value) else value for value in values.tolist()]


def from_plain(values: list[float | None], heads: int = 0) -> Values:
    """Undoes `to_plain`; pads with NaN up to `heads` heads."""
    # NumPy reads None as NaN.
    return np.array(values + [None] * (heads - len(values)), np.float64)
