"""The stand-in for `torch.utils.checkpoint.checkpoint`."""

from __future__ import annotations

import functools
import inspect
import sys
from typing import Any

import torch.utils.checkpoint
from torch import Tensor

from guardbit.guard import Around, between
from guardbit.kernels.runtime import runtime
from guardbit.monitor.interception.doors import guarded, stand_in
from guardbit.monitor.interception.frames import Frame, drop_stale, frame_stack, pop, push
from guardbit.monitor.interception.rerunning import probe

original_checkpoint = torch.utils.checkpoint.checkpoint


_CHECKPOINT_OPTIONS = frozenset(inspect.signature(original_checkpoint).parameters)


def _before(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Around | None:
    """Lets a recomputation *inside* an attention module belong to that module."""
    where = _here()
    if where is None or not args:
        return None
    function, *others = args
    if probe.site is not None:
        # A checkpoint would hide from autograd how q is computed.
        own = {k: v for k, v in kwargs.items() if k not in _CHECKPOINT_OPTIONS}
        return Around(tuple(others), own, function=function)
    begin = functools.partial(_go_on_inside, *where)
    end = functools.partial(_leave_again, where[1])
    return Around((between(function, begin, end), *others), kwargs)


@guarded
def _go_on_inside(site: Tensor, frame: Frame) -> None:
    drop_stale()
    again = Frame(frame.module, frame.args, frame.kwargs)
    push(site, again, sys._getframe(2))  # the one that the door is called from


@guarded
def _leave_again(frame: Frame) -> None:
    pop(frame.module)


def _here() -> tuple[Tensor, Frame] | None:
    """Returns the innermost module that runs eagerly, and the number of its site."""
    return (runtime.current, frame_stack[-1]) if runtime.is_inside_site() and frame_stack else None


class _Place:
    original = staticmethod(original_checkpoint)


#: Stands in for PyTorch's function.
checkpoint = functools.wraps(original_checkpoint)(stand_in(_Place, _before, original_checkpoint))
