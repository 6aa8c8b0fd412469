"""Runs the detectors over recorded telemetry again, as if the run were live."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import pandas as pd

from guardbit.monitor.detectors import DEFAULT_RULES, Detectors, Rule
from guardbit.records import Alarm
from guardbit.store.samples import samples_of


@dataclass(frozen=True, slots=True)
class Replay:
    """What the detectors would have said.

    Attributes:
        alarms: In the order of their steps.
        advisories: What rules found that is no alarm, in the order of their steps.
        unjudged: Rule -> the indicators that it needs and that the telemetry lacks.
    """

    alarms: list[Alarm]
    advisories: list[Alarm]
    unjudged: dict[str, list[str]]

    @property
    def first_alarm(self) -> int | None:
        """Step of the first alarm, None without any."""
        return self.alarms[0].step if self.alarms else None


def normalised_sites(metadata: Mapping[str, Any]) -> frozenset[str]:
    """Returns the sites of a run where the size of W_Q does not reach the scores (QK norm)."""
    sites = metadata.get("sites")
    known = sites.items() if isinstance(sites, Mapping) else ()
    return frozenset(
        name
        for name, facts in known
        if isinstance(facts, Mapping) and facts.get("normalises_queries") is True
    )


def replay(
    frame: pd.DataFrame,
    rules: tuple[Rule, ...] = DEFAULT_RULES,
    normalised: frozenset[str] = frozenset(),
) -> Replay:
    """Runs rules over the telemetry of one run."""
    detectors = Detectors(rules)
    detectors.normalised = normalised
    found = detectors.update(samples_of(frame))
    return Replay(
        [alarm for alarm in found if not alarm.role.is_advisory],
        [alarm for alarm in found if alarm.role.is_advisory],
        detectors.unjudged(set(frame.loc[frame["value"].notna(), "indicator"].unique())),
    )
