"""`F.multi_head_attention_forward`, which `nn.MultiheadAttention` calls.

With need_weights=False it calls `F.scaled_dot_product_attention`, whose entry point takes that
call. With need_weights=True PyTorch writes attention out, which is watched but cannot be switched.
"""

import functools
import inspect
import types
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from guardbit import private
from guardbit.guard import Args, Around, Kwargs, of_torch, then_finish
from guardbit.kernels.flex import with_globals
from guardbit.kernels.runtime import is_traced, number_of, runtime
from guardbit.kernels.spec import AttentionSpec
from guardbit.monitor.interception.entry_points import base
from guardbit.monitor.interception.frames import probe, report, stand_in
from guardbit.monitor.interception.seen import Heads, note_call, note_outside, note_traced_call
from guardbit.monitor.interception.watching import WRITTEN_OUT, Watch
from guardbit.monitor.stages import log

_NAME, _HOME = "F.multi_head_attention_forward", "torch.nn.functional"


def _unknown(*args: Any, **kwargs: Any) -> Any:
    """In the place of PyTorch's function where another one has taken it."""
    raise RuntimeError(f"{_NAME} was replaced before GuardBit was imported")


_original = F.multi_head_attention_forward
if not base.is_genuine(_original, _HOME):
    _original = _unknown

_traceable = with_globals(_original, _original.__globals__)

_positions = {name: i for i, name in enumerate(inspect.signature(_original).parameters)}

_RETURNS_WEIGHTS = f"it returns attention weights (need_weights=True), so {WRITTEN_OUT}"
# Why this PyTorch's function is not understood, once that is known.
_why_misread: str | None = None

_COMPILED = f"{_RETURNS_WEIGHTS}; compiled it is not watched either"


def bind(*args: Any, **kwargs: Any) -> base.Refusal:
    return base.Refusal(_RETURNS_WEIGHTS)


def _before(args: Args, kwargs: Kwargs) -> Around | None:
    watched = None if is_traced() else _watched(args, kwargs)
    if watched is None:
        return None
    # PyTorch's function, with this in place of `torch`.
    function = with_globals(_original, {**_original.__globals__, "torch": watched})
    return Around(args, kwargs, watched.after, function)


def _traced(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
    if runtime.is_inside_site() and _given("need_weights", args, kwargs, True):
        note_traced_call(runtime.current, _heads_of_module(args, kwargs), _COMPILED, _NAME)
    return _traceable(*args, **kwargs)


def _given(name: str, args: Args, kwargs: Kwargs, default: Any = None) -> Any:
    position = _positions[name]
    return args[position] if position < len(args) else kwargs.get(name, default)


def _heads_of_module(args: Args, kwargs: Kwargs) -> Heads:
    num_heads = _given("num_heads", args, kwargs)
    return num_heads, num_heads, _given("embed_dim_to_check", args, kwargs) // num_heads


def _watched(args: Args, kwargs: Kwargs) -> "_Products | None":
    """Records an eager call; returns what watches it if there is an observer."""
    if not runtime.is_inside_site():
        if _given("need_weights", args, kwargs, True):
            note_outside(_NAME, args, kwargs)
        return None
    if probe.site is not None:
        if len(args) <= _positions["need_weights"]:
            # Attention that returns weights is written out, so no other call shows its queries.
            kwargs["need_weights"] = False
        return None
    if not _given("need_weights", args, kwargs, True):
        return None
    number = number_of(runtime.current)
    heads = _heads_of_module(args, kwargs)
    query = _given("query", args, kwargs)
    why = _why_misread or ("its inputs are nested" if query.is_nested else None)
    why = why or base.why_kind(query, query, query) or base.why_now(query)
    refusal = _RETURNS_WEIGHTS if why is None else f"{_RETURNS_WEIGHTS}; nor is it watched: {why}"
    given = (*args, *kwargs.values())
    is_trained = any(isinstance(x, Tensor) and x.requires_grad for x in given)
    note_call(number, heads, refusal, _NAME, watched=why is None, has_gradient=is_trained)
    state = runtime.site(number)
    state.begin_forward()
    if why is not None or state.is_unobserved or not torch.is_grad_enabled():
        return None
    dropout_p = _given("dropout_p", args, kwargs) if _given("training", args, kwargs, True) else 0.0
    return _Products(Watch(number), heads[0], dropout_p)


class _Products:
    """Stands in for `torch` in PyTorch's function, to watch Q K^T + mask and P V of all heads."""

    def __init__(self, watch: Watch, num_heads: int, dropout_p: float) -> None:
        self._watch = watch
        self._num_heads = num_heads
        self._dropout_p = dropout_p
        self._inputs: tuple[Tensor, Tensor, Tensor | None] | None = None  # q, k and the mask
        self._is_called = self._is_observed = False
        bmm, baddbmm = (types.SimpleNamespace(original=f) for f in (torch.bmm, torch.baddbmm))
        self.bmm = stand_in(bmm, self._before_bmm, None)
        self.baddbmm = stand_in(baddbmm, self._before_baddbmm, None)

    def after(self, found: tuple[Tensor, Tensor | None]) -> tuple[Tensor, Tensor | None]:
        global _why_misread
        out, weights = found
        if not self._is_called:
            _why_misread = f"PyTorch {private.VERSION} writes attention out in another way"
            log.warning("%s: nothing is measured where weights are returned", _why_misread)
        return out, self._watch.weights(weights)

    __getattr__ = of_torch

    def _before_bmm(self, args: Args, kwargs: Kwargs) -> Around | None:
        self._is_called = True
        first, second = args
        if self._is_observed:
            return None
        if self._inputs is None:
            return Around((self._begin(first, second, None), second), kwargs)
        q, k, mask = self._inputs
        spec = AttentionSpec(1.0, mask=mask, dropout_p=self._dropout_p)

        def after(out: Tensor) -> Tensor:
            values = self._by_head(second)
            hear = functools.partial(self._watch.output, self._by_head(out), q, k, values, spec)
            return then_finish(
                hear, functools.partial(torch.flatten, start_dim=0, end_dim=1), report
            )

        around = Around(args, kwargs, after)
        self._is_observed = True  # last, because this is tried again after an error
        return around

    def _before_baddbmm(self, args: Args, kwargs: Kwargs) -> Around:
        mask, q, k = args
        return Around((mask, self._begin(q, k, mask), k), kwargs)

    def _begin(self, q: Tensor, k: Tensor, mask: Tensor | None) -> Tensor:
        if mask is not None:
            mask = mask.unsqueeze(0) if mask.size(0) == 1 else self._by_head(mask)
        q = self._watch.query(self._by_head(q))
        self._inputs = q, self._by_head(k.transpose(1, 2)), mask
        return q.flatten(0, 1)

    def _by_head(self, x: Tensor) -> Tensor:
        return x.unflatten(0, (-1, self._num_heads))


MULTI_HEAD = base.EntryPoint(
    _NAME,
    home=_HOME,
    attribute="multi_head_attention_forward",
    bind=bind,
    original=None if _original is _unknown else _original,
    before=_before,
    traced=_traced,
)

#: Stands in for PyTorch's function.
multi_head_attention_forward = functools.wraps(_original)(MULTI_HEAD.stand_in)
