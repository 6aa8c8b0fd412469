"""What a monitored run records: events in the log; events, samples and metadata in its folder."""

import importlib.metadata
import os
import platform
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import astuple, dataclass, field, fields
from functools import partial
from typing import Any

from guardbit.judgement import Ended, Evidence, Judgement, cause_of, is_place, judge, verdict_of
from guardbit.judgement.sentences import ENDS
from guardbit.monitor import ranks
from guardbit.monitor.settings import Settings
from guardbit.monitor.sites import Limits, shown
from guardbit.monitor.stages import Stages, log
from guardbit.records import (
    Alarm,
    Event,
    ModuleRow,
    Role,
    RunEnd,
    Sample,
    event_of,
    line_of,
    place_of,
    printable,
)
from guardbit.store import RunFollower, RunWriter, is_run, read_end, read_events
from guardbit.store.reading import resumptions, samples_of

_PACKAGES = ("guardbit", "torch", "lightning", "triton")

#: What an alarm's line ends with by what its rule judges, where that is no head.
_ADVICE = {
    "model": "lower the learning rate, or warm up longer",
    "loss": "go back to a checkpoint before it",
}
_NEEDLESS = "delta is not rounded here: lower the rate, or use QK norm"
_SWITCHED = "switched already: lower the rate, or use QK norm"

#: Failures in a row after which the store gives up: what is pending fills the memory.
MOST_FAILED_WRITES = 100


@dataclass
class Findings:
    """The first alarms of a run, and the verdict by them; all of it goes into a checkpoint."""

    # Rule, attention module -> the first alarm, or advisory.
    first: dict[tuple[str, str], Alarm] = field(default_factory=dict)
    verdict: str = "stable"  # the latest one that was recorded
    # Attention module -> the heads alarms have named.
    alarmed: dict[str, set[int]] = field(default_factory=dict)

    def add(self, alarm: Alarm) -> bool:
        """Returns whether it is the first of its rule and module, or names another head."""
        is_new = self.first.setdefault((alarm.rule, alarm.site), alarm) is alarm
        if not alarm.role.is_advisory:
            heads = self.alarmed.setdefault(alarm.site, set())
            is_new = is_new or not heads.issuperset(alarm.heads)
            heads.update(alarm.heads)
        return is_new

    @property
    def way_back(self) -> str:
        """Where to go back to if no switch has helped; `Policy.remedy` goes on."""
        first = min((alarm.step for alarm in self.alarms), default=0)
        return f"go back to a checkpoint before the first known alarm, of step {first}, and resume"

    @property
    def alarms(self) -> list[Alarm]:
        return [alarm for alarm in self.first.values() if not alarm.role.is_advisory]

    def events(self) -> Iterator[Event]:
        return map(event_of, self.first.values())

    def state_dict(self) -> dict[str, Any]:
        # Plain tuples only: PyTorch loads no other with weights_only.
        alarms = [
            (*astuple(alarm)[:5], tuple(alarm.role), alarm.severity)
            for alarm in self.first.values()
        ]
        alarmed = {site: sorted(heads) for site, heads in self.alarmed.items()}
        return {**vars(self), "first": alarms, "alarmed": alarmed}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        vars(self).update({name: state[name] for name in vars(self)})
        alarms = [
            Alarm(step, site, tuple(heads), rule, why, Role(*role), severity)
            for step, site, heads, rule, why, role, severity in state["first"]
        ]
        self.first = {(alarm.rule, alarm.site): alarm for alarm in alarms}
        self.alarmed = {site: set(heads) for site, heads in state["alarmed"].items()}


class Journal:
    """Logs a run's events and writes its folder, if it has one; the stage "store"."""

    def __init__(self, settings: Settings, stages: Stages) -> None:
        self._dirpath, self._stages = settings.dirpath, stages
        self.advice = settings.advice  # what the line of an alarm on heads ends with
        self.needless: Mapping[str, str] = {}  # module -> why there is nothing to correct, or ""
        self._writer: RunWriter | None = None
        #: What a judgement of the run reads: samples, events, metadata. Of a run that goes on, what
        #: its folder holds is among it.
        self.evidence = Evidence()
        self.events: list[Event] = []
        self.findings = Findings()
        self.metadata: dict[str, Any] = {"settings": settings.described()}
        self._earlier_metadata: dict[str, Any] = {}  # of rank 0, so ranks must not act on it
        self._warned: set[tuple[str, str, str]] = set()
        #: Opens the folder, once it is known how the run begins.
        self._begin: Callable[[], RunWriter] | None = None
        self._is_closed = False
        # Pending: written as soon as the folder can be.
        self._samples: list[Sample] = []
        self._modules: list[ModuleRow] = []
        self._events: list[Event] = []
        self._notes: dict[str, Any] = {}
        self._failures, self._is_failing = 0, False
        self._is_hidden = False
        # Only this rank's, if there are several, since the last exchange.
        self.own: list[Event] = []

    def open(
        self, first_step: int, remembered: Callable[[], Iterable[Event]], is_resumed: bool
    ) -> None:
        """Opens the folder, if the run has one; where that fails, what is recorded next tries."""
        if self._dirpath is not None and self._begin is None:
            events = self._stages.attempt("store", lambda: [*self.findings.events(), *remembered()])
            self._begin = partial(self._open, first_step, events or [], is_resumed)
            self._try_to_write()

    def _open(self, first_step: int, remembered: list[Event], is_resumed: bool) -> RunWriter:
        """Opens the folder, and adds the events of earlier steps that it lacks."""
        assert self._dirpath is not None
        goes_on, held = is_run(self._dirpath), "a run"
        if goes_on and not is_resumed:  # before this run has a session there
            with suppress(OSError, ValueError):
                end = ENDS.get(read_end(self._dirpath) or "not closed", held)
                held = end.replace("the run", "a run that")
        versions = {"python": platform.python_version()}
        versions |= {name: _version(name) for name in _PACKAGES}
        writer = RunWriter(
            self._dirpath,
            metadata={"settings": self.metadata["settings"], "versions": versions},
            start_step=first_step - 1 if first_step else None,
        )
        if goes_on and not is_resumed:
            log.warning(
                "%s already holds %s, which this one does not resume: what that recorded from"
                " step %d on is hidden; another dirpath keeps both",
                self._dirpath,
                held,
                first_step,
            )
        if is_resumed and goes_on:
            log.tell(f"GuardBit: the run in {self._dirpath} goes on from step {first_step}")
        elif is_resumed:
            log.tell(
                f"GuardBit: this run goes on from a checkpoint, and {self._dirpath} holds nothing"
                f" from before step {first_step}; to go on in another folder, pass that as dirpath"
            )
        recorded = self._take_past(first_step)
        resumed = resumptions(self._earlier_metadata) if first_step else []
        self._notes["resumed"] = [*resumed, first_step] if is_resumed else resumed or None
        missing = _missing(remembered, recorded, first_step)
        self.events[:0] = recorded
        for event in missing:
            self._log(event)
        self._events[:0] = missing
        if not self._is_failing:  # else pending events may hold a later verdict
            # A new verdict is recorded only if it differs from the one the folder ends with.
            verdicts = [event.verdict for event in recorded if event.kind == "verdict"]
            self.findings.verdict = verdicts[-1] if verdicts else "stable"
        return writer

    def _take_past(self, step: int) -> list[Event]:
        """Takes what the folder holds of earlier steps, a part at a time; returns its events."""
        assert self._dirpath is not None
        follower, events = RunFollower(self._dirpath), []
        remembered, self.evidence = self.evidence.latest_shares(), Evidence()
        with warnings.catch_warnings(record=True) as left_out:
            warnings.simplefilter("always")
            try:
                follower.look()
                for batch in follower.batches() if step else ():
                    rows = batch.to_pandas()
                    self.evidence.add(samples_of(rows[rows["step"] < step]))
                events = read_events(self._dirpath).to_dict("records")
            except (OSError, ValueError) as error:
                log.warning("the run goes on without some of what its folder holds: %s", error)
        for message in dict.fromkeys(str(warning.message) for warning in left_out):
            log.warning("%s", message)
        self._earlier_metadata = follower.metadata
        # Events of a checkpoint that the folder lacks, and of this run that could not be written.
        known = self.evidence.shares
        self._samples[:0] = [
            one
            for one in remembered
            if known.get((one.layer, len(one.values) - 1), (-1,))[0] < one.step < step
        ]
        self.evidence.add(self._samples)
        return [Event(**event) for event in events if event["step"] < step]

    def judgement(self, ended: Ended | None) -> Judgement:
        return judge(self.evidence, self.events, self._earlier_metadata | self.metadata, ended)

    def report_verdict(self, step: int, is_measuring: bool) -> None:
        """Records the verdict on the alarms so far, once known, if it is another than before."""
        cause = cause_of(self.evidence, self.events, self.metadata)
        first = [x for x in self.findings.events() if x.kind == "alarm" and x.judges != "loss"]
        verdict, why = verdict_of(first, cause)
        is_open = is_measuring and verdict == "unclear" and cause.what == "not measured"
        if verdict != self.findings.verdict and not is_open:
            self.findings.verdict = verdict
            self.record(Event(step, "verdict", "", (), why, verdict=verdict))

    def record(self, event: Event, is_switched: bool = False) -> None:
        """Logs and writes an event; `is_switched` says that an alarm's heads all are."""
        self._log(event, is_switched)
        if self._is_kept():
            self._events.append(event)
            self._try_to_write()

    def record_own(self, event: Event) -> None:
        """Records an event of this rank: on rank 0 at once, on others at the next exchange."""
        self.record(event)
        if ranks.world_size() > 1:
            self.own.append(event)

    def store_failed(self, event: Event) -> None:
        """Takes the failure of the store, and writes it at once if it can: there is no later."""
        self.events.append(event)
        with suppress(Exception):
            if self._writer is not None:
                self._writer.event(event)

    def _log(self, event: Event, is_switched: bool = False) -> None:
        is_read = event.kind in ("alarm", "switch", "monitor_error") or event.rule == "module"
        if is_read or is_place(event):
            self.events.append(event)
        if ranks.rank() > 0:
            return
        switch = f"to {event.stabilizer}" if event.kind == "switch" else ""
        words = event.kind.removeprefix("monitor_"), place_of(event), event.verdict, switch
        line = f"step {event.step}: {' '.join(filter(None, words))}: {event.why}"
        if event.kind != "alarm":
            log.warning("%s", printable(f"GuardBit: {line}"))
            return
        log.info("%s", printable(line))
        needless = _NEEDLESS if self.needless.get(event.site) else ""
        on_heads = _SWITCHED if is_switched else needless or self.advice
        log.warning("%s", line_of(event, _ADVICE.get(event.judges, on_heads)))

    def add(self, samples: list[Sample]) -> None:
        """Takes samples, readable at once; a failed write is repeated with the next."""
        self._stages.attempt("judgement", lambda: self.evidence.add(samples))
        if self._is_kept():
            self._samples += samples
            self._failures += 1  # unless it succeeds
            self._try_to_write()

    def add_modules(self, rows: list[ModuleRow]) -> None:
        """Takes what audits of modules found, which is written with the next samples."""
        if self._is_kept():
            self._modules += rows

    def _is_kept(self) -> bool:
        return self._dirpath is not None and not self._is_closed and "store" not in self._stages.off

    def _try_to_write(self) -> None:
        """Writes what is pending, which stays so until it can be, or that has failed too often."""
        if self._is_kept() and self._begin is not None:
            self._stages.attempt("store", self._write_or_wait)

    def _write_or_wait(self) -> None:
        try:
            self._write()
        except OSError as error:
            if self._stages.strict or self._failures >= MOST_FAILED_WRITES:
                self._is_closed, self._writer = True, None
                self._events.clear()
                self._samples.clear()
                self._modules.clear()
                raise
            if not self._is_failing:
                log.warning("records could not be written; another try follows: %s", error)
            self._is_failing = True

    def _write(self) -> None:
        assert self._begin is not None
        writer = self._writer = self._writer or self._begin()
        # The writer keeps what it has taken in.
        samples, self._samples = self._samples, []
        writer.add(samples)
        rows, self._modules = self._modules, []
        writer.add_modules(rows)
        writer.flush()
        if samples:
            self._look_around(writer)
        if self._notes:
            writer.update_metadata(self._notes)
            self._notes = {}
        while self._events:
            writer.event(self._events[0])
            del self._events[0]
        self._failures, self._is_failing = 0, False

    def _look_around(self, writer: RunWriter) -> None:
        """Tells once that another run writes into the folder; a failed look is no failed write."""
        if self._is_hidden:
            return
        with suppress(OSError):
            self._is_hidden = writer.is_hidden()
        if self._is_hidden:
            log.warning(
                "another run has begun to write into %s: what this one records there is hidden"
                " from now on; give each run a dirpath of its own",
                self._dirpath,
            )

    def note(self, metadata: Mapping[str, Any]) -> None:
        self._notes |= metadata
        self.metadata |= metadata
        self._try_to_write()

    def describe(self, modules: Mapping[str, Mapping[str, Any]]) -> None:
        """Records `metadata_of` the modules; logs once, in a line a reason, what is unavailable."""
        self.note({"sites": modules})
        for limit in fields(Limits):
            what, cannot = limit.name, limit.metadata["logged"]
            named: dict[str, list[str]] = {}
            for name, known in modules.items():
                reason = known.get(what)
                if reason and (what, name, reason) not in self._warned:
                    self._warned.add((what, name, reason))
                    named.setdefault(reason, []).append(name)
            for reason, names in named.items() if ranks.rank() == 0 else ():
                log.warning("%s at %s: %s", cannot, shown(names), reason)

    def close(self, end: RunEnd = "finished") -> None:
        """Writes what is pending and how the run ended; what is recorded later is only logged."""
        self._failures = MOST_FAILED_WRITES  # there is no later try
        self._try_to_write()
        writer = self._writer
        if writer is not None:
            self._stages.attempt("store", lambda: writer.close(end))
        self._is_closed, self._writer = True, None


def leave_word(dirpath: str | os.PathLike[str] | None, why: str) -> None:
    """Writes into a run's folder why it could not be watched; an older run there stays as it is."""
    if dirpath is not None and ranks.rank() == 0 and not is_run(dirpath):
        with RunWriter(dirpath) as writer:
            writer.event(Event(0, "monitor_error", "", (), why))


def _missing(remembered: list[Event], recorded: Sequence[Event], step: int) -> list[Event]:
    """Returns the events that a folder lacks: alarms, switches and undoings."""
    found = {(event.step, event.site, event.rule) for event in recorded}
    lacking = [e for e in remembered if e.rule and (e.step, e.site, e.rule) not in found]
    before, now = (
        {(e.site, head): e.stabilizer for e in events if e.kind == "switch" for head in e.heads}
        for events in (recorded, remembered)
    )
    changed: dict[tuple[str, str], list[int]] = {}
    for site, head in sorted(before.keys() | now.keys()):
        stabilizer = now.get((site, head), "none")
        if stabilizer != before.get((site, head), "none"):
            changed.setdefault((site, stabilizer), []).append(head)
    reasons = {(event.site, event.stabilizer): event.why for event in remembered}
    for (site, stabilizer), heads in changed.items():
        why = reasons.get((site, stabilizer), "not so since the run was resumed")
        lacking.append(Event(step, "switch", site, tuple(heads), why, stabilizer=stabilizer))
    return lacking


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
