"""Runs the detectors over recorded telemetry again, as if the run were live."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import pandas as pd

from guardbit.judgement import Ended, Evidence, Judgement, judge, severities
from guardbit.monitor.detectors import DEFAULT_RULES, Detectors, Rule
from guardbit.monitor.detectors.rule import heads_judged_by
from guardbit.records import Alarm, Event, event_of
from guardbit.store.reading import samples_of


@dataclass(frozen=True, slots=True)
class Replay:
    """What the detectors would have said."""

    alarms: list[Alarm]  # in the order of their steps
    advisories: list[Alarm]  # what rules found that is no alarm, in the order of their steps
    # Rule -> the indicators that it needs and that the telemetry lacks.
    unjudged: dict[str, list[str]]
    evidence: Evidence  # what a judgement needs of the telemetry
    # Rule that judges heads -> the groups of indicators of which it needs one each.
    judged_by: dict[str, list[list[str]]]

    @property
    def first_alarm(self) -> int | None:
        return self.alarms[0].step if self.alarms else None

    def judgement(
        self,
        events: Iterable[Event] = (),
        metadata: Mapping[str, Any] | None = None,
        ended: Ended | None = None,
        diagnosed: Iterable[Mapping[str, Any]] = (),
    ) -> Judgement:
        """Judges the run by these alarms, and by other events that it recorded."""
        happened = [*map(event_of, self.alarms), *events]
        known = (metadata or {}).get("settings")
        known = known if isinstance(known, Mapping) else {}
        settings = {"settings": {**known, "heads_judged_by": self.judged_by}}
        return judge(self.evidence, happened, {**(metadata or {}), **settings}, ended, diagnosed)


def normalised_sites(metadata: Mapping[str, Any]) -> frozenset[str]:
    """Returns the sites of a run where the size of W_Q does not reach the scores (QK norm)."""
    sites = metadata.get("sites")
    known = sites.items() if isinstance(sites, Mapping) else ()
    return frozenset(
        name
        for name, facts in known
        if isinstance(facts, Mapping) and facts.get("normalises_queries") is True
    )


def graded(found: list[Alarm], evidence: Evidence) -> list[Alarm]:
    grades = severities(evidence, (alarm.step for alarm in found)) if found else {}
    return [replace(alarm, severity=grades[alarm.step]) for alarm in found]


def replay(
    frame: pd.DataFrame,
    rules: tuple[Rule, ...] = DEFAULT_RULES,
    normalised: frozenset[str] = frozenset(),
) -> Replay:
    detectors = Detectors(rules)
    detectors.normalised = normalised
    samples = list(samples_of(frame))
    evidence = Evidence()
    evidence.add(samples)
    found = graded(detectors.update(samples), evidence)
    # A loss that is not a number was recorded, as such.
    measured = frame["value"].notna() | (frame["indicator"] == "loss")
    return Replay(
        [alarm for alarm in found if not alarm.role.is_advisory],
        [alarm for alarm in found if alarm.role.is_advisory],
        detectors.unjudged(set(frame.loc[measured, "indicator"].unique())),
        evidence,
        heads_judged_by(rules),
    )
