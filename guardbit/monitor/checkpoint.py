"""What a checkpoint holds of a session, for a run that goes on later."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from guardbit.monitor import ranks
from guardbit.monitor.actions import Switching
from guardbit.monitor.detectors import Detectors
from guardbit.monitor.findings import Findings
from guardbit.monitor.measure import Measurement
from guardbit.monitor.policy import Policy
from guardbit.monitor.schedule import Schedule
from guardbit.monitor.stages import log

# Raise it when states that were taken before no longer fit.
_FORMAT = 4


@dataclass(frozen=True)
class Checkpoint:
    """The parts of a session that have a state.

    Attributes:
        schedule: Where the run stands.
        measurement: Sums over steps.
        detectors: What the rules remember.
        policy: What it has decided; None to watch only.
        dry_run: Whether its decisions are only recorded.
        switching: Which heads are switched.
        findings: The first alarms, and the verdict.
    """

    schedule: Schedule
    measurement: Measurement
    detectors: Detectors
    policy: Policy | None
    dry_run: bool
    switching: Switching
    findings: Findings

    def state_dict(
        self, switched: dict[str, list[str]], measurement: dict[str, Any] | None
    ) -> dict[str, Any]:
        self.findings.state_is_taken(self.schedule.last_ended)
        return {
            "format": _FORMAT,
            "last_step": self.schedule.last_ended,
            "detectors": self.detectors.state_dict(),
            "policy": None if self.policy is None else self.policy.state_dict(),
            "dry_run": self.dry_run,
            "stabilizers": switched,
            "is_of_parts": bool(self.switching.asked_elsewhere),
            "running": {name: list(names) for name, names in self.switching.running().items()},
            "measurement": measurement,
            **self.findings.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> bool:
        """Continues from the state of a session; see `MonitorSession.load_state_dict`."""
        if "stabilizers" not in state:
            raise ValueError(
                "this is no state of GuardBit's: pass what `state_dict` of a session returned"
            )
        if state.get("format") != _FORMAT:
            self._load_switched(state)
            return False
        self.detectors.load_state_dict(state["detectors"])
        # The decisions of a dry run were not carried out, so the policy starts afresh.
        same_mode = state["dry_run"] == self.dry_run
        if self.policy is not None and state["policy"] is not None and same_mode:
            self.policy.load_state_dict(state["policy"])
        self.switching.load(state["stabilizers"], state["is_of_parts"])
        if (stay := _described(state["stabilizers"])) and ranks.rank() == 0:
            log.warning("heads stay switched as the state says: %s", stay)
        self.schedule.last_ended = state["last_step"]
        if state["measurement"] is not None:
            self.measurement.load_state_dict(state["measurement"])
        self.findings.load_state_dict(state)
        return True

    def _load_switched(self, state: Mapping[str, Any]) -> None:
        """Keeps heads switched by a state that is incomplete or of another format."""
        stabilizers = state["stabilizers"]
        self.switching.load(stabilizers, state.get("is_of_parts", False))
        self.findings.is_whole = False
        more = ""
        if self.policy is not None and stabilizers:
            names = ", ".join(stabilizers)
            more = f"; alarms on those of {names} no longer widen what is switched"
        log.warning(
            "the state is incomplete or of another version of GuardBit: the heads it has switched"
            " stay switched (%s), detectors and sums begin anew%s",
            ", ".join(stabilizers) or "none",
            more,
        )


def _described(stabilizers: Mapping[str, Sequence[str]]) -> str:
    """Names the heads of each module that are switched, and what to; "" if none is."""
    return "; ".join(
        f"{site} heads {[h for h, n in enumerate(names) if n == name]} to {name}"
        for site, names in stabilizers.items()
        for name in dict.fromkeys(names)
        if name != "none"
    )
