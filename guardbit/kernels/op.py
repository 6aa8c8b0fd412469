"""The opaque op behind every attention call: its schema, its fake kernels and its autograd.

`guardbit.kernels.execution` runs it: that looks the call's attention module up at run time, so a
switch takes effect without a recompilation.

The op has two names. Calls that draw random numbers must not be merged, dropped or repeated by the
compiler, and a tag says so. Calls without dropout draw nothing and need no tag.
"""

from __future__ import annotations

from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn.attention import SDPBackend

from guardbit import guard
from guardbit.kernels import heads
from guardbit.kernels.alignment import promise_aligned_outputs
from guardbit.kernels.engines import Drawn, Inputs, Whole
from guardbit.kernels.engines.random import drawing_once
from guardbit.kernels.execution import (
    NUM_KERNEL_FACTS,
    Request,
    empty_random_outputs,
    read_kernels,
    spec_of,
)
from guardbit.kernels.native import engine_of_pytorch, is_by_pytorch, run_backward, run_forward
from guardbit.kernels.runtime import runtime

# A replayed CUDA graph would not look the attention module up again: the tag keeps the op out of
# CUDA graphs.
_LOOKED_UP = torch.Tag.cudagraph_unsafe

_library = torch.library.Library("guardbit", "DEF")
for _name, _tags in (
    ("", (_LOOKED_UP,)),
    ("_with_dropout", (_LOOKED_UP, torch.Tag.nondeterministic_seeded)),
):
    _library.define(
        f"attention{_name}(Tensor q, Tensor k, Tensor v, Tensor? mask, Tensor site,"
        " int[] stabilizers, int causal, float? scale, float dropout_p, float beta, float eps,"
        " int backend, bool native, bool training, bool wants_mask, bool traced,"
        " bool keeps_residual) -> (Tensor out, Tensor lse, Tensor residual, Tensor kernels,"
        " Tensor random, Tensor generator_state)",
        tags=_tags,
    )
_library.define(
    "attention_backward(Tensor d_out, Tensor q, Tensor k, Tensor v, Tensor? mask, Tensor site,"
    " Tensor out, Tensor lse, Tensor residual, Tensor kernels, Tensor random,"
    " Tensor generator_state, int causal, float? scale, float dropout_p, bool native,"
    " bool wants_mask, bool traced) -> (Tensor dq, Tensor dk, Tensor dv, Tensor d_mask)",
    tags=(_LOOKED_UP,),
)


def is_direct(*tensors: Tensor) -> bool:
    """Whether an op's implementation may be called directly: no mode or subclass intercepts it."""
    return (
        torch._C._len_torch_dispatch_stack() == 0
        and not torch._C._are_functorch_transforms_active()
        and all(type(x) in _PLAIN and (x.is_cuda or x.is_cpu) for x in tensors)
    )


_PLAIN = (Tensor, torch.nn.Parameter)


def attention(request: Request) -> tuple[Tensor, Tensor]:
    """Calls the op and returns out and lse."""
    op = _with_dropout if request.dropout_p > 0 else _without_dropout
    return op(*request)[:2]


@guard.again(runtime.tell_fault)
def _attention_fake(*arguments: Any) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    promise_aligned_outputs(_without_dropout, _with_dropout, _backward)
    request = Request(*arguments)
    q = request.q
    kept = request.traced and request.keeps_residual
    return (
        heads.empty_out(q, request.v),
        q.new_empty(q.shape[:-1], dtype=torch.float32),
        torch.empty_like(q, dtype=torch.int8) if kept else q.new_empty(0, dtype=torch.int8),
        request.site.new_empty(NUM_KERNEL_FACTS + q.size(1), dtype=torch.int64),
        *empty_random_outputs(q, request.dropout_p),
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
def _attention_backward_fake(
    d_out: Tensor, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, *rest: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    wants_mask = rest[-2]
    return (
        torch.empty_like(q),
        torch.empty_like(k),
        torch.empty_like(v),
        torch.empty_like(mask) if wants_mask and mask is not None else q.new_empty(0),
    )


class _Attention(torch.autograd.Function):
    # Registered by hand: `torch.library.register_autograd` converts every argument of the schema at
    # every call, which doubles the host's time for a forward (425 against 226 us). Arguments that
    # have no gradient come as one tuple, because `apply` looks at each argument.
    @staticmethod
    def forward(ctx, q, k, v, mask, others):
        request = Request(q, k, v, mask, *others)
        outputs = _below_autograd(request)
        # A plain tensor: saved tensors may be offloaded to disk.
        saved = (request.q, request.k, request.v, request.mask, request.site.detach(), *outputs)
        ctx.save_for_backward(*saved)
        ctx.arguments = (
            request.causal, request.scale, request.dropout_p, request.native, request.wants_mask,
            request.traced,
        )  # fmt: skip
        ctx.mark_non_differentiable(*outputs[1:])
        ctx.set_materialize_grads(False)
        ctx.read = None
        return outputs

    @staticmethod
    @guard.again(runtime.tell_fault)
    def backward(ctx, *d_outputs):
        d_out = d_outputs[0]
        if d_out is None:
            return (None,) * 5
        compute, release = partial(_gradients, ctx, d_out), partial(_release, ctx)
        return guard.then_finish(compute, release, runtime.tell_fault)


def _gradients(ctx: Any, d_out: Tensor) -> tuple[Tensor | None, ...]:
    saved = _read(ctx)
    if not torch.is_grad_enabled():
        run = run_backward if is_direct(d_out, *saved[:3]) else _backward
        gradients = run(d_out, *saved, *ctx.arguments)
    else:
        gradients = _backward_of_create_graph(d_out, saved, ctx.arguments)
    wants_mask = ctx.arguments[4]
    return (*gradients[:3], gradients[3] if wants_mask else None, None)


def _release(ctx: Any, gradients: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...]:
    """Gives up what was read, when nothing is computed from it any more."""
    ctx.read = None
    return gradients


def _read(ctx: Any) -> Any:
    """Reads what was saved; once, because a checkpoint does not give it a second time."""
    if ctx.read is None:
        ctx.read = ctx.saved_tensors
    return ctx.read


def _below_autograd(request: Request) -> tuple[Tensor, ...]:
    with torch._C._AutoDispatchBelowAutograd():
        if is_direct(request.q, request.k, request.v):
            return run_forward(*request)
        op = _with_dropout if request.dropout_p > 0 else _without_dropout
        return op(*request)


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
def _differentiable(*arguments: Any) -> tuple[Tensor, ...]:
    # A compiled graph runs its forward without autograd: that would take a third of the call.
    q, k, v, mask = arguments[:4]
    if has_tangent(q, k, v):
        raise NotImplementedError(
            "guardbit.flash_attention has no forward-mode derivative; use reverse mode"
            " (`Tensor.backward`, `torch.autograd.grad`) or F.scaled_dot_product_attention"
        )
    inputs = (q, k, v) if mask is None else (q, k, v, mask)
    if torch.is_grad_enabled() and any(x.requires_grad for x in inputs):
        if torch._C._are_functorch_transforms_active():
            raise NotImplementedError(
                "guardbit.flash_attention cannot be differentiated by torch.func; use"
                " `Tensor.backward`, `torch.autograd.grad` or F.scaled_dot_product_attention"
            )
        run = partial(_Attention.apply, q, k, v, mask, arguments[4:])
    else:
        run = partial(_below_autograd, Request(*arguments))
    # A compiler that traces the op draws nothing.
    draws = Request(*arguments).dropout_p > 0 and is_direct(q, k, v)
    return drawing_once(run, q.device, draws)


def _backward_of_create_graph(d_out: Tensor, saved, arguments):
    """Returns gradients of calls without stabilizer, as differentiable as PyTorch's."""
    q, k, v, mask, _, _, _, _, kernels, random, generator_state = saved
    causal, scale, dropout_p, native, wants_mask, _ = arguments
    if is_by_pytorch(kernels):
        engine, is_switched = engine_of_pytorch(kernels, q), False
    else:
        engine, _, _, names = read_kernels(kernels, q)
        is_switched = native and set(names) != {"none"}
    is_native = native and not is_switched
    if is_native and isinstance(engine, Whole) and engine.backend == SDPBackend.MATH:
        spec = spec_of(q, mask, causal, scale, dropout_p)
        drawn = Drawn(random[:2], generator_state) if dropout_p > 0 else None
        return engine.differentiable_backward(Inputs(q, k, v, spec, drawn, wants_mask), d_out)
    with torch.no_grad():
        gradients = _backward(d_out, *saved, *arguments)
    if is_switched:
        why = "GuardBit: heads with a stabilizer have no second derivative; those without have one"
    else:
        what = "fused attention" if native else "guardbit.flash_attention"
        why = f"{what} has no second derivative; F.scaled_dot_product_attention has one"
    return _NotDifferentiable.apply(why, d_out, q, k, v, *gradients)


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
    _library.impl(_name, run_forward, "CompositeExplicitAutograd")
    _library.impl(_name, _differentiable, "Autograd")
    torch.library.register_fake(f"guardbit::{_name}", _fake, lib=_library)
_library.impl("attention_backward", run_backward, "CompositeExplicitAutograd")
torch.library.register_fake("guardbit::attention_backward", _attention_backward_fake, lib=_library)

_without_dropout = torch.ops.guardbit.attention.default
_with_dropout = torch.ops.guardbit.attention_with_dropout.default
_backward = torch.ops.guardbit.attention_backward.default
