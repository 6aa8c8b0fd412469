"""What was measured of a run's heads, and what was not: steps, rules, attention modules."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd

from guardbit.dashboards.tables import check_samples, rows_of

#: For runs whose metadata do not say by what heads were judged: class of a rule -> the indicators
#: of which it needs one; none of those that judge something else. A rule that is not listed is
#: taken to judge heads by whatever was measured.
_READS: dict[str, tuple[str, ...]] = {
    "CommonMode": (),
    "HeadGrowth": ("w_q_spectral_norm", "max_logit"),
    "GradientError": ("dq_coherent_error", "w_q_push"),
    "ModelLogits": (),
    "LossDeparture": (),
}


@dataclass(frozen=True, slots=True)
class Sampling:
    """When heads were measured, and by what.

    Attributes:
        count: Number of steps.
        last: The last of them, None without any.
        every: The most steps between two, None without two.
        indicators: The indicators.
    """

    count: int = 0
    last: int | None = None
    every: int | None = None
    indicators: frozenset[str] = frozenset()

    def extended(self, steps: npt.NDArray[Any], indicators: Collection[str]) -> Sampling:
        """The same with later samples; steps that are not later were counted before."""
        last = -1 if self.last is None else self.last
        # Rows of a step lie together: dropping those first leaves little to sort.
        steps = steps[np.diff(steps, prepend=-1) != 0]
        new = np.unique(steps[steps > last]).tolist()
        known = [*([] if self.last is None else [self.last]), *new]
        return Sampling(
            self.count + len(new),
            known[-1] if known else None,
            max([self.every or 0, *np.diff(known).tolist()]) or None,
            self.indicators | frozenset(indicators),
        )


def sampling_of(frame: pd.DataFrame) -> Sampling:
    """When heads were measured, by the samples; a row without a value is no measurement."""
    samples = check_samples(frame)
    measured = rows_of(samples, (samples["site"] != "") & samples["value"].notna())
    steps = measured["step"].to_numpy(np.int64)
    return Sampling().extended(steps, measured["indicator"].unique().tolist())


def is_judged(metadata: Mapping[str, Any] | None, indicators: Collection[str]) -> bool:
    """Whether some rule could judge heads by what was measured of them."""
    settings = (metadata or {}).get("settings")
    settings = settings if isinstance(settings, Mapping) else {}
    judged_by, rules = settings.get("heads_judged_by"), settings.get("rules")
    if isinstance(judged_by, Mapping):
        return bool(indicators) and any(
            all(not set(either).isdisjoint(indicators) for either in needed)
            for needed in judged_by.values()
        )
    kinds = _READS if not isinstance(rules, list | tuple) else [_kind(rule) for rule in rules]
    return any(
        kind not in _READS or not set(_READS[kind]).isdisjoint(indicators) for kind in kinds
    ) and bool(indicators)


def _kind(rule: object) -> str:
    return str(rule).partition("(")[0]


def not_watched_of(
    metadata: Mapping[str, Any] | None, measured: Collection[str]
) -> tuple[str, ...]:
    """The attention modules that a run's metadata name and that were not watched."""
    known = metadata or {}
    sites, unseen = known.get("sites"), known.get("unseen")
    called = sites.items() if isinstance(sites, Mapping) else ()
    names = [
        *(name for name, about in called if name not in measured or _is_unwatched(about)),
        *(unseen if isinstance(unseen, list | tuple) else ()),
    ]
    return tuple(dict.fromkeys(map(str, names)))


def without_attention_of(metadata: Mapping[str, Any] | None) -> tuple[int, int | None]:
    """In how many sampled steps no watched module called attention, and the first of them."""
    known = (metadata or {}).get("without_attention")
    known = known if isinstance(known, Mapping) else {}
    samples, first = known.get("samples"), known.get("first")
    if isinstance(samples, int) and isinstance(first, int):
        return samples, first
    return 0, None


def _is_unwatched(about: object) -> bool:
    return isinstance(about, Mapping) and bool(about.get("unwatched"))
