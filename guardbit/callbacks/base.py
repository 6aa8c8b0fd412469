"""What the callbacks of all frameworks share: their guard, and how their sessions begin and end."""

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NoReturn, TypeVar

from torch import Tensor
from torch.optim import Optimizer

from guardbit import guard
from guardbit.guard import Guarded, undo_all
from guardbit.monitor.session import Session
from guardbit.monitor.stages import log
from guardbit.monitor.unseen import UnseenAttentionError
from guardbit.records import RunEnd

S = TypeVar("S", bound=Session)

#: What one framework alone calls -> what to use there.
_INSTEAD = {
    "on_init_end": ": with Hugging Face's Trainer use HuggingFaceMonitor, or to correct heads"
    " HuggingFaceMonitor(policy=Policy())",
    **dict.fromkeys(("setup", "on_exception"), ": with Lightning's Trainer use AttentionMonitor"),
}


class GuardedCallback(Guarded):
    """A framework's callback; every method that the framework calls is guarded."""

    session: Session | None = None  # the session of the run that goes on, or None
    strict: bool = False  # whether the monitor's own errors are raised

    def __getattr__(self, name: str) -> NoReturn:
        """Raises; says what to use instead if the other framework calls this callback."""
        kind, instead = type(self).__name__, _INSTEAD.get(name, "")
        raise AttributeError(f"{kind!r} object has no attribute {name!r}{instead}")

    def _contain(self, error: Exception, where: str) -> None:
        if self.strict:
            raise error
        self._is_void = where == "__init__"
        if self.session is not None:
            self.session._contain(error, where)
        else:
            log.unwatched(error)


def end(callback: GuardedCallback, how: RunEnd = "interrupted") -> None:
    """Ends the session of a callback, if it has one, which keeps it until it is closed."""
    session = callback.session
    if session is not None:
        # The step that has begun will not end any more. In a run that finished, none may have.
        first = [session._schedule.close] if how == "finished" else []
        undo_all([lambda: session.close(how), session.abandon_step, *first])
        callback.session = None


class StepsLeftOut:
    """Leaves out optimizers' steps: their gradients go once nothing but the step reads them."""

    def __init__(self, optimizers: Iterable[Optimizer]) -> None:
        self.parameters: Sequence[Tensor] = ()  # those of the step to be left out
        self._handles = [one.register_step_pre_hook(self._before) for one in optimizers]

    def remove(self) -> None:
        """Takes the hooks off the optimizers."""
        for handle in self._handles:
            handle.remove()

    def _before(self, optimizer: Optimizer, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        own, *rest = args
        closure = rest[0] if rest else kwargs.get("closure")
        if closure is None:
            return self._drop()

        def run() -> Any:  # Lightning's backward and callbacks run in it
            loss = closure()
            self._drop()
            return loss

        if rest:
            return (own, run, *rest[1:]), kwargs
        return args, {**kwargs, "closure": run}

    def _drop(self) -> None:
        for parameter in self.parameters:
            parameter.grad = None
        self.parameters = ()


def guarded(event: Callable[..., None]) -> Callable[..., None]:
    """Guards a method that a framework calls; it runs only with a session, which it gets."""

    @functools.wraps(event)
    def with_session(self: GuardedCallback, *args: Any, **kwargs: Any) -> None:
        session = self.session
        if session is not None:
            session.always("callback", lambda: event(self, session, *args, **kwargs))

    return guard.method()(with_session)


def watched(strict: bool, make: Callable[[], S]) -> S | None:
    """Makes a session; returns None, with a warning, if the run has to go on without one."""
    session: S | None = None
    try:
        session = make()
        return None if session._is_void else session
    except UnseenAttentionError as error:
        if strict:
            raise
        log.warning("GuardBit does not watch this run, which goes on without it: %s", error)
        return None
    except Exception:
        if session is not None:  # nobody else can close it
            session.close("crashed")
        raise
