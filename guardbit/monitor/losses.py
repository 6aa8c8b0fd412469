"""The numbers that a training loop knows itself: its losses, and the norm of the gradient."""

from __future__ import annotations

from collections.abc import Callable
from numbers import Complex, Real

from torch import Tensor

from guardbit.catalog import VALIDATION_LOSS
from guardbit.monitor.journal import Journal
from guardbit.monitor.measure import Measurement
from guardbit.monitor.schedule import Schedule
from guardbit.monitor.stages import Stages
from guardbit.records import Sample


class Losses:
    """Takes these numbers; what is no single number is left out, and told once."""

    def __init__(
        self,
        measurement: Measurement,
        journal: Journal,
        schedule: Schedule,
        stages: Stages,
        tell: Callable[[str], None],
    ) -> None:
        self._measurement = measurement
        self._journal = journal
        self._schedule = schedule
        self._stages = stages
        self._tell = tell
        self._told: set[str] = set()

    def loss(self, value: Tensor | float, factor: float) -> None:
        """Takes the loss of the current micro-batch, and a factor for it."""
        step = self._schedule.step
        if step is not None:
            self._take("loss", value, lambda: self._measurement.loss(step, value, factor))

    def grad_norm(self, value: Tensor | float) -> None:
        """Takes the gradient's norm of the current step."""
        step = self._schedule.step
        if step is not None:
            self._take("grad_norm", value, lambda: self._measurement.grad_norm(step, value))

    def validation_loss(self, value: Tensor | float) -> None:
        """Records the loss of a validation, at the last step that has ended."""
        step = self._schedule.last_ended or 0

        def record() -> None:
            self._journal.add([Sample(step, "", -1, VALIDATION_LOSS, (float(value),))])

        self._take("validation_loss", value, record)

    def _take(self, name: str, value: object, take: Callable[[], None]) -> None:
        def take_number() -> None:
            if _is_number(value):
                take()
            elif name not in self._told:
                self._told.add(name)
                kind = type(value).__name__
                self._tell(f"{name} is a {kind} that is no single real number: it is left out")

        self._stages.attempt(name, take_number)


def _is_number(value: object) -> bool:
    if isinstance(value, Tensor):
        return value.numel() == 1 and not value.is_complex() and not value.is_meta
    try:
        float(value)  # pyright: ignore[reportArgumentType]
    except Exception:  # whatever the object does
        return False
    return not isinstance(value, Complex) or isinstance(value, Real)
