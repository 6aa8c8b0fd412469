"""The opaque op behind every attention call: its schema, its fake kernels and its autograd.

`guardbit.kernels.execution` runs it: that looks the call's attention module up at run time, so a
switch takes effect without a recompilation. Calls of PyTorch's function, of a library's and of
`guardbit.flash_attention` run alike. A library's own kernel runs forward and backward, with the
library's own arguments; a switched head hands its backward another delta, or centred keys.

The op has two names. Calls that draw random numbers must not be merged, dropped or repeated by the
compiler, and a tag says so. Calls without dropout draw nothing and need no tag.

Shapes: q `(B, H, N, D)`; k, v `(B, H_kv, M, D)`, H a multiple of H_kv; out `(B, H, N, D)`;
lse `(B, H, N)` FP32. Packed sequences have a batch of one and the places of their documents.
"""

from __future__ import annotations

import math
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn.attention import SDPBackend

from guardbit import guard
from guardbit.kernels.alignment import promise_aligned_outputs
from guardbit.kernels.attention_call import Call
from guardbit.kernels.autocast import autocast_tensors, is_autocast
from guardbit.kernels.engines import LIBRARIES, Inputs, LibraryEngine, Whole, library_engine
from guardbit.kernels.engines.random import drawing_once
from guardbit.kernels.execution import (
    NUM_KERNEL_FACTS,
    Left,
    drawn_of,
    empty_out,
    empty_random,
    ran_of,
    run_backward,
    run_forward,
)
from guardbit.kernels.runtime import is_jit_traced, runtime
from guardbit.kernels.spec import AttentionSpec, Causal, Documents

_TENSORS = (
    "Tensor q, Tensor k, Tensor v, Tensor? mask, Tensor? sinks, Tensor? cu_queries,"
    " Tensor? cu_keys, Tensor site"
)
_NUMBERS = (
    "SymInt max_queries, SymInt max_keys, int causal, float scale, int left, int right,"
    " float softcap, float dropout_p, int library, bool deterministic, int[] scheduling,"
    " bool native, bool wants_mask, bool traced"
)
_OF_FORWARD = (
    "int[] stabilizers, float beta, float eps, int backend, bool training, bool keeps_residual"
)
_LEFT = (
    "Tensor out, Tensor lse, Tensor residual, Tensor kernels, Tensor random, Tensor generator_state"
)
_NUM_TENSORS, _NUM_LEFT = _TENSORS.count(",") + 1, _LEFT.count(",") + 1
_NUM_NUMBERS = _NUMBERS.count(",") + 1

_CAUSAL: tuple[Causal, ...] = (False, True, "top-left")
_NAMES = tuple(LIBRARIES)

# A replayed CUDA graph would not look the attention module up again: the tag keeps the op out of
# CUDA graphs.
_LOOKED_UP = torch.Tag.cudagraph_unsafe

_library = torch.library.Library("guardbit", "DEF")
for _name, _tags in (
    ("attention", (_LOOKED_UP,)),
    ("attention_with_dropout", (_LOOKED_UP, torch.Tag.nondeterministic_seeded)),
):
    _library.define(f"{_name}({_TENSORS}, {_NUMBERS}, {_OF_FORWARD}) -> ({_LEFT})", tags=_tags)
_library.define(
    f"attention_backward(Tensor d_out, {_TENSORS}, {_LEFT}, {_NUMBERS})"
    " -> (Tensor dq, Tensor dk, Tensor dv, Tensor d_mask, Tensor d_sinks)",
    tags=(_LOOKED_UP,),
)


def switchable_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    site: Tensor,
    *,
    attn_mask: Tensor | None = None,
    is_causal: bool,
    scale: float | None,
    dropout_p: float = 0.0,
) -> Tensor:
    """Computes `F.scaled_dot_product_attention`, with heads that can be switched."""
    scale = 1.0 / math.sqrt(q.size(-1)) if scale is None else scale
    spec = AttentionSpec(scale, "top-left" if is_causal else False, attn_mask, dropout_p)
    return attention_at_site(q, k, v, site, spec)[0]


def attention_at_site(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    site: Tensor,
    spec: AttentionSpec,
    library: LibraryEngine | None = None,
) -> tuple[Tensor, Tensor]:
    """Computes PyTorch's or a library's attention, with heads that can be switched."""
    mask, sinks, wants_mask = spec.mask, spec.sinks, False
    if library is None:
        q, k, v = autocast_tensors(q, k, v)
        if mask is not None and mask.is_floating_point() and is_autocast(q):
            mask = mask.to(torch.get_autocast_dtype(q.device.type))
            spec = AttentionSpec(spec.scale, spec.causal, mask, spec.dropout_p)
        wants_mask = torch.is_grad_enabled() and mask is not None and mask.requires_grad
    elif spec.causal == "top-left" or mask is not None or spec.has_functions:
        raise ValueError(
            f"{library.title} takes documents, a window and a causal mask aligned to the bottom"
            " right, and no other mask"
        )
    wants_sinks = torch.is_grad_enabled() and sinks is not None and sinks.requires_grad
    return attention(
        Call(
            q,
            k,
            v,
            spec,
            site,
            library,
            training=is_training(q, k, v) or wants_mask or wants_sinks,
            wants_mask=wants_mask,
            traced=torch.compiler.is_compiling(),
            stabilizers=(0,) * q.size(1),
            # With dropout `exact_delta` gives way to `compensated`, which needs the room.
            keeps_residual=library is None
            and (runtime.keeps_residuals or (spec.dropout_p > 0.0 and mask is None)),
        )
    )


def is_training(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether a gradient of the call will be asked for."""
    return torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad)


def is_direct(*tensors: Tensor) -> bool:
    """Whether an op's implementation may be called directly: no mode or subclass intercepts it."""
    return (
        torch._C._len_torch_dispatch_stack() == 0
        and not torch._C._are_functorch_transforms_active()
        and all(type(x) in _PLAIN and (x.is_cuda or x.is_cpu) for x in tensors)
    )


_PLAIN = (Tensor, torch.nn.Parameter)


def attention(call: Call) -> tuple[Tensor, Tensor]:
    """Runs a call, through the op where somebody may look at it; returns out and lse."""
    if not call.traced and is_direct(call.q, call.k, call.v) and not is_jit_traced():
        out, lse, *_ = _differentiable(call)
    else:
        out, lse, *_ = _op_of(call)(*_flat(call))
    return out, lse


def _op_of(call: Call) -> Any:
    return _with_dropout if call.spec.dropout_p > 0 else _without_dropout


# --- a call as arguments of the op ---------------------------------------------------------------


def _tensors(call: Call) -> tuple[Tensor | None, ...]:
    q, k, v, spec, site = call[:5]
    cu_queries, cu_keys = (None, None) if spec.documents is None else spec.documents[:2]
    return q, k, v, spec.mask, spec.sinks, cu_queries, cu_keys, site


def _numbers(call: Call) -> tuple[Any, ...]:
    spec, engine = call.spec, call.library
    return (
        *((0, 0) if spec.documents is None else spec.documents[2:]),
        _CAUSAL.index(spec.causal),
        spec.scale,
        *spec.window,
        spec.softcap,
        spec.dropout_p,
        *((-1, False, ()) if engine is None else _asked(engine)),
        call.native,
        call.wants_mask,
        call.traced,
    )


def _asked(engine: LibraryEngine) -> tuple[Any, ...]:
    return _NAMES.index(engine.label), engine.deterministic, engine.scheduling


def _flat(call: Call) -> tuple[Any, ...]:
    own = call.stabilizers, call.beta, call.eps, call.backend, call.training, call.keeps_residual
    return (*_tensors(call), *_numbers(call), *own)


def _call(tensors: Any, numbers: Any, own: Any = ()) -> Call:
    """Undoes `_flat`; `own` is what only the forward gets."""
    q, k, v, mask, sinks, cu_queries, cu_keys, site = tensors
    max_queries, max_keys, causal, scale, left, right, softcap, dropout_p, library = numbers[:9]
    deterministic, scheduling, native, wants_mask, traced = numbers[9:]
    documents, engine = None, None
    if cu_queries is not None:
        documents = Documents(cu_queries, cu_keys, max_queries, max_keys)
    if library >= 0:
        engine = library_engine(_NAMES[library], deterministic, tuple(scheduling))
    asked = scale, _CAUSAL[causal], dropout_p, (left, right), softcap
    if mask is None and sinks is None and documents is None:
        spec = _plain_spec(*asked)
    else:
        spec = AttentionSpec(*asked[:2], mask, *asked[2:4], documents, softcap, sinks)
    stabilizers, beta, eps, backend, training, keeps_residual = own or (
        (),
        2.0,
        1e-3,
        0,
        True,
        True,
    )
    return Call(
        q, k, v, spec, site, engine, native, training, wants_mask, traced, stabilizers, beta, eps,
        backend, keeps_residual,
    )  # fmt: skip


@lru_cache(maxsize=1024)
def _plain_spec(
    scale: float, causal: Causal, dropout_p: float, window: tuple[int, int], softcap: float
) -> AttentionSpec:
    return AttentionSpec(scale, causal, None, dropout_p, window, softcap=softcap)


def _call_of(arguments: tuple[Any, ...]) -> Call:
    tensors, rest = arguments[:_NUM_TENSORS], arguments[_NUM_TENSORS:]
    return _call(tensors, rest[:_NUM_NUMBERS], rest[_NUM_NUMBERS:])


def _backward_of(arguments: tuple[Any, ...]) -> tuple[Call, Tensor, Left]:
    end = 1 + _NUM_TENSORS
    left = Left(*arguments[end : end + _NUM_LEFT])
    return _call(arguments[1:end], arguments[end + _NUM_LEFT :]), arguments[0], left


# --- fake kernels --------------------------------------------------------------------------------


@guard.again(runtime.tell_fault)
def _attention_fake(*arguments: Any) -> tuple[Tensor, ...]:
    promise_aligned_outputs(_without_dropout, _with_dropout, _backward)
    call = _call_of(arguments)
    q = call.q
    kept = call.traced and call.keeps_residual
    return (
        empty_out(call),
        q.new_empty(q.shape[:-1], dtype=torch.float32),
        torch.empty_like(q, dtype=torch.int8) if kept else q.new_empty(0, dtype=torch.int8),
        call.site.new_empty(NUM_KERNEL_FACTS + q.size(1), dtype=torch.int64),
        *empty_random(q, call.spec.dropout_p),
    )


def _attention_with_dropout_fake(*arguments: Any) -> tuple[Tensor, ...]:
    _forbid_merging()
    return _attention_fake(*arguments)


@lru_cache
def _forbid_merging() -> None:
    """Keeps the compiler from merging two equal calls, which the tag does not prevent."""
    from torch._functorch.compile_utils import rand_ops

    rand_ops.append(torch.ops.guardbit.attention_with_dropout)


@guard.again(runtime.tell_fault)
def _attention_backward_fake(*arguments: Any) -> tuple[Tensor, ...]:
    call, _, _ = _backward_of(arguments)
    mask, sinks = call.spec.mask if call.wants_mask else None, call.spec.sinks
    return (
        *(torch.empty_like(x) for x in call[:3]),
        *(call.q.new_empty(0) if x is None else torch.empty_like(x) for x in (mask, sinks)),
    )


# --- autograd ------------------------------------------------------------------------------------


class _Attention(torch.autograd.Function):
    # Registered by hand: `torch.library.register_autograd` converts every argument of the schema at
    # every call, which doubles the host's time for a forward (425 against 226 us). `apply` looks at
    # each argument: what has no gradient is within the call.
    @staticmethod
    def forward(ctx, q, k, v, mask, sinks, call):
        left = _below_autograd(call)
        tensors = _tensors(call)
        # A plain tensor: saved tensors may be offloaded to disk.
        ctx.save_for_backward(*tensors[:-1], call.site.detach(), *left)
        ctx.numbers = _numbers(call)
        ctx.mark_non_differentiable(*left[1:])
        ctx.set_materialize_grads(False)
        ctx.read = None
        return tuple(left)

    @staticmethod
    @guard.again(runtime.tell_fault)
    def backward(ctx, *d_outputs):
        d_out = d_outputs[0]
        if d_out is None:
            return (None,) * 6
        compute, release = partial(_gradients, ctx, d_out), partial(_release, ctx)
        return guard.then_finish(compute, release, runtime.tell_fault)


def _gradients(ctx: Any, d_out: Tensor) -> tuple[Tensor | None, ...]:
    if ctx.read is None:  # once: a checkpoint does not give it a second time
        ctx.read = ctx.saved_tensors
    saved, numbers = ctx.read, ctx.numbers
    call, left = _call(saved[:_NUM_TENSORS], numbers), Left(*saved[_NUM_TENSORS:])
    if torch.is_grad_enabled():
        gradients = _backward_of_create_graph(d_out, call, left)
    elif is_direct(d_out, *saved[:3]):
        gradients = run_backward(call, d_out, left)
    else:
        gradients = _backward(d_out, *saved, *numbers)
    d_mask = gradients[3] if call.wants_mask else None
    return (*gradients[:3], d_mask, gradients[4] if ctx.needs_input_grad[4] else None, None)


def _release(ctx: Any, gradients: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...]:
    """Gives up what was read, when nothing is computed from it any more."""
    ctx.read = None
    return gradients


def _below_autograd(call: Call) -> Left:
    with torch._C._AutoDispatchBelowAutograd():
        if is_direct(call.q, call.k, call.v):
            return run_forward(call)
        return Left(*_op_of(call)(*_flat(call)))


def has_tangent(*tensors: Tensor) -> bool:
    """Whether one of the tensors has a forward-mode tangent."""
    if forward_ad._current_level < 0:
        return False
    return any(forward_ad.unpack_dual(x).tangent is not None for x in tensors)


def _tell_unless_refused(error: Exception) -> None:
    if not isinstance(error, NotImplementedError):
        runtime.tell_fault(error)


# Once more after an error, because a compiler that traces the op gives up at one.
@guard.again(_tell_unless_refused)
def _differentiable(call: Call) -> tuple[Tensor, ...]:
    # A compiled graph runs its forward without autograd: that would take a third of the call.
    q, k, v, spec = call[:4]
    if has_tangent(q, k, v):
        raise NotImplementedError(
            "guardbit.flash_attention has no forward-mode derivative; use reverse mode"
            " (`Tensor.backward`, `torch.autograd.grad`) or F.scaled_dot_product_attention"
        )
    inputs = q, k, v, spec.mask, spec.sinks
    if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in inputs):
        if torch._C._are_functorch_transforms_active():
            raise NotImplementedError(
                "guardbit.flash_attention cannot be differentiated by torch.func; use"
                " `Tensor.backward`, `torch.autograd.grad` or F.scaled_dot_product_attention"
            )
        run = partial(_Attention.apply, *inputs, call)
    else:
        run = partial(_below_autograd, call)
    # A compiler that traces the op draws nothing.
    return drawing_once(run, q.device, spec.dropout_p > 0 and is_direct(q, k, v))


def _backward_of_create_graph(d_out: Tensor, call: Call, left: Left) -> tuple[Any, ...]:
    """Returns gradients of calls without stabilizer, as differentiable as PyTorch's."""
    ran = ran_of(call, left)
    engine, is_switched = ran.engine, call.native and set(ran.names) != {"none"}
    if not is_switched and isinstance(engine, Whole) and engine.backend == SDPBackend.MATH:
        inputs = Inputs(*call[:4], drawn_of(call, left), call.wants_mask)
        found = engine.differentiable_backward(inputs, d_out)
        return (*found[:4], None)
    with torch.no_grad():
        gradients = _backward(d_out, *_tensors(call), *left, *_numbers(call))
    if is_switched:
        why = "GuardBit: heads with a stabilizer have no second derivative; those without have one"
    else:
        what = "fused attention" if call.native else "guardbit.flash_attention"
        why = f"{what} has no second derivative; F.scaled_dot_product_attention has one"
    return _NotDifferentiable.apply(why, d_out, *call[:3], *gradients)


class _NotDifferentiable(torch.autograd.Function):
    @staticmethod
    def forward(ctx, why, d_out, q, k, v, *gradients):
        ctx.why = why
        return tuple(x.detach() for x in gradients)

    @staticmethod
    def backward(ctx, *d_gradients):
        raise RuntimeError(f"{ctx.why} within torch.nn.attention.sdpa_kernel(SDPBackend.MATH)")


for _name, _fake in (
    ("attention", _attention_fake),
    ("attention_with_dropout", _attention_with_dropout_fake),
):
    _library.impl(_name, lambda *x: tuple(run_forward(_call_of(x))), "CompositeExplicitAutograd")
    _library.impl(_name, lambda *x: tuple(_differentiable(_call_of(x))), "Autograd")
    torch.library.register_fake(f"guardbit::{_name}", _fake, lib=_library)
_library.impl(
    "attention_backward", lambda *x: run_backward(*_backward_of(x)), "CompositeExplicitAutograd"
)
torch.library.register_fake("guardbit::attention_backward", _attention_backward_fake, lib=_library)

_without_dropout = torch.ops.guardbit.attention.default
_with_dropout = torch.ops.guardbit.attention_with_dropout.default
_backward = torch.ops.guardbit.attention_backward.default
