"""The runs below a folder: which there are, how each is doing, and whom to tell of alarms."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from guardbit.dashboards import marks
from guardbit.dashboards.live.watcher import RunWatcher
from guardbit.dashboards.names import place_of_run
from guardbit.dashboards.views import Json
from guardbit.records import Event
from guardbit.store import RunFollower, folder_of_run, is_run, read_events, runs_below

log = logging.getLogger("guardbit")

#: Seconds between two looks at the runs, and between two searches for new ones.
LOOK_EVERY, SEARCH_EVERY = 2.0, 10.0
#: Runs whose samples are read at a time: one that is opened, and those that are overlaid.
MOST_READ = 8
#: Runs drawn over one another.
MOST_OVERLAID = 4

#: Called with the name of a run and its first alarms that are new.
Tell = Callable[[str, Sequence[Event]], None]


@dataclass
class _Entry:
    """A run of the list."""

    path: Path
    name: str
    follower: RunFollower
    changed: int = -1
    event_files: tuple[str, ...] = ()
    alarms: list[Event] = field(default_factory=list)
    last_step: int = -1
    problem: str = ""


class RunList:
    """Keeps a list of the runs below a folder, or of the one that the folder is."""

    def __init__(self, folder: str | Path, tell: Tell | None = None) -> None:
        self.folder = Path(folder)
        self._tell = tell
        self._entries: list[_Entry] = []
        self._places: set[Path] = set()
        self._readers: OrderedDict[int, RunWatcher] = OrderedDict()
        self._searched = -SEARCH_EVERY
        self._is_first = True
        self._said: set[str] = set()
        self._lock = threading.RLock()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="guardbit-runs", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join(timeout=5)
        with self._lock:
            for reader in self._readers.values():
                reader.stop()

    def look(self) -> None:
        """Reads what is new of each run; called by the thread, once in a while."""
        if time.monotonic() - self._searched >= SEARCH_EVERY or not self._entries:
            self._search()
        for entry in list(self._entries):
            try:
                self._look_at(entry)
                entry.problem = ""
            # One broken run hides no other.
            except Exception as error:
                entry.problem = str(error) or type(error).__name__
                if entry.problem not in self._said:
                    self._said.add(entry.problem)
                    log.warning("cannot read %s: %r", entry.path, error)
        self._is_first = False

    def runs(self) -> Json:
        """Returns the list as the page asks for it, the latest first."""
        now = time.time()
        with self._lock:
            rows = [self._row(number, entry, now) for number, entry in enumerate(self._entries)]
        rows.sort(key=lambda row: row["seconds_silent"])
        return {"folder": str(self.folder), "runs": rows}

    def reader(self, number: int) -> RunWatcher:
        """Returns the watcher of a run, which begins to read where it does not yet."""
        with self._lock:
            if not 0 <= number < len(self._entries):
                raise LookupError(f"there is no run {number} in the list")
            if number not in self._readers:
                self._readers[number] = RunWatcher(self._entries[number].path)
                self._readers[number].start()
            self._readers.move_to_end(number)
            left = [
                self._readers.popitem(last=False)[1] for _ in range(len(self._readers) - MOST_READ)
            ]
            found = self._readers[number]
        for reader in left:
            reader.stop()
        return found

    def overlay(self, numbers: Sequence[int]) -> Json:
        """Returns the curves of some runs, to be drawn over one another."""
        if len(numbers) > MOST_OVERLAID:
            raise ValueError(f"{MOST_OVERLAID} runs at most are drawn at once, got {len(numbers)}")
        readers = [(number, self.reader(number)) for number in dict.fromkeys(numbers)]
        return {
            "runs": [
                {"id": number, "name": self._entries[number].name, **reader.largest()}
                for number, reader in readers
            ]
        }

    def _run(self) -> None:
        while not self._stop.is_set():
            try:
                self.look()
            # The list outlives whatever happens to the folder.
            except Exception as error:
                if str(error) not in self._said:
                    self._said.add(str(error))
                    log.warning("cannot look for runs in %s: %r", self.folder, error)
            self._stop.wait(LOOK_EVERY)

    def _search(self) -> None:
        self._searched = time.monotonic()
        is_one = self.folder.is_dir() and is_run(folder_of_run(self.folder))
        found = [self.folder] if is_one else runs_below(self.folder)
        for path in found:
            if path in self._places:
                continue
            name = str(path.relative_to(self.folder)) if path != self.folder else ""
            entry = _Entry(path, name or place_of_run(path).name, RunFollower(path))
            with self._lock:
                self._places.add(path)
                self._entries.append(entry)

    def _look_at(self, entry: _Entry) -> None:
        changed = os.stat(folder_of_run(entry.path)).st_mtime_ns
        if changed == entry.changed:
            return
        entry.follower.look()
        entry.last_step = max(entry.follower.last_step(), entry.last_step)
        files = entry.follower.event_files()
        if files != entry.event_files:
            events = marks.events_of(read_events(entry.path))
            alarms = [event for event, mark in marks.marked(events) if mark == "alarm"]
            known = {_identity(event) for event in entry.alarms}
            news = [alarm for alarm in alarms if _identity(alarm) not in known]
            entry.alarms, entry.event_files = alarms, files
            # What had happened before is no news.
            if self._tell is not None and news and not self._is_first:
                self._tell(entry.name, news)
        entry.changed = changed

    def _row(self, number: int, entry: _Entry, now: float) -> Json:
        written = entry.follower.last_written
        reader = self._readers.get(number)
        first = entry.alarms[0] if entry.alarms else None
        return {
            "id": number,
            "name": entry.name,
            "end": entry.follower.end,
            "seconds_silent": max(now - written, 0.0) if written is not None else 0.0,
            "last_step": entry.last_step,
            "problem": entry.problem,
            "alarms": len(entry.alarms),
            "first_alarm": first.step if first else None,
            "where": first.site if first else "",
            "heads": list(first.heads) if first else [],
            **({} if reader is None else reader.headline()),
        }


def _identity(event: Event) -> tuple[object, ...]:
    return event.step, event.site, event.heads, event.rule
