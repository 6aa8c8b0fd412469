"""The instrumented modules, and which of them are running."""

from __future__ import annotations

from types import FrameType
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

from torch import Tensor, nn

from guardbit.kernels.runtime import runtime

#: Where an instrumented module keeps the number of its site, a 0-d CPU tensor.
SITE_ATTRIBUTE = "_guardbit_site"

#: The module of each site, by number. A copy of a hooked module carries its hooks and its number,
#: but is not the module of the site.
site_modules: WeakValueDictionary[int, nn.Module] = WeakValueDictionary()


class Frame(NamedTuple):
    """A module that is running, and its inputs."""

    module: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


class Entries:
    """Notes which instrumented modules run eagerly, as long as anybody wants to know."""

    def __init__(self) -> None:
        self.numbers: set[int] = set()
        self.num_listeners = 0

    def start(self) -> None:
        """Begins to note, for one listener more."""
        self.num_listeners += 1

    def stop(self) -> None:
        """Is told that a listener knows enough."""
        self.num_listeners -= 1
        if not self.num_listeners:
            self.numbers.clear()


#: The modules that ran, by number of the site.
entries = Entries()

#: Modules that are running eagerly, outermost first, in step with `runtime.running`.
frame_stack: list[Frame] = []


def site_number(module: nn.Module) -> int:
    """Returns the number that a hooked module, or a copy of one, carries."""
    return int(getattr(module, SITE_ATTRIBUTE))


def push(site: Tensor, frame: Frame, caller: FrameType) -> None:
    """Notes that a module begins to run, called by `caller`; `drop_stale` is to come first."""
    if not frame_stack:
        runtime.begin(caller)
    frame_stack.append(frame)
    runtime.enter(site)


def pop(module: nn.Module) -> None:
    """Notes that a module has ended, if it is the one that began last."""
    if frame_stack and frame_stack[-1].module is module:
        frame_stack.pop()
        runtime.leave()
        if not frame_stack:
            runtime.end()


def drop_stale() -> None:
    """Forgets modules that were never left: PyTorch runs no hooks after KeyboardInterrupt."""
    if frame_stack and not runtime.is_owner_running():
        drop_all()


def drop_all() -> None:
    """Forgets all modules that are running: calls are outside any until one begins."""
    frame_stack.clear()
    runtime.leave_all()
