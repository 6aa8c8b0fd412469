"""Attention that is watched but cannot be switched: the original runs, an observer gets the call.

The call's queries and output keep their bits; hooks on them report their gradients. At steps when
no observer listens the original runs alone. For eager calls only.

Tensors that are not (batch, heads, tokens, head size) are read as if they were: jagged sequences as
packed ones, axes before the heads as one batch, and tensors without an axis of heads as one head.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from guardbit import guard
from guardbit.kernels.reference import Dropout
from guardbit.kernels.runtime import AttentionCall, runtime
from guardbit.kernels.spec import AttentionSpec, Documents
from guardbit.kernels.tensors import autocast_tensors
from guardbit.monitor.interception.frames import report, reporting

#: Why attention that is written out is not switched.
WRITTEN_OUT = (
    "it is written out in PyTorch: its delta comes from the same P and is not rounded, so there is"
    " nothing to correct"
)


class Watch:
    """One call that is watched; the observer hears of it when dQ has been computed."""

    def __init__(self, number: int, batch: tuple[int, ...] | None = None) -> None:
        self._number = number
        self._batch = batch  # if the tensors have other axes than four, see `sdpa.bind`
        self._waits_for_dq = False
        self._is_dq_of_attention = True
        # Filled during the backward: dO, q, k and v.
        self._saved: tuple[Tensor, ...] = ()
        self._spec = AttentionSpec(1.0)

    def query(self, q: Tensor) -> Tensor:
        """Returns what the call gets as queries, with a hook on their gradient."""
        observed = self._hooked(q, self._report)
        self._waits_for_dq = observed is not q
        return observed

    def weights(self, weights: Tensor | None) -> Tensor | None:
        """Returns the weights that the call returns; if a loss uses them, dQ is not all from dO."""
        return None if weights is None else self._hooked(weights, self._take_d_weights)

    def _hooked(self, x: Tensor, hook: Callable[[Tensor], None]) -> Tensor:
        if not (torch.is_grad_enabled() and x.requires_grad):
            return x
        return _either(x, self._observed(x, hook))

    @reporting
    def _observed(self, x: Tensor, hook: Callable[[Tensor], None]) -> Tensor:
        x = x.view_as(x)
        x.register_hook(hook)
        return x

    def output(self, out: Tensor, q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec) -> Tensor:
        """Returns what the caller gets as output, with a hook on its gradient."""
        if not (torch.is_grad_enabled() and out.requires_grad):
            return out
        self._spec = spec
        hear = functools.partial(self._observed_output, out, q, k, v)
        return guard.then_finish(hear, functools.partial(_either, out), report)

    @reporting
    def _observed_output(self, out: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return _Output.apply(out, self, *autocast_tensors(q, k, v))

    @reporting
    def take_d_out(self, d_out: Tensor, saved: tuple[Tensor, ...]) -> None:
        self._saved = d_out, *saved
        if not self._waits_for_dq:
            self._report(None)

    @reporting
    def _take_d_weights(self, _: Tensor) -> None:
        self._is_dq_of_attention = False

    @reporting
    def _report(self, dq: Tensor | None) -> None:
        saved, self._saved = self._saved, ()
        if not saved:
            return
        spec = self._spec
        if self._batch is not None:
            spec = spec_in_four_axes(spec, saved[1], saved[2], self._batch)
        d_out, q, k, v = map(self._read, saved)
        heads, dropout_p = q.size(1), spec.dropout_p
        dropped = None
        if dropout_p > 0:  # PyTorch does not say which entries it dropped
            dropped = Dropout(
                dropout_p, torch.zeros((), dtype=torch.int64, device="cpu"), (), heads
            )
        hand_to_observer(
            self._number, q, k, v, spec, ("none",) * heads, dropout=dropped,
            d_out=d_out.detach().to(q.dtype),
            dq=self._read(dq.detach()) if dq is not None and self._is_dq_of_attention else None,
        )  # fmt: skip

    def _read(self, x: Tensor) -> Tensor:
        return x if self._batch is None else in_four_axes(x, self._batch)


def hand_to_observer(
    number: int,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    spec: AttentionSpec,
    stabilizers: tuple[str, ...],
    **known: Any,
) -> None:
    observer = runtime.site(number).observer
    if observer is None:
        return
    tensors = dict.fromkeys(("out", "residual", "d_out", "dq"))
    tensors |= {"q": q.detach(), "k": k.detach(), "v": v.detach()}
    observer(AttentionCall(site=number, spec=spec, stabilizers=stabilizers, **{**tensors, **known}))


def in_four_axes(x: Any, batch: Sequence[int] = ()) -> Tensor:
    """Returns a tensor of a call as `(B, H, N, D)`, repeated over a batch."""
    if x.is_nested:
        return x.values()[None]
    x = x if x.dim() > 3 else x.unsqueeze(-3)
    return x.expand(*(batch or x.shape[:-3]), *x.shape[-3:]).reshape(-1, *x.shape[-3:])


def spec_in_four_axes(spec: AttentionSpec, q: Any, k: Any, batch: Sequence[int]) -> AttentionSpec:
    """Returns what a call asks for of the tensors that `in_four_axes` makes."""
    if q.is_nested:
        starts = (x.offsets().to(torch.int32) for x in (q, k))
        lengths = (int(x._get_max_seqlen()) for x in (q, k))
        # Of as many keys as queries, so that first and last ones are aligned alike.
        return replace(spec, causal=bool(spec.causal), documents=Documents(*starts, *lengths))
    mask = spec.mask
    if mask is None or (mask.dim() < 4 and q.dim() > 3) or mask.dim() < 3:
        return spec
    # One that all sequences share stays one.
    is_shared = mask.shape[: -3 if q.dim() > 3 else -2].numel() == 1
    return replace(spec, mask=in_four_axes(mask, () if is_shared else batch))


def _either(out: Tensor, observed: Tensor | None) -> Tensor:
    return out if observed is None else observed


def gradient_as_it_came(ctx: Any, *d_outs: Any) -> Any:
    """Returns the gradient of a function's first input, which is that of its output."""
    return d_outs[0], *(None,) * (len(ctx.needs_input_grad) - 1)


class _Output(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, out: Tensor, watch: Watch, *inputs: Tensor) -> Tensor:
        # Saved tensors are dropped by activation checkpointing, and offloading may move them.
        ctx.save_for_backward(*inputs)
        ctx.watch = watch
        # No view: the model may change it in place, which autograd forbids for views it does not
        # know.
        return out.clone()

    @staticmethod
    @guard.function(report, otherwise=gradient_as_it_came)
    def backward(ctx: Any, *d_outs: Any) -> Any:
        saved = ctx.saved_tensors  # read once: a checkpoint does not give them a second time
        ctx.watch.take_d_out(d_outs[0], saved)
        return gradient_as_it_came(ctx, *d_outs)
