"""The functions that stand in for PyTorch's while a model is instrumented."""

from __future__ import annotations

import functools
import inspect
import sys
import types
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from torch import Tensor
from torch.distributed.tensor import DTensor

from guardbit.kernels import engines
from guardbit.kernels.attention import (
    MAX_HEAD_DIM,
    MIN_HEAD_DIM,
    is_autocast,
    is_inside_site,
    is_jit_traced,
    site_stack,
    switchable_attention,
)
from guardbit.kernels.op import has_tangent
from guardbit.kernels.switchboard import site_state
from guardbit.monitor.interception.calls import CAPTURED, Heads
from guardbit.monitor.interception.doors import guarded
from guardbit.monitor.interception.frames import Frame, drop_stale, frame_stack, pop, push
from guardbit.monitor.interception.records import note_call
from guardbit.monitor.interception.rerunning import probe
from guardbit.monitor.interception.tracing import drop_stale_traced, note_traced_call


def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Stands in for `F.scaled_dot_product_attention`; see there."""
    site: Tensor | None = None
    if not torch.compiler.is_compiling():
        site = _site_of_call(query, key, value, attn_mask, dropout_p, is_causal, enable_gqa)
    else:
        drop_stale_traced()
        if is_inside_site():
            refusal = _refusal(query, key, value, attn_mask, dropout_p, is_causal, enable_gqa)
            note_traced_call(site_stack[-1], _heads_of(query, key), refusal)
            site = site_stack[-1] if refusal is None else None
    if site is not None:
        return switchable_attention(
            query, key, value, site, attn_mask=attn_mask, is_causal=is_causal, scale=scale,
            dropout_p=dropout_p,
        )  # fmt: skip
    return engines.scaled_dot_product_attention(
        query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
    )


def _is_empty(query: Tensor, key: Tensor) -> bool:
    """Whether nothing is to be seen or switched; PyTorch serves that before it chooses a kernel."""
    return query.numel() == 0 or key.numel() == 0


@guarded
def _site_of_call(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    dropout_p: float,
    is_causal: bool,
    enable_gqa: bool,
) -> Tensor | None:
    """Notes an eager call; returns the site that it is to be computed for, None for PyTorch's."""
    if not is_inside_site() or _is_empty(query, key):
        return None
    site = site_stack[-1]
    refusal = _refusal(query, key, value, attn_mask, dropout_p, is_causal, enable_gqa)
    number = int(site)
    if probe.note_call(number, query, key):
        return None  # a re-run must not look like a call of the model
    refusal = note_call(number, _heads_of(query, key), refusal)
    state = site_state(number)
    state.begin_forward()
    # Where nobody asks the op would cost the host 0.2 ms.
    return None if refusal is not None or state.is_idle else site


def _refusal(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    dropout_p: float,
    is_causal: bool,
    enable_gqa: bool,
) -> str | None:
    """Why this call must stay with PyTorch's function, or None."""
    if attn_mask is not None and (refusal := _refusal_of_mask(attn_mask, is_causal)):
        return refusal
    if dropout_p != 0.0 and not 0.0 < dropout_p < 1.0:
        return f"it is called with dropout {dropout_p}"
    if isinstance(query, DTensor) or isinstance(key, DTensor):
        return "its heads are sharded by tensor parallelism"
    if query.is_nested or query.dim() != 4 or key.dim() != 4 or value.dim() != 4:
        return "its inputs are not of shape (batch, heads, tokens, head size)"
    if query.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        return f"it computes in {query.dtype}"
    if not query.dtype == key.dtype == value.dtype and not is_autocast(query):
        return f"it mixes {query.dtype}, {key.dtype} and {value.dtype}"
    if key.shape != value.shape:
        return "its keys and values differ in shape"
    if query.size(0) != key.size(0) or query.size(3) != key.size(3):
        return "its queries and keys differ in batch or head size"
    if not MIN_HEAD_DIM <= query.size(3) <= MAX_HEAD_DIM:
        return f"its head size {query.size(3)} is outside {MIN_HEAD_DIM} to {MAX_HEAD_DIM}"
    if query.size(1) != key.size(1) and not (enable_gqa and query.size(1) % key.size(1) == 0):
        return "it broadcasts keys over heads"
    if not torch.compiler.is_compiling():
        if torch._C._are_functorch_transforms_active():
            return "it runs under a torch.func transform"
        if has_tangent(query, key, value):
            return "it is differentiated in forward mode"
        if query.is_cuda and torch.cuda.is_current_stream_capturing():
            return CAPTURED
    return None


def _refusal_of_mask(mask: Tensor, is_causal: bool) -> str | None:
    if is_causal:
        return "it is called with a mask and is_causal=True, of which PyTorch takes one"
    if isinstance(mask, DTensor) or mask.is_nested or mask.layout is not torch.strided:
        return "its mask is no ordinary tensor"
    if mask.dtype != torch.bool and not mask.is_floating_point():
        return f"its mask is {mask.dtype}"
    return None


def _heads_of(query: Tensor, key: Tensor) -> Heads:
    if query.is_nested or query.dim() != 4 or key.dim() != 4:
        return 0, 0, 0
    return query.size(1), key.size(1), query.size(3)


@guarded
def note_flash_call(q: Tensor, k: Tensor, _: Tensor) -> None:
    """Takes the calls of `guardbit.flash_attention`, which go through the op by themselves."""
    number = int(site_stack[-1])
    if not probe.note_call(number, q, k):
        note_call(number, _heads_of(q, k), None)


# The compiler treats PyTorch's own function as one opaque call; a copy it looks into.
_original = F.multi_head_attention_forward
_traceable_multi_head_attention = types.FunctionType(
    _original.__code__, _original.__globals__, _original.__name__, _original.__defaults__
)
_traceable_multi_head_attention.__kwdefaults__ = _original.__kwdefaults__


_positions = {name: i for i, name in enumerate(inspect.signature(_original).parameters)}


@functools.wraps(_original)
def multi_head_attention_forward(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
    """Stands in for `F.multi_head_attention_forward`; see there."""
    if not torch.compiler.is_compiling():
        if is_jit_traced():
            return _original(*args, **kwargs)
        _note_multi_head_call(args, kwargs)
    elif is_inside_site() and _given("need_weights", args, kwargs, True):
        note_traced_call(site_stack[-1], _heads_of_module(args, kwargs), _RETURNS_WEIGHTS)
    return _traceable_multi_head_attention(*args, **kwargs)


_RETURNS_WEIGHTS = (
    "it returns attention weights (need_weights=True), which no fused kernel computes"
)


def _given(name: str, args: tuple[Any, ...], kwargs: dict[str, Any], default: Any = None) -> Any:
    position = _positions[name]
    return args[position] if position < len(args) else kwargs.get(name, default)


def _heads_of_module(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Heads:
    num_heads = _given("num_heads", args, kwargs)
    return num_heads, num_heads, _given("embed_dim_to_check", args, kwargs) // num_heads


@guarded
def _note_multi_head_call(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    if not is_inside_site():
        return
    if probe.site is not None:
        if len(args) <= _positions["need_weights"]:
            # With weights to return, attention is written out where no call shows its queries.
            kwargs["need_weights"] = False
    elif _given("need_weights", args, kwargs, True):
        note_call(int(site_stack[-1]), _heads_of_module(args, kwargs), _RETURNS_WEIGHTS)


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
    return (site_stack[-1], frame_stack[-1]) if is_inside_site() and frame_stack else None
