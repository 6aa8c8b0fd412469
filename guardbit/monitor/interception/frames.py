"""The instrumented modules, and which of them are running."""

from __future__ import annotations

import os
import sys
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn

from guardbit import private
from guardbit.guard import Args, Kwargs
from guardbit.kernels.runtime import NO_SITE, number_of, runtime
from guardbit.monitor.interception.references import is_calling

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
        self.has_run = False  # whether the module has run eagerly

    def __deepcopy__(self, memo: dict[int, Any]) -> Place:
        return Place(NO_SITE)

    def __reduce__(self) -> Any:
        # Nothing of GuardBit's: a saved model is loaded where GuardBit may be missing. The tensor
        # lives on: for a process that is spawned it is a file, which must be open when it begins.
        return SimpleNamespace, (), {"site": NOWHERE}


class Absent:
    """Whose methods hooks are, so that those of a pickled module do nothing and need no GuardBit.

    A function is pickled by its name. A method is pickled by its object and its own name, and this
    object as a `nullcontext`, whose `__exit__` takes anything and does nothing.
    """

    METHOD = "__exit__"

    def __deepcopy__(self, memo: dict[int, Any]) -> Absent:
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


# Of the frames of a call, those in here are not what the user has written.
_LIBRARIES = tuple(
    f"{Path(file).parent}{os.sep}"
    for file in (torch.version.__file__, sys.modules["guardbit"].__file__)
    if file
)


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


def site_of(module: nn.Module) -> Tensor:
    """Returns the number that a hooked module, or a copy of one, carries, a 0-d CPU tensor."""
    return getattr(module, SITE_ATTRIBUTE).site


def site_number(module: nn.Module) -> int:
    return number_of(site_of(module))


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
    runtime.leave_all()
