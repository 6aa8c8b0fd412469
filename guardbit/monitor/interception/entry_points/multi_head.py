"""`F.multi_head_attention_forward`, which `nn.MultiheadAttention` calls.

Without weights to return it calls `F.scaled_dot_product_attention` in turn, which takes that call.
With them PyTorch writes attention out, which is watched and not switched.
"""

from __future__ import annotations

import functools
import inspect
import types
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from guardbit.kernels.runtime import is_jit_traced, runtime
from guardbit.kernels.spec import AttentionSpec
from guardbit.monitor.interception.calls import Heads
from guardbit.monitor.interception.doors import guarded
from guardbit.monitor.interception.entry_points.base import EntryPoint, Refusal
from guardbit.monitor.interception.entry_points.refusals import why_head, why_now
from guardbit.monitor.interception.records import note_call
from guardbit.monitor.interception.rerunning import probe
from guardbit.monitor.interception.tracing import note_traced_call
from guardbit.monitor.interception.watching import WRITTEN_OUT, Watch
from guardbit.monitor.stages import log

_NAME = "F.multi_head_attention_forward"

# The compiler treats PyTorch's own function as one opaque call; a copy it looks into.
_original = F.multi_head_attention_forward


def _copy(namespace: dict[str, Any]) -> types.FunctionType:
    """PyTorch's function with other globals."""
    copied = types.FunctionType(
        _original.__code__, namespace, _original.__name__, _original.__defaults__
    )
    copied.__kwdefaults__ = _original.__kwdefaults__
    return copied


_traceable = _copy(_original.__globals__)

_positions = {name: i for i, name in enumerate(inspect.signature(_original).parameters)}

_RETURNS_WEIGHTS = f"it returns attention weights (need_weights=True), so {WRITTEN_OUT}"
# Why PyTorch's function is not understood any more, once that has shown.
_why_misread: str | None = None

_COMPILED = f"{_RETURNS_WEIGHTS}; compiled it is not watched either"


def bind(*args: Any, **kwargs: Any) -> Refusal:
    """Binds a call, see `base.EntryPoint`."""
    return Refusal(_RETURNS_WEIGHTS)


@functools.wraps(_original)
def multi_head_attention_forward(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
    """Stands in for `F.multi_head_attention_forward`; see there."""
    if not torch.compiler.is_compiling():
        if is_jit_traced():
            return _original(*args, **kwargs)
        watched = _watched(args, kwargs)
        if watched is not None:
            return watched.run(args, kwargs)
    elif runtime.is_inside_site() and _given("need_weights", args, kwargs, True):
        note_traced_call(runtime.current, _heads_of_module(args, kwargs), _COMPILED, _NAME)
    return _traceable(*args, **kwargs)


def _given(name: str, args: tuple[Any, ...], kwargs: dict[str, Any], default: Any = None) -> Any:
    position = _positions[name]
    return args[position] if position < len(args) else kwargs.get(name, default)


def _heads_of_module(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Heads:
    num_heads = _given("num_heads", args, kwargs)
    return num_heads, num_heads, _given("embed_dim_to_check", args, kwargs) // num_heads


@guarded
def _watched(args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Products | None:
    """Notes an eager call; returns what hears of it where somebody listens."""
    if not runtime.is_inside_site():
        return None
    if probe.site is not None:
        if len(args) <= _positions["need_weights"]:
            # With weights to return, attention is written out where no call shows its queries.
            kwargs["need_weights"] = False
        return None
    if not _given("need_weights", args, kwargs, True):
        return None
    number = int(runtime.current)
    heads = _heads_of_module(args, kwargs)
    query = _given("query", args, kwargs)
    why = _why_misread or why_head(query, heads[2]) or why_now(query)
    refusal = _RETURNS_WEIGHTS if why is None else f"{_RETURNS_WEIGHTS}; nor is it watched: {why}"
    note_call(number, heads, refusal, _NAME, watched=why is None)
    state = runtime.site(number)
    state.begin_forward()
    if why is not None or state.is_unheard or not torch.is_grad_enabled():
        return None
    dropout_p = _given("dropout_p", args, kwargs) if _given("training", args, kwargs, True) else 0.0
    return _Products(Watch(number), heads[0], dropout_p)


class _Products:
    """`torch` as PyTorch's function gets it, whose two products are heard of.

    The first is of the scaled queries and the keys, and adds the mask; the second is of P and the
    values. All tensors are `(B * H, rows, columns)`.
    """

    def __init__(self, watch: Watch, num_heads: int, dropout_p: float) -> None:
        self._watch = watch
        self._num_heads = num_heads
        self._dropout_p = dropout_p
        self._inputs: tuple[Tensor, Tensor, Tensor | None] | None = None
        self._is_heard = False

    def run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Tensor, Tensor | None]:
        """Calls PyTorch's function."""
        global _why_misread
        out, weights = _copy({**_original.__globals__, "torch": self})(*args, **kwargs)
        if not self._is_heard:
            _why_misread = f"PyTorch {torch.__version__} writes attention out in another way"
            log.warning("%s: nothing is measured where weights are returned", _why_misread)
        return out, self._watch.weights(weights)

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    def bmm(self, first: Tensor, second: Tensor) -> Tensor:
        """`torch.bmm`."""
        if self._is_heard:
            return torch.bmm(first, second)
        if self._inputs is None:
            return torch.bmm(self._begin(first, second, None), second)
        self._is_heard = True
        q, k, mask = self._inputs
        p = self._watch.probabilities(self._by_head(first))
        out = self._by_head(torch.bmm(p.flatten(0, 1), second))
        spec = AttentionSpec(1.0, mask=mask, dropout_p=self._dropout_p)
        out = self._watch.output(out, q, k, self._by_head(second), spec, p)
        return out.flatten(0, 1)

    def baddbmm(self, mask: Tensor, q: Tensor, k: Tensor) -> Tensor:
        """`torch.baddbmm`."""
        return torch.baddbmm(mask, self._begin(q, k, mask), k)

    def _begin(self, q: Tensor, k: Tensor, mask: Tensor | None) -> Tensor:
        if mask is not None:
            mask = mask.unsqueeze(0) if mask.size(0) == 1 else self._by_head(mask)
        q = self._watch.query(self._by_head(q))
        self._inputs = q, self._by_head(k.transpose(1, 2)), mask
        return q.flatten(0, 1)

    def _by_head(self, x: Tensor) -> Tensor:
        return x.unflatten(0, (-1, self._num_heads))


MULTI_HEAD = EntryPoint(
    _NAME,
    home="torch.nn.functional",
    attribute="multi_head_attention_forward",
    stand_in=multi_head_attention_forward,
    bind=bind,
    original=_original,
)
