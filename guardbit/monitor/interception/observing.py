"""Attention that is unknown to GuardBit: the user's code shows its q, k and v.

Only stabilizers that change the keys and nothing else work there, such as `centered_keys`.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from guardbit import guard
from guardbit.guard import Args, Kwargs
from guardbit.kernels.engines.libraries import Layout, as_given, heads_first
from guardbit.kernels.key_shifts import KEY_SHIFTS, shift_keys
from guardbit.kernels.runtime import is_recomputing, is_traced, runtime
from guardbit.kernels.spec import AttentionSpec, Causal, check_causal
from guardbit.monitor.interception.entry_points.base import heads_of, is_empty, why_call, why_groups
from guardbit.monitor.interception.errors import report, reporting
from guardbit.monitor.interception.frames import SITE_ATTRIBUTE, is_attached, site_number
from guardbit.monitor.interception.rerunning import probe
from guardbit.monitor.interception.seen import (
    OBSERVE,
    WATCH,
    Heads,
    note_call,
    note_traced_call,
    refuse_call,
)
from guardbit.monitor.interception.watching import Watch, gradient_as_it_came, hand_to_observer

_COMPILED = "GuardBit sees its tensors in eager code only: compiled it is not watched"
_ONLY_KEYS = (
    "GuardBit sees its tensors, not how attention is computed from them, so"
    f" the only stabilizers that can run are those that change the keys: {', '.join(KEY_SHIFTS)}"
)

# Sites whose last ordinary forward ran without gradients. A reentrant checkpoint runs it again with
# gradients, and the observer hears of that run.
_to_be_observed: set[int] = set()


class _Observed(NamedTuple):
    number: int
    tensors: tuple[Tensor, Tensor, Tensor]  # q, k and v
    keys: Tensor  # to be returned
    spec: AttentionSpec
    listens: bool  # whether an observer wants the call
    names: tuple[str, ...]  # what each head runs


def observe(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: Causal = False,
    scale: float | None = None,
    mask: Tensor | None = None,
    module: nn.Module | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Shows GuardBit the tensors of attention that it does not know, in one line before it.

    >>> q, k, v = torch.zeros(3, 1, 2, 8, 16)
    >>> q, k, v = observe(q, k, v, causal=True)

    It returns the very tensors it was given, unless heads are switched to `centered_keys`. Their
    keys then come back less their mean, which the softmax does not see. It lets the monitor measure
    the indicators that need no gradient: multiple maxima, the largest logit, entropy, the common
    part of the keys, and the norms of the weights. `watch_attention` shows the gradients too.

    Outside an instrumented model, and in compiled code, it does nothing. In compiled code the
    monitor says so.

    Args:
        q: Queries `(B, H, N, D)`.
        k: Keys `(B, H_kv, M, D)`, H a multiple of H_kv.
        v: Values `(B, H_kv, M, E)`.
        causal: False; True: query n sees keys up to n + M - N; "top-left": up to n.
        scale: Factor of the scores; None for 1 / sqrt(D).
        mask: Boolean, True where a query sees a key, or floating, added to the scaled scores;
            broadcasts to `(B, H, N, M)`.
        module: The instrumented module that the attention belongs to; None for the innermost one
            that is running.

    Returns:
        q, k and v.

    Raises:
        TypeError: If q, k or v is no tensor.
        ValueError: If `causal` is none of the three.
    """
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not isinstance(x, Tensor):
            raise TypeError(f"{name} is a {type(x).__name__}; expected a tensor")
    check_causal(causal)
    if torch.compiler.is_compiling():
        _note_traced(module, heads_of(q, k), OBSERVE)
        return q, k, v
    observed = _hear(module, q, k, v, (causal, scale, mask), OBSERVE)
    if observed is None:
        return q, k, v
    if observed.listens:
        _report(observed)
    return q, observed.keys, v


def watch_attention(
    module: nn.Module,
    *,
    q: str = "q",
    k: str = "k",
    v: str = "v",
    mask: str | None = None,
    out: int | None = None,
    causal: Causal = False,
    scale: float | None = None,
    layout: Layout = "BHND",
    fused: bool = False,
) -> Callable[[], None]:
    """Shows GuardBit a module whose `forward` takes q, k and v and returns attention's output.

    >>> class Core(nn.Module):
    ...     def forward(self, queries, keys, values): ...
    >>> take_back = watch_attention(Core(), q="queries", k="keys", v="values")

    It does what `observe` does. It also reads the gradients of the output and of the queries, so
    that dQ is compared with an exact one. The module's results keep their bits.

    Args:
        module: The module; in a model that is instrumented, before or after this.
        q: Name of the argument of its `forward` that holds the queries.
        k: Name of the argument that holds the keys.
        v: Name of the argument that holds the values.
        mask: Name of the argument that holds a mask; None if there is none.
        out: Index of attention's output among several outputs; None if it is the only one.
        causal: See `observe`.
        scale: See `observe`.
        layout: Layout of the tensors and the output: "BHND" is (batch, heads, tokens, head size),
            "BNHD" (batch, tokens, heads, head size).
        fused: Whether its backward takes delta from the output, as FlashAttention's does. The bias
            of delta is then watched; attention that is written out has none.

    Returns:
        A function that undoes it.

    Raises:
        TypeError: If `module` is no module.
        ValueError: If its `forward` has no such argument, or an option is none of the above.
    """
    if not isinstance(module, nn.Module):
        raise TypeError(f"module is a {type(module).__name__}; expected an nn.Module")
    signature = inspect.signature(module.forward)
    for name in (q, k, v) if mask is None else (q, k, v, mask):
        if name not in signature.parameters:
            known = ", ".join(signature.parameters)
            raise ValueError(
                f"{type(module).__name__}.forward has no argument '{name}'; there are {known}"
            )
    if layout not in ("BHND", "BNHD"):
        raise ValueError(f"layout is {layout!r}; allowed are 'BHND' and 'BNHD'")
    check_causal(causal)
    shown = _Shown(signature, q, k, v, mask, out, (causal, scale), layout, fused)
    handles = (
        module.register_forward_pre_hook(shown.begin, with_kwargs=True),
        module.register_forward_hook(shown.end, always_call=True),
    )

    def take_back() -> None:
        for handle in handles:
            handle.remove()

    return take_back


@dataclass
class _Shown:
    """The hooks of a module that `watch_attention` was called with; see there."""

    signature: inspect.Signature
    q: str
    k: str
    v: str
    mask: str | None
    out: int | None
    asked: tuple[Causal, float | None]
    layout: Layout
    fused: bool
    # Calls that have begun and not ended; a module may call itself.
    running: list[tuple[_Observed, Watch | None] | None] = field(default_factory=list)

    def begin(self, module: nn.Module, args: Args, kwargs: Kwargs) -> Any:
        if torch.compiler.is_compiling():
            _note_traced(module, (0, 0, 0), WATCH)
            return None
        self.running.append(None)
        return self._begin(module, args, kwargs)

    @reporting
    def _begin(self, module: nn.Module, args: Args, kwargs: Kwargs) -> tuple[Args, Kwargs] | None:
        bound = self.signature.bind(*args, **kwargs)
        named = bound.arguments
        for name in (self.q, self.k, self.v):
            if not isinstance(named.get(name), Tensor):
                kind = type(named.get(name)).__name__
                _refuse(module, f"{type(module).__name__} got a {kind} as {name}, not a tensor")
                return None
        q, k, v = (heads_first(named[name], self.layout) for name in (self.q, self.k, self.v))
        mask = None if self.mask is None else named.get(self.mask)
        observed = _hear(module, q, k, v, (*self.asked, mask), WATCH)
        if observed is None:
            return None
        named[self.k] = as_given(observed.keys, self.layout)
        watch = Watch(observed.number) if observed.listens else None
        if watch is not None:
            named[self.q] = as_given(watch.query(q), self.layout)
        given = bound.args, bound.kwargs
        self.running[-1] = observed, watch  # last: after an error nothing of the call is observed
        return given

    def end(self, module: nn.Module, args: Any, output: Any) -> Any:
        if torch.compiler.is_compiling():
            return None
        running = self.running.pop() if self.running else None
        # None: the forward failed, or a checkpoint stopped it early.
        return None if running is None or output is None else self._end(module, output, *running)

    @reporting
    def _end(self, module: nn.Module, output: Any, observed: _Observed, watch: Watch | None) -> Any:
        why = self._why_unlike(type(module).__name__, observed, output)
        if why is not None:
            refuse_call(observed.number, why)
            return None
        if watch is None:
            return None
        out = heads_first(self._out_of(output), self.layout)
        out = watch.output(out, *observed.tensors, observed.spec, keeps_output=self.fused)
        out = as_given(out, self.layout)
        if self.out is None:
            return out
        place = self.out % len(output)
        outputs = [out if number == place else x for number, x in enumerate(output)]
        return output._make(outputs) if hasattr(output, "_make") else type(output)(outputs)

    def _out_of(self, output: Any) -> Any:
        return output if self.out is None else output[self.out]

    def _why_unlike(self, name: str, observed: _Observed, output: Any) -> str | None:
        """Why a module's output is not what was said to `watch_attention`, or None."""
        is_several = type(output) in (tuple, list) or hasattr(output, "_make")
        if self.out is None and is_several:
            return (
                f"{name} returns {len(output)} values: pass out=0, or the place of attention's"
                " output among them, to watch_attention"
            )
        if self.out is not None and isinstance(output, Tensor):
            return f"{name} returns one tensor: pass no `out` to watch_attention"
        if self.out is not None and not is_several:
            return f"{name} returns a {type(output).__name__}, and `out` is a place in a tuple"
        if self.out is not None and not -len(output) <= self.out < len(output):
            return f"{name} returns {len(output)} values, and out={self.out} is none of them"
        out = self._out_of(output)
        place = "" if self.out is None else f" at out={self.out}"
        if not isinstance(out, Tensor):
            return f"{name} returns a {type(out).__name__}{place}, not attention's output"
        q, _, v = observed.tensors
        expected = as_given(q, self.layout).shape[:-1] + v.shape[-1:]
        if out.shape != expected:
            return (
                f"{name} returns a tensor of shape {tuple(out.shape)}{place}; attention's output"
                f" has {tuple(expected)}, before its heads are put together"
            )
        return None


def _number(module: nn.Module | None) -> int | None:
    """Returns the number of the site that a call belongs to, or None outside any site."""
    if is_traced():
        return None
    if module is not None:
        # What is run again to find W_Q is a copy, which carries the number.
        is_known = is_attached(module) if probe.site is None else hasattr(module, SITE_ATTRIBUTE)
        return site_number(module) if is_known else None
    return int(runtime.current) if runtime.is_inside_site() else None


def _refuse(module: nn.Module, why: str) -> None:
    number = _number(module)
    if number is not None and probe.site is None:
        note_call(number, (0, 0, 0), why, WATCH)


def _note_traced(module: nn.Module | None, heads: Heads, entry: str) -> None:
    if module is not None and hasattr(module, SITE_ATTRIBUTE):
        note_traced_call(getattr(module, SITE_ATTRIBUTE).site, heads, _COMPILED, entry)
    elif runtime.is_inside_site():
        note_traced_call(runtime.current, heads, _COMPILED, entry)


@reporting
def _hear(
    module: nn.Module | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    asked: tuple[Causal, float | None, Tensor | None],
    entry: str,
) -> _Observed | None:
    """Records an eager call; returns it unless there is nothing to change or to report."""
    number = _number(module)
    if number is None or is_empty(q, k) or probe.note_call(number, q, k):
        return None
    causal, scale, mask = asked
    why = why_call(q, k, v, (mask,)) or why_groups(q, k)
    is_trained = any(x.requires_grad for x in (q, k, v))
    why = note_call(number, heads_of(q, k), why, entry, has_gradient=is_trained)
    if why is not None:
        return None
    spec = AttentionSpec(1.0 / math.sqrt(q.size(-1)) if scale is None else scale, causal, mask)
    state = runtime.site(number)
    state.requested = ("none",) * q.size(1)
    state.begin_forward()
    is_training = torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v))
    if not is_recomputing():
        (_to_be_observed.discard if is_training else _to_be_observed.add)(number)
    names = tuple(name if name in KEY_SHIFTS else "none" for name in state.running)
    if is_training:
        state.ran_at = state.clock.now
        state.note(names, "" if names == state.running else _ONLY_KEYS)
    keys = k if KEY_SHIFTS.keys().isdisjoint(names) else _Shifted.apply(k, names)
    return _Observed(number, (q, k, v), keys, spec, is_training and not state.is_unobserved, names)


class _Shifted(torch.autograd.Function):
    """Keys less a vector, which is a constant to the gradients: they do not see it either."""

    @staticmethod
    def forward(ctx: Any, k: Tensor, names: tuple[str, ...]) -> Tensor:
        return shift_keys(k, names).k

    @staticmethod
    @guard.function(report, otherwise=gradient_as_it_came)
    def backward(ctx: Any, *d_outs: Any) -> Any:
        return d_outs[0], None


@reporting
def _report(observed: _Observed) -> None:
    """Reports a call to the observer in its forward: once, also under activation checkpointing."""
    if not is_recomputing() or observed.number in _to_be_observed:
        hand_to_observer(observed.number, *observed.tensors, observed.spec, observed.names)
