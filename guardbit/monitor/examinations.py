"""When a model's own calls are examined, and what is told of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from guardbit.doctor.finding import Preflight
from guardbit.kernels.attention_call import AttentionCall
from guardbit.monitor import ranks
from guardbit.monitor.journal import Journal
from guardbit.monitor.preflight import OwnCalls, calls_of, summary
from guardbit.monitor.schedule import Schedule
from guardbit.monitor.sites import Instrumentation
from guardbit.monitor.stages import log
from guardbit.records import Event


class Examinations:
    """Has the doctor examine a model's own calls, and tells in a line what it found.

    Args:
        model: The model.
        instrumentation: Of the model.
        schedule: Says whether a step has begun.
        journal: Takes a note of what was found.
        record: Takes events.
        seconds: After how long the examination of the first sampled step begins nothing more; 0
            for none.
    """

    def __init__(
        self,
        model: nn.Module,
        instrumentation: Instrumentation,
        schedule: Schedule,
        journal: Journal,
        record: Callable[[Event], None],
        seconds: float,
    ) -> None:
        self._model, self._instrumentation = model, instrumentation
        self._schedule, self._journal, self._record = schedule, journal, record
        self._seconds = seconds
        # The calls of the step that is examined; None once that is done.
        self._calls = OwnCalls() if seconds > 0 and ranks.rank() == 0 else None
        self._found_before = ""

    @property
    def wants_calls(self) -> bool:
        """Whether calls of the current step are to be examined."""
        return self._calls is not None

    def take(self, call: AttentionCall) -> None:
        """Takes a call of a sampled step."""
        if self._calls is not None:
            self._calls.take(call.q, call.k, call.v, call.spec, call.kernel)

    def batch(self, batch: Any, seconds: float) -> Preflight | None:
        """Examines the calls of a forward, see `MonitorSession.preflight`."""
        self._instrumentation.rest(False)  # calls at rest are not read
        try:
            calls = calls_of(self._model, batch)
        finally:
            self._instrumentation.rest(True)
        return self._examine(calls, seconds, 0) if ranks.rank() == 0 else None

    def step(self, step: int) -> None:
        """Examines the calls of a sampled step that has ended, once."""
        calls = self._calls
        if calls:
            self._calls = None
            self._examine(calls, self._seconds, step)

    def tell_earlier(self, step: int) -> None:
        """Records what was found before the first step, when nothing is written."""
        if self._found_before:
            why, self._found_before = self._found_before, ""
            self._record(Event(step, "advisory", "", (), why, rule="preflight"))

    def _examine(self, calls: OwnCalls, seconds: float, step: int) -> Preflight:
        found = calls.examine(seconds)
        why = summary(found)
        self._journal.note({"preflight": [why, *map(str, found.findings)]})
        if not found.is_broken:
            log.info("%s", why)
        elif self._schedule.step is None and self._schedule.last_ended is None:
            log.warning("%s", why)
            self._found_before = why
        else:
            self._record(Event(step, "advisory", "", (), why, rule="preflight"))
        return found
