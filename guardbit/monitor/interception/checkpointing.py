"""What stands in for `torch.utils.checkpoint.checkpoint`."""

from __future__ import annotations

import functools
import inspect
import sys
import types
from collections.abc import Callable
from typing import Any

import torch
import torch.utils.checkpoint
from torch import Tensor

from guardbit.kernels.runtime import runtime
from guardbit.monitor.interception.doors import guarded
from guardbit.monitor.interception.frames import Frame, drop_stale, frame_stack, pop, push
from guardbit.monitor.interception.rerunning import probe

original_checkpoint = torch.utils.checkpoint.checkpoint


_CHECKPOINT_OPTIONS = frozenset(inspect.signature(original_checkpoint).parameters)


@functools.wraps(original_checkpoint)
def checkpoint(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Lets a recomputation *inside* an attention module know which module it belongs to."""
    if torch.compiler.is_compiling():
        return original_checkpoint(function, *args, **kwargs)
    where = _here()
    if where is not None and probe.site is not None:
        # A checkpoint hides how q comes about from autograd.
        return function(*args, **{k: v for k, v in kwargs.items() if k not in _CHECKPOINT_OPTIONS})
    if where is None:
        return original_checkpoint(function, *args, **kwargs)

    def recomputed(*inputs: Any, **options: Any) -> Any:
        _go_on_inside(*where, sys._getframe())
        try:
            return function(*inputs, **options)
        finally:
            _leave_again(where[1])

    return original_checkpoint(recomputed, *args, **kwargs)


@guarded
def _go_on_inside(site: Tensor, frame: Frame, caller: types.FrameType) -> None:
    drop_stale()
    push(site, frame, caller)


@guarded
def _leave_again(frame: Frame) -> None:
    pop(frame.module)


@guarded
def _here() -> tuple[Tensor, Frame] | None:
    """The innermost module that is running eagerly, and the number of its site."""
    return (runtime.current, frame_stack[-1]) if runtime.is_inside_site() and frame_stack else None
