"""Where a run stands in its optimizer steps, and which of them are sampled."""

from __future__ import annotations

import operator

# Micro-batches of one step whose random numbers never overlap; more than anybody accumulates.
_MICRO_BATCHES = 1024


class Schedule:
    """Counts steps and micro-batches.

    Args:
        cadence: Steps 0, n, 2n, ... are sampled, and where steps are counted in jumps the first one
            at or after each of these.

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
        self._micro_batch = 0
        self._is_first = True

    def begin(self, step: int, is_wanted: bool) -> None:
        """Begins a micro-batch of a step.

        Args:
            step: The step.
            is_wanted: See `is_due`.
        """
        if step == self.step:
            self._micro_batch += 1
        else:
            self.is_sampled = self.is_due(step, is_wanted)
            self.step, self._micro_batch = step, 0

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

    @property
    def random_offset(self) -> int:
        """Where random numbers of the micro-batch start, also in a forward that is recomputed."""
        return (self.step or 0) * _MICRO_BATCHES + self._micro_batch

    def is_due(self, step: int, is_wanted: bool) -> bool:
        """Whether a step is to be sampled: the first at or after each multiple of the cadence.

        Args:
            step: The step.
            is_wanted: Whether the first step of all is to be sampled whatever its number. No later
                one: ranks that call attention at different times have to agree on it.
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
