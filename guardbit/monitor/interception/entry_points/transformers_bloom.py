"""BLOOM's attention in Hugging Face's library, written out in the model's own forward: watched.

The forward splits q, k and v in one method and merges the heads of the output in another. Both
methods get stand-ins. The mask and the ALiBi bias are arguments of the forward.
"""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary

from torch import Tensor, nn

from guardbit.guard import Around
from guardbit.kernels.runtime import runtime
from guardbit.kernels.spec import AttentionSpec
from guardbit.monitor.interception.entry_points.base import (
    Bound,
    EntryPoint,
    Refusal,
    heads_of,
    is_empty,
)
from guardbit.monitor.interception.entry_points.refusals import why_mask, why_now, why_tensors
from guardbit.monitor.interception.frames import frame_stack
from guardbit.monitor.interception.records import note_call
from guardbit.monitor.interception.rerunning import probe
from guardbit.monitor.interception.tracing import note_traced_call
from guardbit.monitor.interception.watching import WRITTEN_OUT, Watch
from guardbit.monitor.unseen import is_bloom

_HOME = "transformers.models.bloom.modeling_bloom"
_NAME = "transformers' BLOOM"
_COMPILED = f"{WRITTEN_OUT}; compiled it is not watched either"

# Calls between their split and their merge.
_running: WeakKeyDictionary[nn.Module, tuple[Watch, Bound]] = WeakKeyDictionary()


class _Bloom(EntryPoint):
    def find(self) -> bool:
        """See `EntryPoint.find`; a release with a forward that differs is not found."""
        return is_bloom(type(None) if self.owner is None else self.owner) and super().find()


def bind(module: Any, q: Tensor, k: Tensor, v: Tensor) -> Bound | Refusal:
    """Binds a call, see `base.EntryPoint`."""
    frame = frame_stack[-1]
    if frame.module is not module or not {"alibi", "attention_mask"} <= frame.kwargs.keys():
        return Refusal("its forward is called in another way than by BLOOM's layers", q, k)
    alibi, mask = frame.kwargs["alibi"], frame.kwargs["attention_mask"]
    why = why_mask(mask) or why_tensors(q, k, v) or why_now(q, k, v)
    if why is not None:
        return Refusal(why, q, k)
    bias = alibi.unflatten(0, (q.size(0), q.size(1)))  # (B, H, 1, M)
    spec = AttentionSpec(
        module.inv_norm_factor,
        mask=bias if mask is None else bias + mask,
        dropout_p=module.attention_dropout.p if module.training else 0.0,
    )
    return Bound(q, k, v, spec)


def _traced_split(self: nn.Module, fused_qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    assert SPLIT.original is not None
    q, k, v = SPLIT.original(self, fused_qkv)
    if runtime.is_inside_site():
        note_traced_call(runtime.current, heads_of(q, k), _COMPILED, _NAME)
    return q, k, v


def _before_split(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Around:
    module = args[0]

    def after(found: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = found
        watch = _watched(module, q, k, v)
        return (q if watch is None else watch.query(q)), k, v

    return Around(args, kwargs, after)


def _watched(module: nn.Module, q: Tensor, k: Tensor, v: Tensor) -> Watch | None:
    """Records an eager call; returns what watches it if there is an observer."""
    _running.pop(module, None)
    if not runtime.is_inside_site() or is_empty(q, k):
        return None
    number = int(runtime.current)
    if probe.note_call(number, q, k):
        return None
    found = bind(module, q, k, v)
    why = found.why if isinstance(found, Refusal) else None
    refusal = WRITTEN_OUT if why is None else f"{WRITTEN_OUT}; nor is it watched: {why}"
    note_call(number, heads_of(q, k), refusal, _NAME, watched=why is None)
    state = runtime.site(number)
    state.begin_forward()
    if isinstance(found, Refusal) or state.is_unheard:
        return None
    state.native_dropout_p = found.spec.dropout_p
    watch = Watch(number)
    _running[module] = watch, found
    return watch


def _traced_merge(self: nn.Module, x: Tensor) -> Tensor:
    assert MERGE.original is not None
    return MERGE.original(self, x)


def _before_merge(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Around | None:
    module, x = args  # x is (B * H, N, D)
    running = _running.pop(module, None)
    if running is None:
        return None
    watch, (q, k, v, spec, *_) = running
    out = watch.output(x.unflatten(0, (q.size(0), q.size(1))), q, k, v, spec)
    return Around((module, out.flatten(0, 1)), kwargs)


SPLIT = _Bloom(
    _NAME, _HOME, "BloomAttention._reshape", bind, before=_before_split, traced=_traced_split
)
MERGE = _Bloom(
    _NAME, _HOME, "BloomAttention._merge_heads", bind, before=_before_merge, traced=_traced_merge
)
