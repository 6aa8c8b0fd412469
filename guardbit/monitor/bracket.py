"""The context manager of a plain training loop: one optimizer step."""

from __future__ import annotations

from typing import Generic, Protocol, TypeVar

from guardbit import guard
from guardbit.guard import Guarded
from guardbit.records import Alarm


class Stepped(Protocol):
    """What is told of steps: the session."""

    def begin_batch(self, step: int) -> None:
        """Begins a step, or a further micro-batch of it."""

    def end_step(self) -> list[Alarm]:
        """Ends the step."""
        ...

    def abandon_step(self) -> None:
        """Forgets a step that has not ended."""

    def _contain(self, error: Exception, where: str) -> None: ...


S = TypeVar("S", bound=Stepped)


def _abandon(bracket: StepBracket[Stepped]) -> None:
    bracket.session.abandon_step()  # does nothing once the step has ended


class StepBracket(Guarded, Generic[S]):
    """One optimizer step of a plain training loop, see `MonitorSession.step`.

    Args:
        session: The session.
        step: The step's number; None if it could not begin, and nevertheless ends.
    """

    def __init__(self, session: S, step: int | None) -> None:
        self.session, self._step = session, step

    @guard.method(lambda bracket: bracket.session)
    def __enter__(self) -> S:
        if self._step is not None:
            self.session.begin_batch(self._step)
        return self.session

    @guard.method(lambda _: None, at_last=_abandon)
    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.session.end_step()
        else:
            self.session.abandon_step()

    def _contain(self, error: Exception, where: str) -> None:
        """See `guard.Contains`."""
        self.session._contain(error, where)
