"""The instrumented modules, and which of them are running."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

from torch import Tensor, nn

from guardbit.kernels.attention import site_stack

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

#: Modules that are running eagerly, outermost first, in step with `site_stack`.
frame_stack: list[Frame] = []


def site_number(module: nn.Module) -> int:
    """Returns the number that a hooked module, or a copy of one, carries."""
    return int(getattr(module, SITE_ATTRIBUTE))


@contextmanager
def inside(site: Tensor, frame: Frame) -> Iterator[None]:
    """Lets what runs in the context count as running inside a module."""
    site_stack.append(site)
    frame_stack.append(frame)
    try:
        yield
    finally:
        site_stack.pop()
        frame_stack.pop()
