"""From a sampled step to the samples that all ranks judge alike."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from guardbit.monitor import ranks
from guardbit.monitor.detectors import Detectors
from guardbit.monitor.exchange import Exchange
from guardbit.monitor.journal import Journal, metadata_of
from guardbit.monitor.measure import Measurement, NoAttentionSeenError, Sent, joined
from guardbit.monitor.notices import MissedModules, Notices
from guardbit.monitor.sites import Instrumentation
from guardbit.monitor.stages import Stages
from guardbit.monitor.switching import Switching
from guardbit.records import Event, Sample


class Sampling:
    """Takes what was measured, in two halves: numbers from a GPU arrive in between."""

    def __init__(
        self,
        instrumentation: Instrumentation,
        measurement: Measurement,
        exchange: Exchange,
        detectors: Detectors,
        switching: Switching,
        notices: Notices,
        journal: Journal,
        stages: Stages,
        record: Callable[[Event], None],
        is_guarded: bool,
        cadence: int,
    ) -> None:
        self._instrumentation, self._measurement = instrumentation, measurement
        self._exchange, self._detectors, self._switching = exchange, detectors, switching
        self._notices, self._journal, self._stages = notices, journal, stages
        self._record, self._is_guarded = record, is_guarded
        self._missed = MissedModules(cadence)
        self._described: dict[str, dict[str, Any]] = {}

    def send(self, step: int, loss_scale: float) -> Sent | None:
        """Reduces what a step measured over ranks and sends it to the host."""
        attempt = self._stages.attempt
        columns = attempt("metrics", lambda: self._columns(step, loss_scale)) or {}
        return attempt("samples", lambda: self._measurement.send(columns, step))

    def receive(self, sent: Sent | None, ended: int) -> list[Sample]:
        """Returns the samples of all ranks; every rank calls it."""
        attempt = self._stages.attempt
        samples: list[Sample] = []
        if sent is not None:
            samples = attempt("samples", lambda: self._measurement.receive(sent)) or []
        # Ranks may have had different kinds of batches, but a switch is made on all. A batch whose
        # calls cannot be switched is no reason not to switch the next ones.
        known = self._exchange.share(samples, ended)
        self._switching.refusals = known.refusals
        self._switching.asked_elsewhere = known.asked_elsewhere
        if ranks.world_size() > 1:
            attempt("metrics", lambda: self._describe(known.metadata))
        return joined(known.samples)

    def write_what_is_left(self, ended: int) -> None:
        """Writes the scalars of steps since the last sampled one, and which modules none met."""
        attempt = self._stages.attempt
        attempt("metrics", self._describe_never_met)
        left = attempt("samples", lambda: self._measurement.send({}, ended))
        if left is not None:
            self._journal.add(attempt("samples", lambda: self._measurement.receive(left)) or [])

    def _columns(self, step: int, loss_scale: float) -> dict[tuple[str, str], Tensor]:
        try:
            columns = self._measurement.columns(
                loss_scale, usable="capture" not in self._stages.off
            )
        except NoAttentionSeenError as error:
            # A step may call no attention: one that was skipped, or that of a discriminator.
            why = self._notices.why_nothing
            if self._stages.strict:
                raise NoAttentionSeenError(why) from error
            if self._instrumentation.lost():
                self._notices.none_called(step, why, "lost")
            elif self._notices.first("unseen"):
                self._record(Event(step, "monitor_error", "", (), why))
            return {}
        sites, now = self._instrumentation.sites, self._instrumentation.latest_step
        why_none = self._missed.take(sites, now)
        if why_none is not None:
            self._notices.none_called(step, why_none)
        self._exchange.metadata = self._facts()
        self._exchange.tell_what_is_lacking()
        if ranks.world_size() == 1:  # else once they know of one another's
            self._describe(self._exchange.metadata)
        return columns

    def _describe_never_met(self) -> None:
        if self._missed.end(self._instrumentation.sites):
            self._describe(self._described | self._facts())  # of other ranks, what they said last

    def _facts(self) -> dict[str, dict[str, Any]]:
        why_passed_by = self._missed.why_passed_by
        self._notices.note_missed(why_passed_by)
        return metadata_of(self._instrumentation.sites, why_passed_by)

    def _describe(self, facts: dict[str, dict[str, Any]]) -> None:
        self._described = facts
        self._journal.describe(facts, self._is_guarded)
        self._detectors.normalised = frozenset(
            name for name, known in facts.items() if known["normalises_queries"]
        )
