"""Attention of Hugging Face's models with `attn_implementation="eager"`: watched, not switched.

Each model has an `eager_attention_forward` of its own and gets it from
`AttentionInterface.get_interface`, which has a stand-in here. GuardBit does not trust the
arguments: once for each module, the function is run in FP32 on its first sequence and compared with
the attention that the arguments describe.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from guardbit.guard import Around, call_first
from guardbit.kernels.runtime import runtime
from guardbit.kernels.spec import AttentionSpec
from guardbit.monitor.interception.doors import stand_in
from guardbit.monitor.interception.entry_points.base import (
    Bound,
    EntryPoint,
    Refusal,
    as_given,
    heads_first,
    heads_of,
    is_empty,
)
from guardbit.monitor.interception.entry_points.refusals import (
    why_dropout,
    why_groups,
    why_mask,
    why_now,
    why_tensors,
)
from guardbit.monitor.interception.records import note_call
from guardbit.monitor.interception.rerunning import probe
from guardbit.monitor.interception.tracing import note_traced_call
from guardbit.monitor.interception.watching import WRITTEN_OUT, Watch

_NAME = "transformers' eager attention"
_COMPILED = f"{WRITTEN_OUT}; compiled it is not watched either"

# Largest difference in that comparison, relative to the largest value: more than rounding can be,
# less than any other formula is likely to differ.
_TOLERANCE = 1e-3

# Module -> why its function is not what the arguments describe, or None.
_checked: WeakKeyDictionary[nn.Module, str | None] = WeakKeyDictionary()


def bind(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None = None,
    scaling: float | None = None,
    dropout: float = 0.0,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    position_bias: Tensor | None = None,
    **_: Any,
) -> Bound | Refusal:
    """Binds a call, see `base.EntryPoint`; the output is (batch, tokens, heads, head size)."""
    why = (
        why_mask(attention_mask)
        or why_mask(position_bias)
        or why_dropout(dropout)
        or why_tensors(query, key, value, any_width=True)
        or why_groups(query, key)
        or why_now(query, key, value)
    )
    if why is not None:
        return Refusal(why, query, key)
    mask = attention_mask
    if position_bias is not None:
        mask = position_bias if mask is None else mask + position_bias
    spec = AttentionSpec(
        1.0 / math.sqrt(query.size(-1)) if scaling is None else scaling,
        mask=mask,
        dropout_p=float(dropout),
        softcap=softcap or 0.0,
        sinks=None if s_aux is None else s_aux.detach(),
    )
    return Bound(query, key, value, spec)


def _before_interface(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Around:
    """Sees to it that a model that gets a function of its own gets `attend`."""

    def after(found: Any) -> Any:
        return _attending(found, args, kwargs)

    return Around(args, kwargs, after)


def _traced_interface(*args: Any, **kwargs: Any) -> Any:
    assert EAGER.original is not None
    return _attending(EAGER.original(*args, **kwargs), args, kwargs)


def _attending(found: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    default = args[2] if len(args) > 2 else kwargs["default"]
    if found is default and runtime.is_inside_site():
        return functools.partial(attend, found)
    return found


def _traced(
    original: Callable[..., Any],
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *args: Any,
    **kwargs: Any,
) -> Any:
    if runtime.is_inside_site():
        note_traced_call(runtime.current, heads_of(query, key), _COMPILED, _NAME)
    return original(module, query, key, value, *args, **kwargs)


def _before(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Around | None:
    original, module, query, key, value, *others = args
    watched = _watched(original, module, (query, key, value, *others), kwargs)
    if watched is None:
        return None
    watch, bound = watched
    query = watch.query(query)

    def after(found: Any) -> Any:
        out, weights = found
        out = watch.output(heads_first(out, "BNHD"), query, key, value, bound.spec)
        return as_given(out, "BNHD"), watch.weights(weights)

    return Around((original, module, query, key, value, *others), kwargs, after)


class _Place:
    original = staticmethod(call_first)


#: Stands in for a model's `eager_attention_forward`, which is its first argument.
attend = stand_in(_Place, _before, _traced)


def _watched(
    original: Callable[..., Any],
    module: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> tuple[Watch, Bound] | None:
    """Records an eager call; returns what watches it if there is an observer."""
    if not runtime.is_inside_site():
        return None
    number = int(runtime.current)
    found = bind(module, *args, **kwargs)
    q, k = found.q, found.k
    if q is not None and k is not None and (is_empty(q, k) or probe.note_call(number, q, k)):
        return None
    if isinstance(found, Refusal):
        why: str | None = found.why
    else:
        why = _why_other(original, module, found, args, kwargs)
    refusal = WRITTEN_OUT if why is None else f"{WRITTEN_OUT}; nor is it watched: {why}"
    note_call(number, heads_of(q, k), refusal, _NAME, watched=why is None)
    state = runtime.site(number)
    state.begin_forward()
    if why is not None or isinstance(found, Refusal) or state.is_unheard:
        return None
    state.native_dropout_p = found.spec.dropout_p
    return Watch(number), found


def _why_other(
    original: Callable[..., Any],
    module: nn.Module,
    bound: Bound,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> str | None:
    """Returns why a module's function is not what its arguments describe, or None."""
    if module not in _checked:
        try:
            is_same = _is_what_is_said(original, module, bound, args, kwargs)
            name = f"{getattr(original, '__module__', '?')}.eager_attention_forward"
            _checked[module] = (
                None if is_same else f"{name} computes something else than its arguments say"
            )
        except Exception as error:
            _checked[module] = f"its function could not be tried on its own: {error}"
    return _checked[module]


def _is_what_is_said(
    original: Callable[..., Any],
    module: nn.Module,
    bound: Bound,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> bool:
    batch = bound.q.size(0)

    def first(x: Any) -> Any:
        if not isinstance(x, Tensor):
            return x
        # A tensor of one dimension holds a number a head, such as sinks; it has no batch axis.
        x = x[:1] if x.dim() > 1 and x.size(0) == batch else x
        return x.detach().float() if x.is_floating_point() else x

    args = tuple(first(x) for x in args)
    kwargs = {name: first(x) for name, x in kwargs.items()} | {"dropout": 0.0}
    with torch.no_grad(), torch.autocast(bound.q.device.type, enabled=False):
        said = bind(module, *args, **kwargs)
        assert isinstance(said, Bound)
        ours = _plain(said).transpose(1, 2)
        theirs, _ = original(module, *args, **kwargs)
        if theirs.shape != ours.shape:
            return False
        # Functions differ in rows that see no key.
        seen = ours.isfinite()
        difference = (theirs - ours).where(seen, 0.0).abs().max()
        return bool(difference <= _TOLERANCE * said.v.abs().max())


def _plain(bound: Bound) -> Tensor:
    """Computes what the arguments describe, `(B, H, N, D)`."""
    q, k, v, spec = bound[:4]
    group = q.size(1) // k.size(1)
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    scores = q @ k.transpose(-1, -2) * spec.scale
    if spec.softcap:
        scores = spec.softcap * torch.tanh(scores / spec.softcap)
    if spec.mask is not None:
        scores = scores + spec.mask
    if spec.sinks is None:
        return scores.softmax(-1) @ v
    sinks = spec.sinks.to(scores.dtype).view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
    return torch.cat([scores, sinks], -1).softmax(-1)[..., :-1] @ v


EAGER = EntryPoint(
    _NAME,
    home="transformers.modeling_utils",
    attribute="AttentionInterface.get_interface",
    bind=bind,
    before=_before_interface,
    traced=_traced_interface,
)
