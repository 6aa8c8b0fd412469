"""Watches a run's folder in a thread of its own, and answers what the page asks about it."""

from __future__ import annotations

import logging
import threading
import time
from pathlib import Path

from guardbit.dashboards.marks import events_of
from guardbit.dashboards.names import place_of_run
from guardbit.dashboards.views import Json, RunViews
from guardbit.store import RunFollower, read_events, read_metadata

log = logging.getLogger("guardbit")

#: Seconds between two looks at the folder, and between two pictures while a long run is read.
LOOK_EVERY = 1.0
#: Seconds without anything new after which a run does not count as running, as in the pages.
SILENT_AFTER = 120.0


class RunWatcher:
    """Keeps what is known of a run, from before it has written anything until after it is gone."""

    def __init__(self, folder: str | Path, *, buckets: int = 400) -> None:
        self.folder = Path(folder)
        self._follower = RunFollower(self.folder)
        self._views = RunViews(buckets)
        self._event_files: tuple[str, ...] = ()
        self._sessions = 0
        self._problem = ""
        self._reading = False
        self._lock = threading.RLock()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="guardbit-live", daemon=True)
        self._take_picture()

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Ends watching; what is known stays."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join(timeout=5)

    def look(self) -> None:
        """Reads what is new; called by the thread, once in a while."""
        if self._follower.look():
            with self._lock:
                self._views.forget_samples()
        changed = False
        pictured = time.monotonic()
        self._reading = True
        try:
            for batch in self._follower.batches():
                with self._lock:
                    self._views.take(batch)
                changed = True
                if time.monotonic() - pictured > LOOK_EVERY:
                    self._take_picture()
                    pictured = time.monotonic()
                if self._stop.is_set():
                    return
        finally:
            self._reading = False
        try:
            changed |= self._read_metadata(changed)
            changed |= self._read_events()
        finally:
            # Samples are shown whatever is wrong with the events.
            if changed:
                self._take_picture()

    def state(self, since: int, step: int | None) -> Json:
        """Returns the whole picture, or only how the run is doing where nothing has changed."""
        with self._lock:
            if since == self._views.version and step is None:
                return {"version": since, "status": self._status()}
            return {**self._views.picture(step), "status": self._status()}

    def head(self, layer: int, head: int) -> Json:
        """Returns every indicator of one head."""
        with self._lock:
            return self._views.head(layer, head)

    def curves(self, indicator: str) -> Json:
        """Returns one indicator: the heads that matter most, and the range of all."""
        with self._lock:
            return self._views.curves(indicator)

    def largest(self) -> Json:
        """Returns the loss and the largest head's values, each over steps and over time."""
        with self._lock:
            return self._views.largest(self._follower.clock)

    def headline(self) -> Json:
        """Returns the outcome so far and its sentence; nothing before the first sample."""
        with self._lock:
            if not self._views.has_samples:
                return {}
            picture = self._views.picture(None)
        written = self._follower.last_written
        is_silent = written is not None and time.time() - written > SILENT_AFTER
        said = picture["headline" if self._follower.end or is_silent else "headline_running"]
        return {"headline": said, "outcome": picture["outcome"]}

    def _run(self) -> None:
        while not self._stop.is_set():
            try:
                self.look()
                self._problem = ""
            # The page outlives whatever happens to the folder: it says so and looks again.
            except Exception as error:
                if str(error) != self._problem:
                    log.warning("cannot read %s: %r", self.folder, error)
                self._problem = str(error) or type(error).__name__
            self._stop.wait(LOOK_EVERY)

    def _read_metadata(self, has_new_samples: bool) -> bool:
        """Reads what describes the run anew, which comes with samples; returns whether it has."""
        if self._follower.num_sessions == self._sessions and not has_new_samples:
            return False
        metadata = read_metadata(self.folder)
        with self._lock:
            self._views.metadata = metadata
            self._sessions = self._follower.num_sessions
        return True

    def _read_events(self) -> bool:
        """Reads the events anew where their files have changed; returns whether they have."""
        files = self._follower.event_files()
        if files == self._event_files:
            return False
        events = events_of(read_events(self.folder))
        with self._lock:
            self._views.events, self._event_files = events, files
        return True

    def _take_picture(self) -> None:
        with self._lock:
            self._views.take_picture(place_of_run(self.folder).name)

    def _status(self) -> Json:
        follower = self._follower
        written = follower.last_written
        return {
            "folder": str(self.folder),
            "samples": self._views.has_samples,
            "seconds_silent": None if written is None else max(time.time() - written, 0.0),
            "read": follower.bytes_read / max(follower.bytes_found, 1) if self._reading else 1.0,
            "end": follower.end,
            "problem": self._problem,
        }
