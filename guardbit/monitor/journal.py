"""What a monitored run tells: events in the log, and in its folder events, samples and facts."""

from __future__ import annotations

import importlib.metadata
import logging
import os
import platform
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from guardbit.monitor import ranks
from guardbit.monitor.sites import Site
from guardbit.monitor.stages import Stages
from guardbit.records import Event, Sample
from guardbit.store import RunWriter, is_run

log = logging.getLogger("guardbit")

_PACKAGES = ("guardbit", "torch", "lightning", "triton")


class Journal:
    """Logs a run's events and writes its folder, where one is kept; the stage "store".

    Args:
        dirpath: Folder of the telemetry; None to keep none (other ranks than 0).
        settings: The monitor's, for the run's metadata.
        stages: Take the errors of writing.
    """

    def __init__(
        self,
        dirpath: str | os.PathLike[str] | None,
        settings: Mapping[str, Any],
        stages: Stages,
    ) -> None:
        self._dirpath = dirpath
        self._settings = settings
        self._stages = stages
        self._writer: RunWriter | None = None
        self._described: list[str] = []

    def open(
        self, first_step: int, remembered: Callable[[], Iterable[Event]], is_resumed: bool
    ) -> bool:
        """Opens the folder, unless it is open or there is none to keep.

        Args:
            first_step: The step that the run goes on from.
            remembered: Makes the events that the journal of a new folder begins with.
            is_resumed: Whether the run goes on from a checkpoint.

        Returns:
            Whether the remembered events were told.

        Raises:
            ValueError: If the path is no place for a run's telemetry.
        """
        if self._writer is not None or self._dirpath is None or "store" in self._stages.off:
            return False
        try:
            goes_on = is_run(self._dirpath)
            self._writer = RunWriter(
                self._dirpath, metadata=self._metadata(), start_step=max(0, first_step - 1)
            )
        except OSError as error:
            self._stages.fail("store", error)
            return False
        if not goes_on:
            for event in remembered():
                self.record(event)
        elif not is_resumed:
            log.warning(
                "%s holds a run already, and this one does not go on from its checkpoint: what was"
                " recorded from step %d on gives way to it; another dirpath keeps both",
                self._dirpath,
                first_step,
            )
        return not goes_on

    def record(self, event: Event) -> None:
        """Logs an event and writes it down."""
        if ranks.rank() == 0:
            where = f" {event.site} heads {list(event.heads)}" if event.site else ""
            verdict = f" {event.rule}" if event.kind == "verdict" else ""
            switch = f" to {event.stabilizer}" if event.stabilizer else ""
            what = f"{event.kind}{where}{verdict}{switch}"
            log.warning("step %d: %s: %s", event.step, what, event.why)
        writer = self._writer
        if writer is not None:
            self._stages.attempt("store", lambda: writer.event(event))

    def add(self, samples: list[Sample]) -> None:
        """Writes samples down, to be read at once."""
        writer = self._writer
        if writer is not None:
            self._stages.attempt("store", lambda: writer.add(samples))
            self._stages.attempt("store", writer.flush)

    def describe(self, sites: Mapping[str, Site], is_policy_set: bool) -> None:
        """Tells of the sites, where new ones are known: kernels, what cannot be had, and why."""
        if list(sites) == self._described:
            return
        facts = {
            name: {
                "heads": site.num_heads,
                "kernels": sorted({kernel for _, kernel in site.launches}),
                "not_switchable": site.refusal,
                "weights_unavailable": site.settle_layout(),
                "errors_unavailable": site.errors_unavailable,
            }
            for name, site in sites.items()
        }
        self._described = list(sites)
        for name, known in facts.items():
            for what in ("not_switchable", "weights_unavailable", "errors_unavailable"):
                if known[what]:
                    log.info("%s: %s: %s", name, what.replace("_", " "), known[what])
        refusals = [known["not_switchable"] for known in facts.values()]
        if is_policy_set and refusals and all(refusals):
            count, reason = len(refusals), refusals[0]
            log.warning("no alarm can switch any of the %d attention sites: %s", count, reason)
        writer = self._writer
        if writer is not None:
            self._stages.attempt("store", lambda: writer.update_metadata({"sites": facts}))

    def close(self) -> None:
        """Writes what is left."""
        if self._writer is not None:
            self._stages.attempt("store", self._writer.close)

    def _metadata(self) -> dict[str, Any]:
        versions = {"python": platform.python_version()}
        versions |= {name: _version(name) for name in _PACKAGES}
        return {"settings": dict(self._settings), "versions": versions}


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
