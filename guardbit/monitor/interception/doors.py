"""The guard of what runs inside a model's forward: hooks, and functions in the place of PyTorch's.

What fails in there ends here. The rest of the forward then counts as outside any site, so that its
calls go to PyTorch, and whoever watches the models is told.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from torch._dynamo.eval_frame import skip_code

from guardbit.monitor.interception.frames import drop_all
from guardbit.monitor.stages import log

P = ParamSpec("P")
T = TypeVar("T")

#: Are told of each error: of all sessions, as what fails may not know which model it runs for.
listeners: list[Callable[[Exception], None]] = []

_told_of: set[type[Exception]] = set()


def guarded(function: Callable[P, T]) -> Callable[P, T | None]:
    """Makes a function one that training may call: it returns None where it fails.

    For eager calls only: a compiler is to trace neither the function nor the guard.
    """

    @functools.wraps(function)
    def door(*args: P.args, **kwargs: P.kwargs) -> T | None:
        try:
            return function(*args, **kwargs)
        except Exception as error:
            drop_all()
            _tell(error)
            return None

    for python in (function, door):
        skip_code(getattr(python, "__code__"))  # noqa: B009 (type checkers do not see it)
    return door


def _tell(error: Exception) -> None:
    if listeners:
        for listener in list(listeners):
            listener(error)
    elif type(error) not in _told_of:
        _told_of.add(type(error))
        log.warning("a call of attention could not be followed, and went to PyTorch: %s", error)
