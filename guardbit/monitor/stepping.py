"""Notices a loop that tells its steps wrongly, so that nothing of it would be watched."""

from __future__ import annotations

from collections.abc import Callable

#: So many steps in a row are no accident: one may be left out after an error that the loop caught.
_IN_A_ROW = 3

#: Nobody has as many micro-batches in a step.
_MANY = 1024

_HOW = (
    "call begin_batch(step) before each forward and end_step() after the optimizer's step, or use"
    " `with session.step(step)`"
)


class Stepping:
    """Follows the steps that a session is told of, and tells once what is wrong with them.

    Args:
        tell: Takes one line.
    """

    def __init__(self, tell: Callable[[str], None]) -> None:
        self._tell = tell
        self._last: int | None = None
        self._is_open = self._was_abandoned = self._has_any_ended = False
        self._not_ended = self._repeated = self._batches = 0
        self._said: set[str] = set()

    def begin(self, step: int) -> None:
        """A micro-batch of a step begins."""
        if self._is_open and step == self._last:
            self._batches += 1
        else:
            self._not_ended += self._is_open
            if not self._was_abandoned:
                is_same = step == self._last and not self._is_open
                self._repeated = self._repeated + 1 if is_same else 0
            self._batches = 1
        if self._not_ended == _IN_A_ROW:
            self._tell_not_ended(
                f"{_IN_A_ROW} steps in a row have begun and not ended, the last of them step"
                f" {self._last}"
            )
        if self._batches > _MANY:
            self._tell_not_ended(f"step {step} has begun {_MANY} times and not ended")
        if self._repeated == _IN_A_ROW - 1:
            self._once(
                "repeated",
                f"step {step} has begun and ended {_IN_A_ROW - 1} times, and begins again: it is"
                " measured once only; pass the number of the optimizer step, which grows",
            )
        self._last, self._is_open, self._was_abandoned = step, True, False

    def end(self) -> None:
        """A step ends."""
        self._is_open, self._not_ended = False, 0
        self._has_any_ended = self._has_any_ended or self._last is not None

    def abandon(self) -> None:
        """A step is forgotten, and may begin again."""
        self._is_open, self._not_ended, self._was_abandoned = False, 0, True

    def use(self, what: str) -> None:
        """Something is called that belongs to a step.

        Args:
            what: Its name.
        """
        if self._last is None:
            self._once("not begun", f"{what}() was called, but no step has begun: {_HOW}")

    def close(self) -> None:
        """The session is closed."""
        if self._last is None:
            self._once(
                "not begun",
                f"no step was watched, because none has begun (in a loop of your own: {_HOW})",
            )
        elif not self._has_any_ended and not self._was_abandoned:
            self._tell_not_ended(f"steps have begun, up to step {self._last}, and none has ended")

    def _tell_not_ended(self, what: str) -> None:
        self._once(
            "not ended",
            f"{what}: nothing of that is measured (in a loop of your own: {_HOW}; with a framework:"
            " let it step the optimizer)",
        )

    def _once(self, what: str, line: str) -> None:
        if what not in self._said:
            self._said.add(what)
            self._tell(line)
