"""Notices a loop that tells its steps wrongly, so that nothing of it would be watched."""

from __future__ import annotations

from collections.abc import Callable

#: So many steps in a row are no accident: one may be left out after an error that the loop caught.
_IN_A_ROW = 3

_HOW = "call begin_batch(step) before and end_step() after each, or use `with session.step(step)`"


class Stepping:
    """Follows the steps that a session is told of, and tells once what is wrong with them.

    Args:
        tell: Takes one line.
    """

    def __init__(self, tell: Callable[[str], None]) -> None:
        self._tell = tell
        self._last: int | None = None
        self._not_ended = self._repeated = 0
        self._has_ended = True
        self._said: set[str] = set()

    def begin(self, step: int) -> None:
        """A micro-batch of a step begins."""
        if self._has_ended:
            self._repeated = self._repeated + 1 if step == self._last else 0
            self._not_ended = 1
        elif step != self._last:
            self._not_ended += 1
        self._last, self._has_ended = step, False
        if self._not_ended == _IN_A_ROW:
            self._once(
                "not ended",
                f"{_IN_A_ROW} steps have begun and not ended, up to step {step}: nothing of them is"
                f" measured; {_HOW}",
            )
        if self._repeated == _IN_A_ROW - 1:
            self._once(
                "repeated",
                f"step {step} has begun and ended {_IN_A_ROW} times: it is measured once only; pass"
                " the number of the optimizer step, which grows",
            )

    def end(self) -> None:
        """A step ends, or is abandoned."""
        self._has_ended = True

    def use(self, what: str) -> None:
        """Something is called that belongs to a step.

        Args:
            what: Its name.
        """
        if self._last is None:
            self._once("not begun", f"{what} came and no step has begun: {_HOW}")

    def close(self) -> None:
        """The session is closed."""
        if self._last is None:
            self._once(
                "not begun",
                f"no step was watched, because none has begun (in a loop of your own: {_HOW})",
            )

    def _once(self, what: str, line: str) -> None:
        if what not in self._said:
            self._said.add(what)
            self._tell(line)
