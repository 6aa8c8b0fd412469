"""Attention of Hugging Face's models with `attn_implementation="eager"`: watched, not switched.

Each model has an `eager_attention_forward` of its own and gets it from
`AttentionInterface.get_interface`, which has a stand-in here. GuardBit does not trust the
arguments: once for each module, the function is run in FP32 on its first sequence and compared with
the attention that the arguments describe.
"""

import functools
import math
from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from guardbit.guard import Args, Around, Kwargs, call_first
from guardbit.kernels.reference import shadow
from guardbit.kernels.runtime import runtime
from guardbit.kernels.spec import AttentionSpec
from guardbit.kernels.tensors import as_given, heads_first
from guardbit.monitor.interception.entry_points import base
from guardbit.monitor.interception.frames import probe
from guardbit.monitor.interception.watching import WRITTEN_OUT

_NAME = "transformers' eager attention"

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
) -> base.Bound | base.Refusal:
    """Binds a call, see `base.EntryPoint`; the output is (batch, tokens, heads, head size)."""
    masks = attention_mask, position_bias
    why = base.why_call(query, key, value, masks, dropout) or base.why_groups(query, key)
    if why is not None:
        return base.Refusal(why, query, key)
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
    return base.Bound(query, key, value, spec)


def _attending(found: Any, args: Args, kwargs: Kwargs) -> Any:
    default = args[2] if len(args) > 2 else kwargs["default"]
    if found is default and runtime.is_inside_site():
        return functools.partial(attend, found)
    return found


def _bind(
    original: Callable[..., Any], module: nn.Module, *args: Any, **kwargs: Any
) -> base.Bound | base.Refusal:
    found = bind(module, *args, **kwargs)
    why = found.why if isinstance(found, base.Refusal) else None
    is_run = not torch.compiler.is_compiling() and probe.site is None
    if is_run and isinstance(found, base.Bound) and not base.is_empty(found.q, found.k):
        why = _why_other(original, module, found, args, kwargs)
    if isinstance(found, base.Refusal) or why is not None:
        return base.Refusal(f"{WRITTEN_OUT}; nor is it watched: {why}", found.q, found.k)
    return base.Refusal(WRITTEN_OUT, found.q, found.k, found)


def _before(args: Args, kwargs: Kwargs) -> Around | None:
    found = base.observed_eagerly(_ATTEND, args, kwargs) if runtime.is_inside_site() else None
    if not isinstance(found, base.Watched):
        return None
    watch, bound = found
    original, module, query, *others = args
    key, value = others[:2]

    def after(found: Any) -> Any:
        out, weights = found
        out = watch.output(heads_first(out, "BNHD"), watched, key, value, bound.spec)
        return as_given(out, "BNHD"), watch.weights(weights)

    watched = watch.query(query)
    return Around((original, module, watched, *others), kwargs, after)


# A model's `eager_attention_forward` is the first argument of what stands in for it.
_ATTEND = base.EntryPoint(
    _NAME,
    home="",
    attribute="eager_attention_forward",
    bind=_bind,
    original=call_first,
    before=_before,
)
attend = _ATTEND.stand_in


def _why_other(
    original: Callable[..., Any], module: nn.Module, bound: base.Bound, args: Args, kwargs: Kwargs
) -> str | None:
    """Returns why a module's function is not what its arguments describe, or None."""
    if module not in _checked:
        name = f"{getattr(original, '__module__', '?')}.eager_attention_forward"
        try:
            is_same = _is_what_is_said(original, module, bound, args, kwargs)
            why = f"{name} computes something else than its arguments say"
            _checked[module] = None if is_same else why
        except Exception as error:
            _checked[module] = f"its function could not be tried on its own: {error}"
    return _checked[module]


def _is_what_is_said(
    original: Callable[..., Any], module: nn.Module, bound: base.Bound, args: Args, kwargs: Kwargs
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
        assert isinstance(said, base.Bound)
        ours = shadow(said.q, said.k, said.v, spec=said.spec)
        theirs, _ = original(module, *args, **kwargs)
        if theirs.shape != ours.out.transpose(1, 2).shape:
            return False
        # Functions differ in rows that see no key.
        seen = ours.row_max.isfinite()[..., None]
        difference = (theirs.transpose(1, 2) - ours.out).where(seen, 0.0).abs().max()
        return bool(difference <= _TOLERANCE * said.v.abs().max())


EAGER = base.EntryPoint(
    _NAME,
    home="transformers.modeling_utils",
    attribute="AttentionInterface.get_interface",
    bind=bind,
    # A model that gets a function of its own gets `attend`.
    before=lambda args, kwargs: Around(
        args, kwargs, functools.partial(_attending, args=args, kwargs=kwargs)
    ),
    traced=lambda *args, **kwargs: _attending(EAGER.original(*args, **kwargs), args, kwargs),
)
