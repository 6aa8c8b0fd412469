"""What this process knows about running models: one object, `runtime`, for the ops and the monitor.

The attention op is opaque to the compiler and looks its attention module up here when it *runs*, so
a switch takes effect at the next call, forward and backward, without a graph break or a
recompilation. The kernels know attention modules only as numbers; names, modules and meaning belong
to the layers above. These enter a module and leave it, and set its observer.

`torch.compile` traces `enter`, `leave` and whatever asks for the module that is running. So the
number of a module is a 0-d CPU tensor: the compiler would specialise on a Python number.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Hashable
from contextlib import suppress
from dataclasses import replace
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from guardbit.guard import then_undo
from guardbit.kernels.site_state import Clock, SiteState, is_recomputing, log

#: Number of calls outside any instrumented model.
NO_SITE = -1

# `_QUIET - number` is the number of a module's state without its observer.
_QUIET = -2


class _Owner(NamedTuple):
    """Where the running modules were called from."""

    thread: int  # the thread
    frame: FrameType | None  # the Python frame that called the outermost module


_NOBODY = _Owner(0, None)


class Runtime:
    """The attention modules of this process, which of them are running, and what all calls share.

    Attributes:
        running: Numbers of the modules that are running, outermost first, 0-d CPU tensors.
        call_listeners: Called with the tensors of every eager `flash_attention` call inside an
            instrumented module, before it runs.
        keeps_residuals: Whether compiled calls reserve room for what "compensated" keeps, see
            `keep_residuals`.
        on_fault: Called with the errors that the op contains.
    """

    def __init__(self) -> None:
        self._sites: dict[int, SiteState] = {NO_SITE: SiteState()}
        # Copies of an instrumented model carry its numbers, by pickling into other processes too,
        # where they must not pass for modules of that process.
        self._next_number = int.from_bytes(os.urandom(6))
        self.running: list[Tensor] = []
        self._owner = _NOBODY
        self.call_listeners: list[Callable[[Tensor, Tensor, Tensor], None]] = []
        self.keeps_residuals = True
        self._wishes: dict[Hashable, bool] = {}
        self.on_fault: Callable[[Exception], None] = _log_fault

    def __reduce__(self) -> str:
        # Pickled by name: an unpickled reference is to the runtime of its own process.
        return "runtime"

    # --- the attention modules -------------------------------------------------------------------

    def add_site(self, name: str = "", clock: Clock | None = None) -> int:
        """Registers an attention module and returns its number, unique in this process."""
        number = self._next_number
        self._next_number += 1
        self._sites[number] = SiteState(name, clock=clock or Clock())
        return number

    def remove_site(self, number: int) -> None:
        """Forgets a module; calls that still carry its number count as outside any module."""
        self._sites.pop(number, None)
        self._sites.pop(_QUIET - number, None)

    def site(self, number: int) -> SiteState:
        """Returns the state of a module, or that of `NO_SITE` if it was removed."""
        return self._sites.get(number) or self._sites[NO_SITE]

    def here(self) -> Tensor:
        """Number of the state for an eager call, without observer if the call is not observed."""
        number = int(self.current)
        state = self.site(number)
        if state.is_observed:
            return self.current
        quiet = _QUIET - number
        self._sites[quiet] = replace(state, observer=None)
        return torch.tensor(quiet, dtype=torch.int64)

    # --- which of them are running ---------------------------------------------------------------

    def enter(self, site: Tensor) -> None:
        """Records that a module begins to run."""
        self.running.append(site)

    def leave(self) -> None:
        """Records that the module that began last has ended."""
        self.running.pop()

    def begin(self, caller: FrameType) -> None:
        """Records the caller of the outermost module, before it runs eagerly."""
        self._owner = _Owner(threading.get_ident(), caller)

    def end(self) -> None:
        """Records that the outermost module has ended."""
        self._owner = _NOBODY  # a frame keeps the inputs and the output of its module

    def leave_all(self) -> None:
        """Forgets the modules that are running: until one begins, calls are outside any."""
        self.running.clear()

    def apart(self, site: Tensor, caller: FrameType, function: Callable[[], Any]) -> None:
        """Runs one module by itself, whatever else is running."""
        depth, owner = len(self.running), self._owner

        def run() -> None:
            self.begin(caller)
            self.enter(site)
            function()

        def undo() -> None:
            del self.running[depth:]
            self._owner = owner

        then_undo(run, undo)

    @property
    def current(self) -> Tensor:
        """Number of the innermost module that is running; there must be one."""
        return self.running[-1]

    def is_inside_site(self) -> bool:
        """Whether the caller runs inside an instrumented module."""
        return len(self.running) > 0 and (
            torch.compiler.is_compiling()
            or (not self.is_other_thread() and not is_jit_traced() and self.is_owner_running())
        )

    def is_other_thread(self) -> bool:
        """Whether the caller's thread is not the one whose modules are running."""
        return threading.get_ident() != self._owner.thread and not is_recomputing()

    def is_owner_running(self) -> bool:
        """Whether the outermost module is still running."""
        thread, outermost = self._owner
        if thread == threading.get_ident():
            frame = sys._getframe()
        else:
            frame = sys._current_frames().get(thread)
        while frame is not None and frame is not outermost:
            frame = frame.f_back
        return frame is not None

    # --- what all calls share --------------------------------------------------------------------

    def listen(self, listener: Callable[[Tensor, Tensor, Tensor], None]) -> None:
        """Adds a function to `call_listeners`."""
        self.call_listeners.append(listener)

    def unlisten(self, listener: Callable[[Tensor, Tensor, Tensor], None]) -> None:
        """Removes a function from `call_listeners`, if it is there."""
        with suppress(ValueError):
            self.call_listeners.remove(listener)

    def keep_residuals(self, asker: Hashable, is_wanted: bool | None) -> None:
        """Says for `asker` whether compiled calls may be asked for "compensated"; None retracts."""
        if is_wanted is None:
            self._wishes.pop(asker, None)
        else:
            self._wishes[asker] = is_wanted
        self.keeps_residuals = any(self._wishes.values()) or not self._wishes

    def tell_fault(self, error: Exception) -> None:
        """Reports that a part of GuardBit failed in a call."""
        self.on_fault(error)


def _log_fault(error: Exception) -> None:
    log.warning("a call of attention failed in GuardBit and went to PyTorch: %s", error)


def number_of(site: Tensor) -> int:
    """Returns the number of a site, unseen by dispatch modes."""
    with torch._C._DisableTorchDispatch():
        return int(site)


def is_jit_traced() -> bool:
    """Whether `torch.jit.trace` is recording: the trace must hold the model's operations alone."""
    return torch.jit.is_tracing()  # pyright: ignore[reportPrivateImportUsage]


#: The one of this process. Ops get numbers and tensors and no objects, so they find it here.
runtime = Runtime()
