"""The guard between a training run and GuardBit: whatever the run calls goes through this file.

If GuardBit raises, the guard reports the error and returns what the caller would have got without
GuardBit. An error is any `Exception`, `MemoryError` included. `KeyboardInterrupt` and `SystemExit`
belong to the user and pass, as do what is raised inside `refusing`, which answers a bad argument,
and what a strict session raises.

`method` guards what a training loop or a framework calls, `function` and `again` what PyTorch
calls, `hook` a module's hook, and `stand_in` what stands in for a function that models call.

What is written here is all that runs unguarded, so it must stay short. Compilers trace `hook` and
`stand_in` as far as `is_compiling`.
"""

import functools
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any, NamedTuple, TypeVar

import torch

from guardbit import private

F = TypeVar("F", bound=Callable[..., Any])
T = TypeVar("T")

#: The arguments of a call.
Args = tuple[Any, ...]
Kwargs = dict[str, Any]

#: Reports an error; it may raise this very error, and nothing else.
Contain = Callable[[Exception], None]

# Inside a model an entry is tried twice. A forward and its repetition in activation checkpointing
# must be alike, so an error that comes but once is not to change which way a call takes.
_TRIES = 2

# PyTorch 2.13 says that it is compiling until all is compiled, 2.11 only while it traces Python.
_SAYS_TOO_LITTLE = private.RELEASE < (2, 13)

_CHECKPOINTS = "torch.utils.checkpoint"

_REFUSAL, _GUARDED = "_guardbit_refuses", "_guardbit_guarded"


class Guarded:
    """What has guarded methods, which do nothing once it is void: it could not be set up."""

    _is_void: bool = False

    def _contain(self, error: Exception, where: str) -> None:
        """Reports an error that the guard caught; it may raise this very error only."""
        raise NotImplementedError


class Around(NamedTuple):
    """What a stand-in does instead of calling the original as it was called."""

    args: Args
    kwargs: Kwargs
    after: Callable[[Any], Any] | None = None  # makes the result from what the original returns
    function: Callable[..., Any] | None = None  # what to call; None for the original


class Result(NamedTuple):
    """What a stand-in returns without calling the original."""

    value: Any


@contextmanager
def refusing() -> Iterator[None]:
    """Lets what is raised in it pass every guard, because it tells the caller what to do."""
    try:
        yield
    except (ValueError, TypeError, IndexError, NotImplementedError) as error:
        setattr(error, _REFUSAL, True)
        raise


def nothing(*_: object, **__: object) -> None:
    """Does nothing, whatever it gets."""


def _raise(error: Exception) -> None:
    raise error


def _tried(
    contains: tuple[Contain, ...],
    otherwise: Callable[..., Any],
    inside: Callable[..., Any],
    args: Args,
    kwargs: Kwargs,
) -> Any:
    """Calls a function once for each that takes its error, until it succeeds."""
    # All tries have the same frames above them: some look for their caller's.
    for contain in contains:
        try:
            return inside(*args, **kwargs)
        except Exception as error:
            # It is an answer to the caller, or ends a recomputation.
            if hasattr(error, _REFUSAL) or type(error).__module__ == _CHECKPOINTS:
                raise
            # It came while a checkpoint's, its context, was ending a recomputation. No variable
            # keeps that: with this frame it would hold tensors.
            kind = type(error.__context__)
            stops = (kind.__module__, kind.__name__) == (_CHECKPOINTS, "_StopRecomputationError")
            if stops and error.__context__ is not None:
                raise error.__context__ from None
            _contained(error, contain)
    return otherwise(*args, **kwargs)


def method(
    otherwise: Callable[[Any], Any] = nothing, at_last: Callable[[Any], None] | None = None
) -> Callable[[F], F]:
    """Guards a method of a `Guarded`; after an error it returns what `otherwise` makes of self."""

    def decorate(inside: Any) -> Any:
        def contain(self: Guarded, error: Exception) -> None:
            if inside.__name__ == "__init__" and isinstance(error, TypeError):
                below = error.__traceback__ and error.__traceback__.tb_next
                if below is None:  # no frame below that of `_tried`: the arguments do not fit
                    raise error
            self._contain(error, inside.__name__)

        @functools.wraps(inside)
        def guarded(self: Guarded, *args: Any, **kwargs: Any) -> Any:
            if self._is_void:
                return otherwise(self)
            contains = (functools.partial(contain, self),)
            try:
                return _tried(
                    contains, lambda *_, **__: otherwise(self), inside, (self, *args), kwargs
                )
            finally:
                if at_last is not None:
                    contains = (functools.partial(self._contain, where=at_last.__name__),)
                    _tried(contains, nothing, undo_all, ([functools.partial(at_last, self)],), {})

        return _marked(guarded)

    return decorate


def function(contain: Contain, otherwise: Callable[..., Any] = nothing) -> Callable[[F], F]:
    """Guards a function, as of a backward; after an error `otherwise` gets its arguments."""
    return _guarded((contain,), otherwise)


def again(contain: Contain, is_needed: bool = True) -> Callable[[F], F]:
    """Guards a function, which is tried a second time; after that it raises or returns None."""
    return _guarded((contain, _raise if is_needed else contain), nothing)


def _guarded(contains: tuple[Contain, ...], otherwise: Callable[..., Any]) -> Callable[[F], F]:
    def decorate(inside: Any) -> Any:
        @functools.wraps(inside)
        def guarded(*args: Any, **kwargs: Any) -> Any:
            return _tried(contains, otherwise, inside, args, kwargs)

        return _marked(guarded)

    return decorate


def hook(
    eager: Callable[..., None], traced: Callable[..., None], contain: Contain
) -> Callable[..., None]:
    """Guards a module's hook."""

    def guarded(*args: Any, **kwargs: Any) -> None:
        if torch.compiler.is_compiling():
            # An exported program must hold the model's operations alone. PyTorch 2.11's compiler
            # takes `is_exporting()` for true, whatever it compiles for.
            return None if private.is_exporting() else traced(*args, **kwargs)
        return _tried((contain, contain), nothing, eager, args, kwargs)

    return _marked(guarded)


def stand_in(
    place: Any,
    before: Callable[[Args, Kwargs], Around | Result | None],
    traced: Callable[..., Any] | None,
    contain: Contain,
    give_up: Contain,
) -> Callable[..., Any]:
    """Makes a guarded function that stands in for the `original` of a place."""

    def guarded(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            if traced is None or private.is_exporting():
                return place.original(*args, **kwargs)
            return traced(*args, **kwargs)
        # The compiler runs the graph that it has traced, with tensors that hold nothing. PyTorch
        # then looks its own functions up by name and finds the stand-in.
        if _SAYS_TOO_LITTLE and private.tracing_context() is not None:
            return place.original(*args, **kwargs)
        contains = (contain, give_up)
        taken = _tried(contains, nothing, before, (args, kwargs), {})
        if taken is None:
            return place.original(*args, **kwargs)
        if isinstance(taken, Result):
            return taken.value
        call = place.original if taken.function is None else taken.function
        found = call(*taken.args, **taken.kwargs)
        if taken.after is None:
            return found
        return _tried(contains, lambda found: found, taken.after, (found,), {})

    return _marked(guarded)


def between(
    function: Callable[..., Any], begin: Callable[[], Any], end: Callable[[], Any]
) -> Callable[..., Any]:
    """Runs two guarded functions around one of the user's."""

    def bracketed(*args: Any, **kwargs: Any) -> Any:
        begin()
        try:
            return function(*args, **kwargs)
        finally:
            end()

    return bracketed


@contextmanager
def bracket(
    entered: T, begin: Callable[[], Any], end: Callable[[], Any], abandon: Callable[[], Any]
) -> Iterator[T]:
    """Runs guarded functions before and after some lines of the user's, or the last if they raise.

    It stands here, because an error between two guarded calls would be the user's.
    """
    begin()
    try:
        yield entered
    except BaseException:
        abandon()
        raise
    end()


def undo_all(to_undo: list[Callable[[], Any]]) -> None:
    """Calls functions, the last one first, and takes each out of the list."""
    first: BaseException | None = None
    for _ in range(_TRIES):
        failed: list[Callable[[], Any]] = []
        for _ in range(len(to_undo)):
            undo = None
            try:
                undo = to_undo.pop()
                undo()
            except BaseException as error:
                first = first or error
                if undo is not None:
                    failed.append(undo)
        to_undo.extend(reversed(failed))
    try:
        if first is not None:
            raise first
    finally:
        del first  # it and this frame would keep each other


def then_undo(function: Callable[[], T], undo: Callable[[], Any]) -> T:
    """Calls a function and then, whatever it raises, another, which is tried twice."""
    try:
        return function()
    finally:
        undo_all([undo])


def then_finish(function: Callable[[], Any], finish: Callable[[Any], T], contain: Contain) -> T:
    """Calls a function, then another with its result; only the latter is tried twice."""
    return _tried((contain, _raise), nothing, finish, (function(),), {})


def within_all(
    makers: Iterable[Callable[[], AbstractContextManager[Any]]], function: Callable[[], T]
) -> T:
    """Calls a function inside context managers, the first one outermost."""
    with ExitStack() as stack:
        for make in makers:  # some are in force as soon as they are made
            stack.enter_context(make())
        return function()


def within(context: AbstractContextManager[Any], function: Callable[[], T]) -> T:
    """Calls a function inside a context manager."""
    with context:
        return function()


def apart(function: Callable[[], T]) -> T:
    """Calls a function of GuardBit's without the modes and hooks in force in the user's code."""
    to_restore: list[Callable[[], object]] = []
    try:
        _take_off(to_restore)
        return function()
    finally:
        undo_all(to_restore)


def _take_off(to_restore: list[Callable[[], object]]) -> None:
    def later(function: Callable[..., object], *args: Any) -> None:
        to_restore.append(functools.partial(function, *args))

    def enter(context: AbstractContextManager[Any]) -> None:
        context.__enter__()
        later(context.__exit__, None, None, None)

    is_autocast, no_autocast = private.autocast
    if is_autocast():
        enter(no_autocast())
    if torch.is_inference_mode_enabled():
        enter(torch.inference_mode(False))
    num_modes, push, pop = private.function_modes
    while num_modes() > 0:  # one of them is of the default device
        later(push, pop())
    if private.num_dispatch_modes() > 0:
        enter(private.without_dispatch_modes())
    top, pop, push = private.saved_tensor_hooks
    while (hooks := top(False)) is not None:
        pop()
        later(push, *hooks)
    if torch.is_anomaly_enabled():
        later(torch.set_anomaly_enabled, True, torch.is_anomaly_check_nan_enabled())
        torch.set_anomaly_enabled(False)


def call_first(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Calls a function with the arguments that follow it."""
    return function(*args, **kwargs)


def of_torch(_: object, name: str) -> Any:
    """Looks an attribute up in `torch`, for what stands in for it."""
    return getattr(torch, name)


def _marked(guarded: Any) -> Any:
    setattr(guarded, _GUARDED, True)
    return guarded


def _contained(error: Exception, contain: Contain) -> None:
    try:
        contain(error)
    except Exception as raised:
        # Where not even telling works, nothing is left to do; training goes on.
        if raised is error:
            raise
