"""Where a run stands in its optimizer steps, and which of them are sampled."""

from collections.abc import Callable

#: So many steps in a row are no accident: one may be left out after an error that the loop caught.
_IN_A_ROW = 3
#: So many micro-batches of the first step are no accumulation.
_MANY = 1000

_NUMBERS = "pass the number of the optimizer step, which grows over all epochs"
_HOW = (
    "put `with session.step(step):` around each step, or call begin_batch(step) before each forward"
    " and end_step() after the optimizer's step"
)


class Schedule:
    """Counts steps, and warns once of each way in which a loop does not begin or end them."""

    def __init__(
        self,
        cadence: int,
        warn: Callable[[str], None] = lambda line: None,
        wants_first: Callable[[], bool] = lambda: False,
    ) -> None:
        self._cadence, self._warn, self._wants_first = cadence, warn, wants_first
        self.step: int | None = None  # that began last; None before the first, and if abandoned
        self.last_ended: int | None = None
        self.is_sampled = False  # whether the step that has begun is
        self._has_any_ended = False
        # For the warnings: the step that began last, abandoned or not, and what became of it.
        self._last: int | None = None
        self._is_open = self._was_abandoned = False
        self._not_ended = self._repeated = self._batches = 0
        self._warned: set[str] = set()

    def begin(self, step: int) -> None:
        # Done first, before anything can fail: all ranks have to agree on which steps are sampled.
        if step != self.step:
            self.is_sampled = self.is_due(step)
            self.step = step
        self._follow(step)

    def end(self) -> tuple[int, bool] | None:
        """Ends the step; returns it and whether it was sampled, or None if none has begun."""
        self.use("end_step")
        self._is_open, self._not_ended = False, 0
        if self.step is None:
            return None
        self.last_ended = self.step
        was_sampled, self.is_sampled = self.is_sampled, False
        self._has_any_ended = True
        return self.step, was_sampled

    def abandon(self) -> None:
        """Forgets the step that has not ended; it may begin again."""
        self.step, self.is_sampled = None, False
        self._is_open, self._not_ended, self._was_abandoned = False, 0, True

    @property
    def is_within_step(self) -> bool:
        return self.step is not None and self.step != self.last_ended

    def is_due(self, step: int) -> bool:
        """Whether to sample a step: the first at or after each multiple of the cadence."""
        if not self._has_any_ended and self._wants_first():
            return True
        previous = step - 1 if self.last_ended is None else self.last_ended
        return step % self._cadence == 0 or step // self._cadence != previous // self._cadence

    def is_counted(self, step: int) -> bool:
        """Whether compiled calls are counted in a step between samples, each time a step later."""
        turn, rest = divmod(step, self._cadence)
        return self._cadence > 1 and rest == 1 + turn % (self._cadence - 1)

    def use(self, what: str) -> None:
        """Warns where something is called that belongs to a step, and none has begun."""
        if self._last is None:
            self._once("not begun", f"{what}() was called, but no step has begun: {_HOW}")

    def close(self) -> None:
        """Warns where no step has begun, or none has ended."""
        if self._last is None:
            self._once(
                "not begun",
                f"no step was watched, because none has begun: {_HOW}",
            )
        elif not self._has_any_ended and not self._was_abandoned:
            self._not_measured(f"steps have begun, up to step {self._last}, and none has ended")

    def _follow(self, step: int) -> None:
        if self.last_ended is not None and step < self.last_ended:
            self._once(
                "set back",
                f"step {step} begins after step {self.last_ended} has ended: its samples replace"
                f" earlier ones, which sums and baselines still hold; {_NUMBERS}",
            )
        if not (self._is_open and step == self._last):
            self._not_ended += self._is_open
            if not self._was_abandoned:
                self._repeated = self._repeated + 1 if step == self._last else 0
        self._batches += not self._has_any_ended
        if self._batches == _MANY:
            self.is_sampled = False  # the run is not to be slowed for nothing
            self._not_measured(f"{_MANY} batches have begun and no step has ended")
        if self._not_ended == _IN_A_ROW:
            self._not_measured(
                f"{_IN_A_ROW} steps in a row have begun and not ended, the last of them step"
                f" {self._last}"
            )
        if self._repeated == _IN_A_ROW - 1:
            self._once(
                "repeated",
                f"step {step} has begun and ended {_IN_A_ROW - 1} times, and begins again: it is"
                f" measured once only; {_NUMBERS}",
            )
        self._last, self._is_open, self._was_abandoned = step, True, False

    def _not_measured(self, what: str) -> None:
        self._once(
            "not ended",
            f"{what}: they are not measured (in a loop of your own: {_HOW}; with a framework: let"
            " it step the optimizer)",
        )

    def _once(self, what: str, line: str) -> None:
        if what not in self._warned:
            self._warned.add(what)
            self._warn(line)
