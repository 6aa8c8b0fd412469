"""What becomes of errors inside a model's forward and backward.

They are reported to the sessions. After an error in a hook, the remaining forward counts as outside
any site, so its calls go to PyTorch. After one in a stand-in, PyTorch's function takes that call.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any, ParamSpec, TypeVar

from guardbit import guard, private
from guardbit.guard import Args, Kwargs
from guardbit.kernels.runtime import NO_SITE, is_recomputing, number_of, runtime
from guardbit.monitor.interception.frames import drop_all, frame_stack, place_of_caller
from guardbit.monitor.stages import log

P = ParamSpec("P")
T = TypeVar("T")

#: Called with every error, one listener a session: the failing code may not know which model it
#: runs for.
listeners: list[Callable[[Exception], None]] = []


def unlisten(listener: Callable[[Exception], None]) -> None:
    with suppress(ValueError):
        listeners.remove(listener)


_reported: set[type[Exception]] = set()


def of_call(error: Exception, number: int | None = None) -> Exception:
    """Adds to an error of GuardBit's in whose call it came."""
    with suppress(Exception):
        if number is None and runtime.running:
            number = number_of(runtime.current)
        name = runtime.site(NO_SITE if number is None else number).name
        what = f"attention module '{name}'" if name else "no attention module"
        if not hasattr(error, "__notes__"):
            error.add_note(f"in a call of {what} at {place_of_caller()}")
    return error


def report(error: Exception) -> None:
    """Reports an error to all sessions; without one, logs it once."""
    of_call(error)
    if listeners:
        for listener in list(listeners):
            listener(error)
    elif type(error) not in _reported:
        _reported.add(type(error))
        log.warning("a call of attention could not be followed, and went to PyTorch: %s", error)


runtime.on_fault = report


def _leave_call_alone(error: Exception) -> None:
    """Leaves a call to PyTorch's function, also when its forward is repeated."""
    if runtime.running and not is_recomputing():
        runtime.site(number_of(runtime.current)).leave_alone(error)
    report(error)


def _lose_place(error: Exception) -> None:
    of_call(error)  # while it is known
    drop_all()
    report(error)


def reporting(function: Callable[P, T]) -> Callable[P, T | None]:
    """Wraps a function so that training may call it: it returns None where it fails."""
    return _untraced(guard.again(report, is_needed=False)(function), function)


def guarded(function: Callable[P, T]) -> Callable[P, T | None]:
    """Like `reporting`, for what keeps the stack of running modules."""
    return _untraced(guard.again(_lose_place, is_needed=False)(function), function)


def hook(name: str, eager: Callable[..., None], traced: Callable[..., None]) -> Callable[..., None]:
    """Makes a hook of a module, see `guard.hook`, with a name by which it is pickled."""
    return _untraced(named(guard.hook(eager, traced, _lose_place), name, eager), eager)


def named(made: Any, name: str, beside: Callable[..., Any]) -> Any:
    """Gives a function the name by which it is found in the module of another function."""
    made.__name__ = made.__qualname__ = name
    made.__module__ = beside.__module__
    return made


def stand_in(
    place: Any, before: Callable[..., Any], traced: Callable[..., Any] | None
) -> Callable[..., Any]:
    """Makes a stand-in for a function that a model calls, see `guard.stand_in`."""

    def counted_once(args: Args, kwargs: Kwargs) -> Any:
        running = frame_stack[-1:]
        counts = [frame.calls for frame in running]
        try:
            return before(args, kwargs)
        except BaseException:
            # The second try is the same call: counted as another it would not be observed, and in
            # activation checkpointing it would save other tensors than the forward.
            for frame, calls in zip(running, counts, strict=True):
                frame.calls = calls
            raise

    _untraced(counted_once, getattr(before, "func", before))
    return guard.stand_in(place, counted_once, traced, report, _leave_call_alone)


def _untraced(made: Any, inside: Any) -> Any:
    for python in (inside, made, guard._tried):
        private.skip_code(python.__code__)
    return made
