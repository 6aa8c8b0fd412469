"""The opaque op behind calls of libraries' attention, as `guardbit.kernels.op` is for PyTorch's.

Shapes: q, out `(B, H, N, D)`; k, v `(B, H_kv, M, D)`; lse `(B, H, N)` FP32. Packed sequences have
a batch of one and the places of their documents.

The library's own kernel runs forward and backward, with the library's own arguments. None of its
kernels is replaced: a switched head hands its backward another delta, or hands it centred keys.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from guardbit import guard
from guardbit.kernels import engines, heads
from guardbit.kernels.alignment import aligned, promise_aligned_outputs
from guardbit.kernels.attention_call import AttentionCall
from guardbit.kernels.engines import LibraryEngine, library_engine
from guardbit.kernels.engines.random import drawing_once
from guardbit.kernels.op import is_direct
from guardbit.kernels.plan import Call
from guardbit.kernels.reference import Dropout
from guardbit.kernels.runtime import runtime
from guardbit.kernels.spec import AttentionSpec, Documents
from guardbit.records import STABILIZERS

_NAMES = tuple(engines.LIBRARIES)


_library = torch.library.Library("guardbit", "FRAGMENT")
_SPEC = (
    " SymInt max_queries, SymInt max_keys, int engine, bool deterministic, int[] scheduling,"
    " bool causal, float scale, int left, int right, float softcap, float dropout_p,"
    " bool training, bool traced"
)
# A replayed CUDA graph would not look the site up again: the compiler is to leave the op out.
_TAGS = (torch.Tag.cudagraph_unsafe,)
_library.define(
    "library_attention(Tensor q, Tensor k, Tensor v, Tensor? sinks, Tensor? cu_queries,"
    f" Tensor? cu_keys, Tensor site,{_SPEC}) -> (Tensor out, Tensor lse, Tensor kernels,"
    " Tensor random)",
    tags=_TAGS,
)
_library.define(
    "library_attention_backward(Tensor d_out, Tensor q, Tensor k, Tensor v, Tensor? sinks,"
    " Tensor? cu_queries, Tensor? cu_keys, Tensor site, Tensor out, Tensor lse, Tensor kernels,"
    f" Tensor random,{_SPEC}) -> (Tensor dq, Tensor dk, Tensor dv, Tensor d_sinks)",
    tags=_TAGS,
)


class Numbers(NamedTuple):
    """The op's arguments that are no tensors, in the order of its schema.

    Attributes:
        max_queries: Queries of the longest document; 0 without documents.
        max_keys: Keys of the longest document; 0 without documents.
        engine: Index in `engines.LIBRARIES`.
        deterministic: See `LibraryEngine`.
        scheduling: Likewise.
        causal: Whether the causal mask applies, aligned to the bottom right.
        scale: See `AttentionSpec`, as the rest.
        left: Keys before the query in the window.
        right: Keys after the query in the window.
        softcap: Soft cap of the scores.
        dropout_p: Probability with which an entry of P is dropped.
        training: Whether a gradient will be asked for.
        traced: Whether a compiler traces the call.
    """

    max_queries: int
    max_keys: int
    engine: int
    deterministic: bool
    scheduling: Sequence[int]
    causal: bool
    scale: float
    left: int
    right: int
    softcap: float
    dropout_p: float
    training: bool
    traced: bool


def library_attention(
    q: Tensor, k: Tensor, v: Tensor, site: Tensor, spec: AttentionSpec, engine: LibraryEngine
) -> tuple[Tensor, Tensor]:
    """Computes a library's attention, with heads that can be switched."""
    if spec.causal == "top-left" or spec.mask is not None or spec.has_functions:
        raise ValueError(
            f"{engine.title} takes documents, a window and a causal mask aligned to the bottom"
            " right, and no other mask"
        )
    documents = spec.documents or (None, None, 0, 0)
    wanting = (q, k, v) if spec.sinks is None else (q, k, v, spec.sinks)
    numbers = Numbers(
        documents[2],
        documents[3],
        _NAMES.index(engine.label),
        engine.deterministic,
        engine.scheduling,
        spec.causal is True,
        spec.scale,
        *spec.window,
        spec.softcap,
        spec.dropout_p,
        training=torch.is_grad_enabled() and any(x.requires_grad for x in wanting),
        traced=torch.compiler.is_compiling(),
    )
    tensors = (q, k, v, spec.sinks, documents[0], documents[1], site)
    run = _differentiable if not numbers.traced and is_direct(q, k, v) else _forward
    out, lse, *_ = run(*tensors, *numbers)
    return out, lse


def _call(tensors: tuple[Any, ...], numbers: Numbers) -> Call:
    """Returns the call that the arguments describe; `tensors` are q to site of the schema."""
    q, k, v, sinks, cu_queries, cu_keys, site = tensors
    documents = None
    if cu_queries is not None and cu_keys is not None:
        documents = Documents(cu_queries, cu_keys, numbers.max_queries, numbers.max_keys)
    spec = AttentionSpec(
        numbers.scale,
        numbers.causal,
        dropout_p=numbers.dropout_p,
        window=(numbers.left, numbers.right),
        documents=documents,
        softcap=numbers.softcap,
        sinks=sinks,
    )
    engine = library_engine(
        _NAMES[numbers.engine], numbers.deterministic, tuple(numbers.scheduling)
    )
    return Call(q, k, v, spec, runtime.site(int(site)), True, False, engine)


# --- forward ---------------------------------------------------------------------------------


@guard.again(runtime.tell_fault)
def _attention(*arguments: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Runs the forward, see `_attend`."""
    return drawing_once(partial(_attend, *arguments), arguments[0].device, _draws(arguments))


def _draws(arguments: tuple[Any, ...]) -> bool:
    return Numbers(*arguments[7:]).dropout_p > 0


def _attend(*arguments: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Computes the outputs."""
    numbers = Numbers(*arguments[7:])
    call = _call(arguments[:7], numbers)
    q, spec, state = call.q, call.spec, call.state
    state.requested = ("none",) * call.heads
    state.native_dropout_p = spec.dropout_p
    state.is_masked = False
    state.begin_forward()
    if numbers.training:
        state.ran_at = state.clock.now
    random = q.new_empty(2 if spec.dropout_p > 0 else 0, dtype=torch.int64)
    ran = heads.forward(
        call, state.running, _OPTIONS, numbers.training, False, random, _no_state()
    )  # fmt: skip
    out = heads.laid_out_as(ran.out, _promised(q)) if numbers.traced else ran.out
    kernels = _kernels(ran.shared, ran.names)
    # The compiler may use the memory of what an op returns again.
    kernels = kernels.clone() if numbers.traced else kernels
    lse = ran.lse.contiguous()
    if numbers.traced:
        out, lse = aligned(out), aligned(lse)
    return out, lse, kernels, random


# Options of GuardBit's own kernels, which never run here.
_OPTIONS = heads.Options(beta=2.0, eps=1e-3, backend="auto")


def _promised(q: Tensor) -> Tensor:
    """Returns an empty output in the layout of libraries."""
    batch, num_heads, rows, width = q.shape
    return q.new_empty(batch, rows, num_heads, width).transpose(1, 2)


# Made once: not in inference mode, whose tensors a later training step could not save.


@lru_cache(maxsize=1024)
@torch.inference_mode(False)
def _kernels(shared: bool, names: tuple[str, ...]) -> Tensor:
    return torch.tensor(
        [int(shared), *(STABILIZERS.index(name) for name in names)], dtype=torch.int64
    )


@lru_cache
@torch.inference_mode(False)
def _no_state() -> Tensor:
    return torch.empty(0, dtype=torch.uint8)


@guard.again(runtime.tell_fault)
def _attention_fake(*arguments: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    promise_aligned_outputs(_forward, _backward)
    q, site, numbers = arguments[0], arguments[6], Numbers(*arguments[7:])
    return (
        _promised(q),
        q.new_empty(q.shape[:-1], dtype=torch.float32),
        site.new_empty(1 + q.size(1), dtype=torch.int64),
        q.new_empty(2 if numbers.dropout_p > 0 else 0, dtype=torch.int64),
    )


# --- backward --------------------------------------------------------------------------------


@guard.again(runtime.tell_fault)
def _attention_backward(d_out: Tensor, *arguments: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Runs backward."""
    tensors, (out, lse, kernels, random) = arguments[:7], arguments[7:11]
    numbers = Numbers(*arguments[11:])
    call = _call(tensors, numbers)
    q, k, v, sinks = tensors[:4]
    shared, *codes = kernels.tolist()
    names = tuple(STABILIZERS[code] for code in codes)
    ran = heads.Ran(out, lse, None, call.library, bool(shared), False, names)
    gradients, carried, names = heads.backward(call, d_out, ran, random, _no_state())
    dq, dk, dv = gradients[:3]
    if numbers.traced:
        dq, dk, dv = map(heads.laid_out_as, (dq, dk, dv), (q, k, v))
    d_sinks = gradients.d_sinks
    d_sinks = q.new_empty(0) if sinks is None or d_sinks is None else d_sinks.to(sinks.dtype)
    if numbers.traced:
        dq, dk, dv, d_sinks = map(aligned, (dq, dk, dv, d_sinks))
    observer = call.state.observer
    if observer is not None:
        state, dropout_p, dropped = call.state, numbers.dropout_p, None
        if dropout_p > 0:  # by the library, which does not say which entries
            dropped = Dropout(dropout_p, torch.zeros((), dtype=torch.int64), (), call.heads)

        def again() -> tuple[Tensor, Tensor, Tensor]:
            with state.uncounted():
                same = _call(tensors, numbers)
                found, _, _ = heads.backward(same, d_out, ran, random, _no_state())
            return found.dq, found.dk, found.dv

        observer(
            AttentionCall(
                site=int(tensors[6]),
                q=q,
                k=k,
                v=v,
                out=carried,
                residual=None,
                d_out=d_out,
                dq=dq,
                dk=dk,
                dv=dv,
                spec=call.spec,
                stabilizers=names,
                dropout=dropped,
                kernel=_NAMES[numbers.engine],
                again=again,
            )
        )
    return dq, dk, dv, d_sinks


@guard.again(runtime.tell_fault)
def _attention_backward_fake(
    d_out: Tensor, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, *rest: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    d_sinks = q.new_empty(0) if sinks is None else torch.empty_like(sinks)
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v), d_sinks


# --- autograd --------------------------------------------------------------------------------


class _Attention(torch.autograd.Function):
    # Registered by hand for the reason given in `guardbit.kernels.op`.
    @staticmethod
    def forward(ctx, q, k, v, sinks, others):
        tensors, numbers = (q, k, v, sinks, *others[:3]), others[3:]
        with torch._C._AutoDispatchBelowAutograd():
            run = _attention if is_direct(q, k, v) else _forward
            outputs = run(*tensors, *numbers)
        ctx.save_for_backward(*tensors[:6], others[2].detach(), *outputs)
        ctx.numbers = numbers
        ctx.mark_non_differentiable(*outputs[1:])
        ctx.set_materialize_grads(False)
        ctx.read = None
        return outputs

    @staticmethod
    @once_differentiable
    @guard.again(runtime.tell_fault)
    def backward(ctx, *d_outputs):  # pyright: ignore[reportIncompatibleMethodOverride]
        d_out = d_outputs[0]
        if d_out is None:
            return (None,) * 5
        compute, release = partial(_gradients, ctx, d_out), partial(_release, ctx)
        return guard.then_finish(compute, release, runtime.tell_fault)


def _gradients(ctx: Any, d_out: Tensor) -> tuple[Tensor | None, ...]:
    if ctx.read is None:  # once: a checkpoint does not give it a second time
        ctx.read = ctx.saved_tensors
    saved = ctx.read
    run = _attention_backward if is_direct(d_out, *saved[:3]) else _backward
    dq, dk, dv, d_sinks = run(d_out, *saved, *ctx.numbers)
    return dq, dk, dv, d_sinks if ctx.needs_input_grad[3] else None, None


def _release(ctx: Any, gradients: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...]:
    """Gives up what was read, when nothing is computed from it any more."""
    ctx.read = None
    return gradients


# Once more after an error, for the reason given in `guardbit.kernels.op`.
@guard.again(runtime.tell_fault)
def _differentiable(*arguments: Any) -> tuple[Tensor, ...]:
    inputs = [x for x in arguments[:4] if x is not None]
    if torch.is_grad_enabled() and any(x.requires_grad for x in inputs):
        run = partial(_Attention.apply, *arguments[:4], arguments[4:])
    else:
        run = partial(_below_autograd, *arguments)
    draws = _draws(arguments) and is_direct(*arguments[:3])
    return drawing_once(run, arguments[0].device, draws)


def _below_autograd(*arguments: Any) -> tuple[Tensor, ...]:
    with torch._C._AutoDispatchBelowAutograd():
        return _forward(*arguments)


_library.impl("library_attention", _attention, "CompositeExplicitAutograd")
_library.impl("library_attention", _differentiable, "Autograd")
torch.library.register_fake("guardbit::library_attention", _attention_fake, lib=_library)
_library.impl(
    "library_attention_backward", _attention_backward, "CompositeExplicitAutograd"
)  # fmt: skip
torch.library.register_fake(
    "guardbit::library_attention_backward", _attention_backward_fake, lib=_library
)

_forward = torch.ops.guardbit.library_attention.default
_backward = torch.ops.guardbit.library_attention_backward.default
