"""What follows from the alarms of a sampled step: they are told, heads switched, the run judged."""

from __future__ import annotations

from collections.abc import Callable

from guardbit.monitor.detectors import Detectors
from guardbit.monitor.findings import Findings, event_of
from guardbit.monitor.measure import Measurement
from guardbit.monitor.policy import Policy
from guardbit.monitor.qk_clip import Clipping
from guardbit.monitor.sites import Instrumentation
from guardbit.monitor.snapshots import Snapshots
from guardbit.monitor.switching import Switching
from guardbit.records import Alarm, Event, Sample

#: Heads of an attention module that advisories have audited at each sampled step, besides one in
#: turn.
MOST_ADVISED = 2


class Acting:
    """Acts on alarms."""

    def __init__(
        self,
        instrumentation: Instrumentation,
        measurement: Measurement,
        snapshots: Snapshots,
        detectors: Detectors,
        findings: Findings,
        switching: Switching,
        policy: Policy | None,
        dry_run: bool,
        record: Callable[[Event], None],
        announce: Callable[[Alarm], None],
    ) -> None:
        self._instrumentation = instrumentation
        self._measurement, self._snapshots = measurement, snapshots
        self._detectors, self._findings = detectors, findings
        self._switching, self._policy = switching, policy
        self._clipping = Clipping(dry_run, record)
        self._record, self._announce = record, announce

    def tell(self, found: list[Alarm]) -> None:
        """Records alarms and advisories; their heads are audited at each sampled step from now."""
        for alarm in found:
            suspects = self._measurement.suspects.setdefault(alarm.site, set())
            room = MOST_ADVISED - len(suspects) if alarm.role.is_advisory else None
            suspects.update(alarm.heads if room is None else alarm.heads[: max(0, room)])
            self._findings.add(alarm)
            self._snapshots.alarm(alarm.site, alarm.heads)
            self._record(event_of(alarm, self._switching.already(alarm)))
            if not alarm.role.is_advisory:
                self._announce(alarm)

    def decide(self, alarms: list[Alarm], step: int, ended: int) -> None:
        """Lets the policy decide, and switches."""
        self._switching.decide(
            alarms, step, ended, self._detectors.restless(), self._findings.way_back
        )

    def clip(self, samples: list[Sample]) -> None:
        """Clips the heads above the policy's bound, if it has come to that."""
        policy = self._policy
        if policy is not None and policy.qk_clip is not None and policy.clipping is not None:
            sites, (_, why) = self._instrumentation.sites, policy.clipping
            self._clipping.act(sites, samples, policy.qk_clip, why)

    def judge(self, alarms: list[Alarm], ended: int) -> None:
        """Records the verdict on the run if it is another than before."""
        event = self._findings.judge(alarms, self._measurement.num_sites, ended)
        if event is not None:
            self._record(event)
