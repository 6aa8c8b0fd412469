"""What a run's alarms have shown so far: the first of each rule and module, and the verdict."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import astuple
from typing import Any

from guardbit.judgement import Cause, verdict_of
from guardbit.records import Alarm, Event, Role, event_of


class Findings:
    """The first alarms of a run, and the verdict by them."""

    def __init__(self) -> None:
        # The first alarm, or advisory, of each rule and attention module.
        self._first: dict[tuple[str, str], Alarm] = {}
        self.verdict = "stable"  # the latest one that was recorded
        self.alarmed: dict[str, set[int]] = {}  # attention module -> the heads alarms have named
        self.sound_step: int | None = None  # of the last state taken before any of them
        self.is_whole = True  # whether the alarms are known from the run's first step on

    def add(self, alarm: Alarm) -> bool:
        """Returns whether it is the first of its rule and module, or names another head."""
        is_new = self._first.setdefault((alarm.rule, alarm.site), alarm) is alarm
        if not alarm.role.is_advisory:
            heads = self.alarmed.setdefault(alarm.site, set())
            is_new = is_new or not heads.issuperset(alarm.heads)
            heads.update(alarm.heads)
        return is_new

    def state_is_taken(self, step: int | None) -> None:
        """Takes the last step, or None before the first, of a state for a checkpoint."""
        if self.is_whole and not self.alarmed:
            self.sound_step = step

    @property
    def way_back(self) -> str:
        """The checkpoint to go back to where no switch has helped; `Policy.remedy` goes on."""
        if self.sound_step is None:
            return "no checkpoint from before the first alarm is known; begin anew"
        # Trainers name files by the number of steps that are done, and steps count from 0.
        step = self.sound_step
        return (
            f"go back to the checkpoint after step {step} ({step + 1} in the file's name), the last"
            " one before the first alarm, if it is still there, and resume"
        )

    def judge(self, cause: Cause, step: int) -> Event | None:
        """Returns the verdict, where it is another than before."""
        events = [event for event in self.events() if event.kind == "alarm"]
        verdict, why = verdict_of(events, cause)
        if verdict == self.verdict:
            return None
        self.verdict = verdict
        return Event(step, "verdict", "", (), why, verdict=verdict)

    def events(self) -> Iterator[Event]:
        """Yields the alarms so far, for a run that goes on in a new folder."""
        yield from map(event_of, self._first.values())

    def state_dict(self) -> dict[str, Any]:
        # Plain tuples only: PyTorch loads no other with weights_only.
        first = self._first.values()
        return {
            "first_alarms": [(*astuple(one)[:5], tuple(one.role), one.severity) for one in first],
            "verdict": self.verdict,
            "alarmed": {site: sorted(heads) for site, heads in self.alarmed.items()},
            "sound_step": self.sound_step,
            "is_whole": self.is_whole,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        alarms = [
            Alarm(step, site, tuple(heads), rule, why, Role(*role), severity)
            for step, site, heads, rule, why, role, severity in state["first_alarms"]
        ]
        self._first = {(alarm.rule, alarm.site): alarm for alarm in alarms}
        self.verdict = state["verdict"]
        self.alarmed = {site: set(heads) for site, heads in state["alarmed"].items()}
        self.sound_step = state["sound_step"]
        self.is_whole = state["is_whole"]
