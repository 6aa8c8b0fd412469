"""The instrumented modules, which of them are running, and what becomes of errors meanwhile.

Errors are reported to the sessions. After one in a hook, the remaining forward counts as outside
any site, so its calls go to PyTorch. After one in a stand-in, PyTorch's function takes that call.
"""

import os
import sys
from collections.abc import Callable
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import Any, ParamSpec, Self, TypeVar
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn

from guardbit import guard, private
from guardbit.guard import Args, Kwargs
from guardbit.kernels.runtime import NO_SITE, is_recomputing, number_of, runtime
from guardbit.monitor.interception.references import is_calling
from guardbit.monitor.stages import log

P = ParamSpec("P")
T = TypeVar("T")

#: Where an instrumented module keeps its `Place`.
SITE_ATTRIBUTE = "_guardbit_site"

#: Frames from what the guard calls to the caller of the guard.
BEYOND_GUARD = 3

#: What a copy of a module has in place of the number of a site.
NOWHERE = torch.tensor(NO_SITE, dtype=torch.int64, device="cpu")


class Place:
    """Which site a module is. A copied module, such as an average of the weights, is no site."""

    def __init__(self, number: int) -> None:
        # Saved for backward, where hooks may write it to disk: a plain tensor, which cannot see to
        # its copies itself.
        with private.no_torch_dispatch():  # a copy made of fake tensors keeps a real number
            self.site = torch.tensor(number, dtype=torch.int64, device="cpu")
        self.number = number  # the same, for eager calls
        self.has_run = False  # whether the module has run eagerly

    def __deepcopy__(self, memo: dict[int, Any]) -> "Place":
        return Place(NO_SITE)

    def __reduce__(self) -> Any:
        # Nothing of GuardBit's: a saved model is loaded where GuardBit may be missing. The tensor
        # lives on: for a process that is spawned it is a file, which must be open when it begins.
        return SimpleNamespace, (), {"site": NOWHERE, "number": NO_SITE}


class Absent:
    """Whose methods hooks are, so that those of a pickled module do nothing and need no GuardBit.

    A function is pickled by its name. A method is pickled by its object and its own name, and this
    object as a `nullcontext`, whose `__exit__` takes anything and does nothing.
    """

    METHOD = "__exit__"

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self

    def __reduce__(self) -> Any:
        return nullcontext, ()


#: The compiler guards on the ids of hooks. So all modules use the same two ids, from PyTorch's
#: counter; otherwise each block that is compiled by itself would be compiled anew.
hook_ids: list[int] = []

#: The module of each site, by number. A shallow copy of a hooked module carries the hooks and the
#: number, but it is not the module of the site.
site_modules: WeakValueDictionary[int, nn.Module] = WeakValueDictionary()


@dataclass(slots=True, eq=False)
class Frame:
    """A module that is running, its inputs, and how often it has called attention so far."""

    module: nn.Module
    args: Args
    kwargs: Kwargs
    calls: int = 0


#: Modules that are running eagerly, outermost first, in step with `runtime.running`.
frame_stack: list[Frame] = []


@dataclass
class Probe:
    """The re-run in progress that looks for W_Q."""

    site: int | None = None  # whose calls are collected; None while nothing is re-run
    calls: list[tuple[Tensor, Tensor]] = field(default_factory=list)  # q and k of each

    def note_call(self, number: int, query: Tensor, key: Tensor) -> bool:
        """Collects the calls of the probed site; returns whether anything is being probed."""
        # A call with a subclass of Tensor comes by a second time, from PyTorch's function.
        is_same = bool(self.calls) and self.calls[-1][0] is query and self.calls[-1][1] is key
        if number == self.site and not is_same:
            self.calls.append((query, key))
        return self.site is not None


probe = Probe()


# Of the frames of a call, those in here are not what the user has written.
_LIBRARIES = tuple(f"{Path(x).parent}{os.sep}" for x in (torch.__file__, guard.__file__))


def place_of_caller() -> str:
    """File and line of the innermost frame outside PyTorch and GuardBit."""
    frame = sys._getframe()
    code = frame.f_code
    while frame.f_back is not None and (
        code.co_filename.startswith(_LIBRARIES) or is_calling(code)
    ):
        frame = frame.f_back
        code = frame.f_code
    return f"{code.co_filename}:{frame.f_lineno}"


def site_number(module: nn.Module) -> int:
    """Returns the number that a hooked module, or a copy of one, carries."""
    return getattr(module, SITE_ATTRIBUTE).number


def is_attached(module: nn.Module) -> bool:
    """Whether a module is hooked; a copy of a hooked one is not."""
    return hasattr(module, SITE_ATTRIBUTE) and site_modules.get(site_number(module)) is module


def push(site: Tensor, frame: Frame, caller: FrameType) -> None:
    """Records that a module begins to run, called by `caller`; call `drop_stale` first."""
    if not frame_stack:
        runtime.begin(caller)
    frame_stack.append(frame)
    runtime.enter(site)


def _calling() -> Frame | None:
    # Compiled modules in between have no frame, nor has a call outside any forward.
    return frame_stack[-1] if len(frame_stack) == len(runtime.running) > 0 else None


def next_call() -> int:
    """Returns which call of its forward one is that is not counted yet, from 1."""
    frame = _calling()
    return 1 if frame is None else frame.calls + 1


def count_call() -> int:
    """Counts a call; returns how many its forward has now."""
    frame = _calling()
    if frame is None:
        return 1
    frame.calls += 1
    return frame.calls


def pop(module: nn.Module) -> None:
    """Records that a module has ended, if it is the one that began last."""
    if frame_stack and frame_stack[-1].module is module:
        frame_stack.pop()
        runtime.leave()
        if not frame_stack:
            runtime.end()


def drop_stale() -> None:
    """Forgets modules that never ended: PyTorch runs no hooks after KeyboardInterrupt."""
    if frame_stack and not runtime.is_owner_running():
        drop_all()


def drop_all() -> None:
    """Forgets all modules that are running: calls are outside any until one begins."""
    frame_stack.clear()
    runtime.running.clear()


# --- errors ---------------------------------------------------------------------------------------

#: Called with every error, one listener a session: the failing code may not know which model it
#: runs for.
listeners: dict[Callable[[Exception], None], None] = {}

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
        if runtime.is_left_alone:
            return None
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
