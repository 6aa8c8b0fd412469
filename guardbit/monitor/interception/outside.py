"""Attention that is called in training outside all instrumented modules, and where."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from guardbit.kernels.runtime import is_jit_traced, runtime
from guardbit.kernels.site_state import is_recomputing

# Of the calls' frames, those in here are not what the user has written.
_LIBRARIES = tuple(
    f"{Path(file).parent}{os.sep}"
    for file in (torch.__file__, sys.modules["guardbit"].__file__)
    if file
)


class OutsideCalls:
    """The calls of one thread that no instrumented module makes, from `start` to `stop`.

    Attributes:
        count: How many there were.
        where: Function, file and line of the first, "" before it.
    """

    def __init__(self) -> None:
        self.count, self.where = 0, ""
        self._thread = 0

    def start(self) -> None:
        """Begins to count the calls of the caller's thread, from 0."""
        self.count, self.where = 0, ""
        self._thread = threading.get_ident()
        if self not in _counting:
            _counting.append(self)

    def stop(self) -> None:
        """Ends that; calling it again is harmless."""
        if self in _counting:
            _counting.remove(self)

    def note(self, name: str) -> None:
        """Counts a call of the function of that name."""
        if threading.get_ident() != self._thread:
            return
        self.count += 1
        self.where = self.where or f"{name} at {_place()}"


_counting: list[OutsideCalls] = []


def note_outside(name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """Counts an eager call outside the running modules; free while nothing counts."""
    if not _counting or not torch.is_grad_enabled():
        return
    # While a module is running, only other threads call outside it. What is recomputed in a
    # backward was counted in the forward; what is traced is no call in training.
    if runtime.running or is_recomputing() or is_jit_traced():
        return
    if any(isinstance(x, Tensor) and x.requires_grad for x in (*args, *kwargs.values())):
        for counting in list(_counting):
            counting.note(name)


def _place() -> str:
    """File and line of the innermost frame outside PyTorch and GuardBit."""
    frame = sys._getframe()
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_LIBRARIES):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"
