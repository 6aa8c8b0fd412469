"""`F.scaled_dot_product_attention`."""

import math
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.fx import Proxy
from torch.overrides import handle_torch_function, has_torch_function

from guardbit import private
from guardbit.guard import Args, Around, Kwargs, Result
from guardbit.kernels import engines
from guardbit.kernels.engines import scaled_dot_product_attention as original
from guardbit.kernels.op import plain_spec
from guardbit.kernels.spec import AttentionSpec
from guardbit.kernels.tensors import autocast_tensors
from guardbit.monitor.interception.entry_points import base
from guardbit.monitor.interception.sharding import Share, share_of_tensors

_OTHER_WIDTH = "its values have another head size than its keys"
_TWO_MASKS = "it is called with a mask and is_causal=True, of which PyTorch takes one"
_NESTED = "its inputs are nested, in another way than jagged (batch, heads, tokens, head size)"
_BY_MATH = "so PyTorch's math kernel runs it, whose backward takes delta from P itself"


# `torch.compile(dynamic=True)` makes a symbol of a default of 0.0, and PyTorch fails where two
# checkpointed blocks share one.
def bind(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> base.Bound | base.Refusal:
    shared: tuple[DTensor, Share] | None = None
    if isinstance(query, DTensor) and not torch.compiler.is_compiling():
        share = share_of_tensors((query, key, value), heads_axis=1)
        if isinstance(share, str) or dropout_p:
            why = share if isinstance(share, str) else "it has DTensors and dropout"
            return base.Refusal(why, query, key)
        shared = query, share
        query, key, value = (cast(DTensor, x).to_local() for x in (query, key, value))
    why = _TWO_MASKS if attn_mask is not None and is_causal else None
    why = why or base.why_options((attn_mask,), dropout_p) or base.why_kind(query, key, value)
    why = why or base.why_now(query, key, value)
    batch, broadcasts, is_eager = None, None, not torch.compiler.is_compiling()
    # In most calls nothing more has to be asked.
    are_alike = is_eager and not (query.is_nested or key.is_nested or value.is_nested)
    are_alike = are_alike and query.dim() == 4 and query.shape == key.shape == value.shape
    if why is None and not are_alike:
        batch = _batch_of(query, key, value)
        why = batch if isinstance(batch, str) else base.why_unlike(query, key, value)
        # PyTorch's math kernel serves calls with one key head for all query heads.
        broadcasts = None if why else base.why_groups(query, key, are_allowed=enable_gqa)
    if broadcasts is not None and key.size(-3) != 1:
        why = broadcasts
    if query.is_nested and (attn_mask is not None or (is_causal and query.size(2) != key.size(2))):
        why = why or "its inputs are nested, with a mask of them"
    if why is not None or isinstance(batch, str):
        return base.Refusal(why or "", query, key)
    if scale is None:
        scale = 1.0 / math.sqrt(query.size(-1))
    causal = "top-left" if is_causal else False
    if attn_mask is None and is_eager:
        spec = plain_spec(scale, causal, dropout_p)
    else:
        spec = AttentionSpec(scale, causal, attn_mask, dropout_p)
    bound = base.Bound(query, key, value, spec, shared=shared, batch=batch)
    why = None if batch is None else _why_kept(query)
    why = why or base.why_size(query, value)
    if why is None and broadcasts is not None:
        why = f"{broadcasts}, {_BY_MATH}"
    elif why is None and key.size(3) != value.size(3):
        why = base.OTHER_WIDTH if shared is not None else _why_width(bound)
    if why is None:
        return bound
    return base.Refusal(why, query, key, bound if shared is None else None)


def _why_width(bound: base.Bound) -> str | None:
    """Returns why a call is not switched whose values are not as wide as its keys, or None."""
    if torch.compiler.is_compiling():
        return f"{_OTHER_WIDTH}, which is switched in eager runs only"
    q, k, v = autocast_tensors(bound.q, bound.k, bound.v)
    is_rounded = engines.choose(q, k, v, bound.spec, training=True).reads_out
    return None if is_rounded else f"{_OTHER_WIDTH}, {_BY_MATH}"


def _why_kept(q: Tensor) -> str:
    """Why a call with such tensors keeps its kernel, as a clause."""
    if q.is_nested:
        return "its inputs are jagged tensors, and a switch needs ordinary ones"
    if q.dim() == 4:
        return "its keys or values are shared by sequences, and a switch needs each with its own"
    one = "; eager they are watched as one head" if q.dim() < 4 else ""
    return f"its inputs have {q.dim()} axes, and a switch needs four: with batch and heads{one}"


def _batch_of(q: Tensor, k: Tensor, v: Tensor) -> tuple[int, ...] | str | None:
    """The axes before the heads; None for (batch, heads, tokens, head size); else why not."""
    tensors: tuple[Any, ...] = q, k, v
    if q.is_nested or k.is_nested or v.is_nested:
        are_jagged = all(x.layout is torch.jagged and x.dim() == 4 for x in tensors)
        is_known = are_jagged and all(x._ragged_idx == 2 and x._lengths is None for x in tensors)
        return () if is_known and tensors[1].offsets() is tensors[2].offsets() else _NESTED
    if q.dim() == k.dim() == v.dim() == 4 and q.size(0) == k.size(0) == v.size(0):
        return None
    if not q.dim() == k.dim() == v.dim() >= 2:
        return "its inputs differ in their number of axes"
    before = [x.shape[: -3 if x.dim() > 3 else -2] for x in tensors]
    for of_queries, *others in zip(*before, strict=True):
        if not {of_queries, 1}.issuperset(others):
            return "its queries and keys differ in batch"
    return tuple(before[0])


def _tensors(args: Args, kwargs: Kwargs) -> list[Tensor]:
    return [x for x in (*args, *kwargs.values()) if isinstance(x, Tensor)]


def _before(args: Args, kwargs: Kwargs) -> Around | Result | None:
    """Handles an eager call; one that a tensor subclass takes over is seen when it calls again."""
    is_traced = private.is_symbolic_trace()
    values = *args, *kwargs.values()
    proxies = [x for x in values if isinstance(x, Proxy)] if is_traced else []
    if proxies:  # by itself PyTorch would name the stand-in in the graph
        return Around(args, kwargs, function=partial(handle_torch_function, original, proxies))
    is_taken = has_torch_function(values) and base.is_taken_over(_tensors(args, kwargs))
    return None if is_taken else base.before(SDPA, args, kwargs)


def _traced(*args: Any, **kwargs: Any) -> Tensor:
    """What compilers trace; a subclass that takes a call over gets PyTorch's own function."""
    tensors = _tensors(args, kwargs)
    for x in tensors:
        if base.takes_over(x):
            return handle_torch_function(scaled_dot_product_attention, tensors, *args, **kwargs)
    return base.call(SDPA, *args, **kwargs)


SDPA = base.EntryPoint(
    "F.scaled_dot_product_attention",
    home="torch.nn.functional",
    attribute="scaled_dot_product_attention",
    bind=bind,
    original=original,
    before=_before,
    traced=_traced,
)

#: Stands in for PyTorch's function, also where TorchScript compiles a call of it.
scaled_dot_product_attention = SDPA.stand_in
_register, _find = private.torch_script[2:]
_register(scaled_dot_product_attention, _find(original))
