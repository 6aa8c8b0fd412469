"""`F.multi_head_attention_forward`, which `nn.MultiheadAttention` calls.

Without weights to return it calls `F.scaled_dot_product_attention` in turn, which takes that call.
"""

from __future__ import annotations

import functools
import inspect
import types
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from guardbit.kernels.attention import is_inside_site, is_jit_traced, site_stack
from guardbit.monitor.interception.calls import Heads
from guardbit.monitor.interception.doors import guarded
from guardbit.monitor.interception.entry_points.base import EntryPoint, Refusal
from guardbit.monitor.interception.records import note_call
from guardbit.monitor.interception.rerunning import probe
from guardbit.monitor.interception.tracing import note_traced_call

_NAME = "F.multi_head_attention_forward"

# The compiler treats PyTorch's own function as one opaque call; a copy it looks into.
_original = F.multi_head_attention_forward
_traceable = types.FunctionType(
    _original.__code__, _original.__globals__, _original.__name__, _original.__defaults__
)
_traceable.__kwdefaults__ = _original.__kwdefaults__

_positions = {name: i for i, name in enumerate(inspect.signature(_original).parameters)}

_RETURNS_WEIGHTS = (
    "it returns attention weights (need_weights=True), which no fused kernel computes"
)


def bind(*args: Any, **kwargs: Any) -> Refusal:
    """Binds a call, see `base.EntryPoint`."""
    return Refusal(_RETURNS_WEIGHTS)


@functools.wraps(_original)
def multi_head_attention_forward(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
    """Stands in for `F.multi_head_attention_forward`; see there."""
    if not torch.compiler.is_compiling():
        if is_jit_traced():
            return _original(*args, **kwargs)
        _note(args, kwargs)
    elif is_inside_site() and _given("need_weights", args, kwargs, True):
        heads = _heads_of_module(args, kwargs)
        note_traced_call(site_stack[-1], heads, _RETURNS_WEIGHTS, _NAME)
    return _traceable(*args, **kwargs)


def _given(name: str, args: tuple[Any, ...], kwargs: dict[str, Any], default: Any = None) -> Any:
    position = _positions[name]
    return args[position] if position < len(args) else kwargs.get(name, default)


def _heads_of_module(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Heads:
    num_heads = _given("num_heads", args, kwargs)
    return num_heads, num_heads, _given("embed_dim_to_check", args, kwargs) // num_heads


@guarded
def _note(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    if not is_inside_site():
        return
    if probe.site is not None:
        if len(args) <= _positions["need_weights"]:
            # With weights to return, attention is written out where no call shows its queries.
            kwargs["need_weights"] = False
    elif _given("need_weights", args, kwargs, True):
        note_call(int(site_stack[-1]), _heads_of_module(args, kwargs), _RETURNS_WEIGHTS, _NAME)


MULTI_HEAD = EntryPoint(
    _NAME,
    home="torch.nn.functional",
    attribute="multi_head_attention_forward",
    stand_in=multi_head_attention_forward,
    bind=bind,
    original=_original,
)
