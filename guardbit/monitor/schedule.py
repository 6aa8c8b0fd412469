"""Where a run stands in its optimizer steps, and which of them are sampled."""

from __future__ import annotations

import operator


class Schedule:
    """Counts steps.

    Args:
        cadence: Steps 0, n, 2n, ... are sampled. If step numbers jump, the first step at or after
            each of these is sampled.

    Attributes:
        step: The step that began last; None before the first, and when it was abandoned.
        last_ended: The step that ended last; None before the first.
        is_sampled: Whether the step that has begun is sampled.
    """

    def __init__(self, cadence: int) -> None:
        self._cadence = cadence
        self.step: int | None = None
        self.last_ended: int | None = None
        self.is_sampled = False
        self._is_first = True

    def begin(self, step: int, is_wanted: bool) -> None:
        """Begins a micro-batch of a step.

        Args:
            step: The step.
            is_wanted: See `is_due`.
        """
        if step != self.step:
            self.is_sampled = self.is_due(step, is_wanted)
            self.step = step

    def end(self) -> tuple[int, bool] | None:
        """Ends the step; returns it and whether it was sampled, or None if none has begun."""
        if self.step is None:
            return None
        self.last_ended = self.step
        was_sampled, self.is_sampled = self.is_sampled, False
        self._is_first = False
        return self.step, was_sampled

    def abandon(self) -> None:
        """Forgets the step that has not ended; it may begin again."""
        self.step, self.is_sampled = None, False

    @property
    def is_within_step(self) -> bool:
        """Whether a step has begun and not ended."""
        return self.step is not None and self.step != self.last_ended

    def is_due(self, step: int, is_wanted: bool) -> bool:
        """Whether a step is to be sampled: the first at or after each multiple of the cadence.

        Args:
            step: The step.
            is_wanted: Whether the very first step is sampled whatever its number. No later step is,
                because ranks that call attention at different times have to agree.
        """
        if self._is_first and is_wanted:
            return True
        previous = step - 1 if self.last_ended is None else self.last_ended
        return step % self._cadence == 0 or step // self._cadence != previous // self._cadence


def checked_step(step: int) -> int:
    """Returns the number of a step.

    Raises:
        ValueError: If it is no whole number from 0.
    """
    try:
        checked = operator.index(step)
    except TypeError:
        checked = -1
    if checked < 0:
        raise ValueError(f"step is {step!r}; it must be a whole number, 0 or more")
    return checked
