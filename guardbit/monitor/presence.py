"""A session's presence in its model: what waits for the end of a step, and how it leaves.

A forward and its recomputation in activation checkpointing must be alike. So nothing that changes
how calls run happens within a step: it waits until the step has ended.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from functools import partial

from guardbit.guard import undo_all
from guardbit.monitor.schedule import Schedule
from guardbit.monitor.sites import Instrumentation
from guardbit.monitor.stages import Stages


class Presence:
    """Changes how calls run between steps only, and takes the instrumentation out in the end.

    Attributes:
        is_closed: Whether the session is closed: nothing more is watched or switched.
    """

    def __init__(
        self, instrumentation: Instrumentation, schedule: Schedule, stages: Stages
    ) -> None:
        self._instrumentation = instrumentation
        self._schedule = schedule
        self._stages = stages
        self.is_closed = False
        self._is_leaving = self._wants_out = False
        self._waiting: list[Callable[[], None]] = []

    def after_step(self, function: Callable[[], None]) -> None:
        """Does something now, or when the step has ended that is under way."""
        if self._schedule.is_within_step:
            self._waiting.append(function)
        else:
            function()

    def step_ended(self) -> None:
        """Does what has waited for it."""
        while self._waiting:
            self._stages.always("switch", self._waiting.pop(0))
        if self._wants_out and self._instrumentation.is_installed:
            self._stand_back()

    def close(self) -> None:
        """Nothing more is watched or switched; the instrumentation stays until `leave`."""
        self.is_closed, self._schedule.is_sampled = True, False

    def leave(self) -> None:
        """Lets go of the model now, or when the step has ended if this is the first call."""
        self.close()
        if self._schedule.is_within_step and not self._is_leaving:
            self._is_leaving = self._wants_out = True
        else:
            self._let_go()

    def give_up(self) -> None:
        """Leaves the model alone for good, after an error."""
        is_within = not self.is_closed and self._schedule.is_within_step
        if is_within and not self._instrumentation.switched:
            self._wants_out = True
        else:
            self._stand_back()

    def _stand_back(self) -> None:
        """Leaves the model alone; until the session is closed, switched heads stay switched."""
        if self._instrumentation.switched and not self.is_closed:
            with suppress(Exception):
                self._instrumentation.rest(True)
        else:
            self._let_go()

    def _let_go(self) -> None:
        self._stages.always("close", partial(undo_all, [self._instrumentation.remove]))
