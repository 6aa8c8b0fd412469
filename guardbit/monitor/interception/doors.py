"""The guard around what runs inside a model's forward: hooks, and stand-ins for functions.

An error in there ends here and is reported to the sessions. The remaining forward then counts as
outside any site, so its calls go to PyTorch.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from torch import Tensor
from torch._dynamo.eval_frame import skip_code

from guardbit.kernels.spec import AttentionSpec
from guardbit.monitor.interception.frames import drop_all
from guardbit.monitor.stages import log

P = ParamSpec("P")
T = TypeVar("T")

#: Listeners of all sessions. Each hears of every error, because the failing code may not know
#: which model it runs for.
listeners: list[Callable[[Exception], None]] = []

#: Called with q, k, v, the spec and the library's name, or "", of every eager call inside a site.
recorders: list[Callable[[Tensor, Tensor, Tensor, AttentionSpec, str], None]] = []

_reported: set[type[Exception]] = set()


def guarded(function: Callable[P, T]) -> Callable[P, T | None]:
    """Wraps a function so that training may call it: it returns None where it fails.

    For eager calls only; compilers trace neither the function nor the guard.
    """

    @functools.wraps(function)
    def door(*args: P.args, **kwargs: P.kwargs) -> T | None:
        try:
            return function(*args, **kwargs)
        except Exception as error:
            drop_all()
            _report(error)
            return None

    for python in (function, door):
        skip_code(getattr(python, "__code__"))  # noqa: B009 (type checkers do not see it)
    return door


def _report(error: Exception) -> None:
    if listeners:
        for listener in list(listeners):
            listener(error)
    elif type(error) not in _reported:
        _reported.add(type(error))
        log.warning("a call of attention could not be followed, and went to PyTorch: %s", error)
