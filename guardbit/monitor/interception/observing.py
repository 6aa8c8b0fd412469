"""Attention that is unknown to GuardBit: the user's code shows its q, k and v.

Only `centered_keys` works there: it changes the keys and nothing else.
"""

import math
from typing import Any

import torch
from torch import Tensor

from guardbit import guard
from guardbit.kernels.heads import CENTERED, shift_keys
from guardbit.kernels.runtime import is_recomputing, number_of, runtime
from guardbit.kernels.spec import AttentionSpec, Causal, check_causal
from guardbit.monitor.interception.entry_points.base import heads_of, is_empty, why_call, why_groups
from guardbit.monitor.interception.frames import probe, report, reporting
from guardbit.monitor.interception.seen import OBSERVE, note_call, note_traced_call
from guardbit.monitor.interception.watching import gradient_as_it_came, hand_to_observer

_COMPILED = "GuardBit sees its tensors in eager code only: compiled it is not watched"
_ONLY_KEYS = (
    "GuardBit sees its tensors, not how attention is computed from them, so"
    f" the only stabilizer that can run is the one that changes the keys, {CENTERED}"
)

# Sites whose last ordinary forward ran without gradients. A reentrant checkpoint runs it again with
# gradients, and the observer hears of that run.
_to_be_observed: set[int] = set()


def observe(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: Causal = False,
    scale: float | None = None,
    mask: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Shows GuardBit the tensors of attention that it does not know, in one line before it.

    >>> q, k, v = torch.zeros(3, 1, 2, 8, 16)
    >>> q, k, v = observe(q, k, v, causal=True)

    It returns the very tensors it was given, unless heads are switched to `centered_keys`. Their
    keys then come back less their mean, which the softmax does not see. It lets the monitor measure
    the indicators that need no gradient: multiple maxima, the largest logit, entropy, the common
    part of the keys, and the norms of the weights.

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

    Returns:
        q, k and v.

    Raises:
        TypeError: If q, k or v is no tensor.
        ValueError: If `causal` is none of the three.
    """
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not isinstance(x, Tensor):
            raise TypeError(f"{name} is a {type(x).__name__}; it must be a tensor")
    check_causal(causal)
    if torch.compiler.is_compiling():
        if runtime.is_inside_site():
            note_traced_call(runtime.current, heads_of(q, k), _COMPILED, OBSERVE)
        return q, k, v
    keys = _hear(q, k, v, causal, scale, mask)
    return q, k if keys is None else keys, v


@reporting
def _hear(
    q: Tensor, k: Tensor, v: Tensor, causal: Causal, scale: float | None, mask: Tensor | None
) -> Tensor | None:
    """Records an eager call and hands it to its observer; returns the keys to give back."""
    if not runtime.is_inside_site() or is_empty(q, k):
        return None
    number = number_of(runtime.current)
    if probe.note_call(number, q, k):
        return None
    why = why_call(q, k, v, (mask,)) or why_groups(q, k)
    is_trained = any(x.requires_grad for x in (q, k, v))
    why = note_call(number, heads_of(q, k), why, OBSERVE, has_gradient=is_trained)
    if why is not None:
        return None
    spec = AttentionSpec(1.0 / math.sqrt(q.size(-1)) if scale is None else scale, causal, mask)
    state = runtime.site(number)
    state.requested = ("none",) * q.size(1)
    state.begin_forward()
    is_training = torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v))
    if not is_recomputing():
        (_to_be_observed.discard if is_training else _to_be_observed.add)(number)
    names = tuple(name if name == CENTERED else "none" for name in state.running)
    if is_training:
        state.ran_at = state.clock.now
        state.note(names, "" if names == state.running else _ONLY_KEYS)
    keys = k if CENTERED not in names else _Shifted.apply(k, names)
    # Once, also under activation checkpointing.
    is_due = not is_recomputing() or number in _to_be_observed
    if is_training and is_due and not state.is_unobserved:
        _hand_over(number, q, k, v, spec, names)
    return keys


_hand_over = reporting(hand_to_observer)


class _Shifted(torch.autograd.Function):
    """Keys less a vector, which is a constant to the gradients: they do not see it either."""

    @staticmethod
    def forward(ctx: Any, k: Tensor, names: tuple[str, ...]) -> Tensor:
        return shift_keys(k, names)[0]

    @staticmethod
    @guard.function(report, otherwise=gradient_as_it_came)
    def backward(ctx: Any, *d_outs: Any) -> Any:
        return d_outs[0], None
