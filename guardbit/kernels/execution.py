"""What the attention op does when it runs, forward and backward.

Each head is computed as `guardbit.kernels.runtime` says at that moment, see
`guardbit.kernels.heads`. A head that is not switched keeps its bits.

Where GuardBit's part of a call fails, PyTorch's own function computes it. The forward then marks
the call, and the backward runs PyTorch's function again under autograd. So results and gradients
are those of a model without GuardBit, to the bit. With dropout the generator is set back first, so
that PyTorch's function draws what it would have drawn. A call of `guardbit.flash_attention` or of a
library has no such function: it is tried once more.

Shapes: q `(B, H, N, D)`; k, v `(B, H_kv, M, D)`, H a multiple of H_kv; out `(B, H, N, D)`;
lse `(B, H, N)` FP32; mask broadcasts to `(B, H, N, M)`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache, partial
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend

from guardbit import guard
from guardbit.kernels import engines, heads
from guardbit.kernels.alignment import aligned
from guardbit.kernels.attention_call import AttentionCall, Call
from guardbit.kernels.engines import Drawn, scaled_dot_product_attention
from guardbit.kernels.engines.random import drawing_again, drawing_once, generator_of
from guardbit.kernels.plan import plan_of
from guardbit.kernels.runtime import runtime
from guardbit.records import STABILIZERS

# What `Left.kernels` begins with where PyTorch's function computed the call; no number of a
# backend. The backend that it chose comes next.
_BY_PYTORCH = -1000

NUM_KERNEL_FACTS = 3


class Left(NamedTuple):
    """What the op returns: its result, and what the forward leaves for the backward.

    Attributes:
        out: The output.
        lse: Logsumexp; zeros where the engine returns none.
        residual: INT8, what rounding took from O in compensated heads; empty if there are none.
        kernels: INT64 `(3 + H,)` on the CPU: backend, whether its backward serves all heads,
            whether ours ran in Triton, and the stabilizer of each head.
        random: INT64 `(3,)`, see `Drawn.philox`, and the key of our kernels; empty without dropout.
        generator_state: See `Drawn`.
    """

    out: Tensor
    lse: Tensor
    residual: Tensor
    kernels: Tensor
    random: Tensor
    generator_state: Tensor


# Small tensors that are made once: at 5 us each they would be half of a call's time on the host.
# Not in inference mode, whose tensors a later training step could not save for its backward.


@lru_cache(maxsize=1024)
@torch.inference_mode(False)
def _kernels(backend: SDPBackend, shared: bool, on_triton: bool, names: tuple[str, ...]) -> Tensor:
    codes = [STABILIZERS.index(name) for name in names]
    return torch.tensor(
        [int(backend.value), int(shared), int(on_triton), *codes], dtype=torch.int64
    )


@lru_cache
@torch.inference_mode(False)
def _nothing(dtype: torch.dtype, device: torch.device | str, place: int = 0) -> Tensor:
    """Returns an empty tensor; what an op returns at different places must not be the same."""
    return torch.empty(0, dtype=dtype, device=device)


@lru_cache(maxsize=1024)
def _names(codes: tuple[int, ...]) -> tuple[str, ...]:
    return tuple(STABILIZERS[code] for code in codes)


def ran_of(call: Call, left: Left) -> heads.Ran:
    """Decodes what ran; the engine is PyTorch's where its function computed the call."""
    if is_by_pytorch(left):
        engine = engines.engine_of(SDPBackend(int(left.kernels[1])), call.q)
        return heads.Ran(left.out, left.lse, None, engine, False, False, ("none",) * call.heads)
    backend, shared, on_triton, *codes = left.kernels.tolist()
    names, engine = _names(tuple(codes)), call.library
    if engine is None and backend != SDPBackend.ERROR.value:
        engine = engines.engine_of(SDPBackend(backend), call.q)
    residual = left.residual if "compensated" in names else None
    return heads.Ran(left.out, left.lse, residual, engine, bool(shared), bool(on_triton), names)


def is_by_pytorch(left: Left) -> bool:
    """Whether PyTorch's function computed a forward."""
    return int(left.kernels[0]) == _BY_PYTORCH


def drawn_of(call: Call, left: Left) -> Drawn | None:
    """Where the random numbers of a call came from; None without dropout."""
    return Drawn(left.random[:2], left.generator_state) if call.spec.dropout_p > 0 else None


def empty_random(q: Tensor, dropout_p: float) -> tuple[Tensor, Tensor]:
    """Allocates `random` and `generator_state`; both are empty without dropout."""
    words, state_bytes = (3, engines.state_bytes(q.device)) if dropout_p > 0 else (0, 0)
    return (
        q.new_empty(words, dtype=torch.int64),
        torch.empty(state_bytes, dtype=torch.uint8, device="cpu"),
    )


def empty_out(call: Call) -> Tensor:
    """An output, uninitialised, in the layout that compiled graphs are promised."""
    q, width = call.q, call.v.size(3)
    if call.library is not None:
        batch, num_heads, rows, _ = q.shape
        return q.new_empty(batch, rows, num_heads, width).transpose(1, 2)
    return torch.empty_like(q) if q.size(3) == width else q.new_empty(*q.shape[:3], width)


# --- forward -------------------------------------------------------------------------------------


def _forward(call: Call) -> Left:
    q, dropout_p, traced = call.q, call.spec.dropout_p, call.traced
    state = runtime.site(int(call.site))
    state.requested = _names(tuple(call.stabilizers))
    state.native_dropout_p = dropout_p if call.native else 0.0
    state.is_masked = call.spec.mask is not None
    state.begin_forward()
    if call.training:
        state.ran_at = state.clock.now
    if traced or dropout_p > 0:
        random, generator_state = empty_random(q, dropout_p)
    else:
        random, generator_state = _nothing(torch.int64, q.device), _nothing(torch.uint8, "cpu")
    ran = heads.forward(call, state, random, generator_state)
    out, lse, residual = ran.out, ran.lse.contiguous(), ran.residual
    if residual is not None:
        residual = heads.laid_out_as(residual, q)
    elif traced and call.keeps_residual:
        residual = torch.empty_like(q, dtype=torch.int8)
    else:
        residual = _nothing(torch.int8, q.device)
    backend = SDPBackend.ERROR if ran.engine is None else ran.engine.backend
    kernels = _kernels(backend, ran.shared, ran.on_triton, ran.names)
    if traced:
        # The compiler may use the memory of what an op returns again.
        kernels = kernels.clone()
        residual = residual if residual.numel() else residual.clone()
        out = heads.laid_out_as(out, empty_out(call))
        out, lse, residual = map(aligned, (out, lse, residual))
    return Left(out, lse, residual, kernels, random, generator_state)


def _has_original(call: Call) -> bool:
    return call.native and call.library is None


def forward_by_pytorch(call: Call) -> Left:
    """Computes a call by PyTorch's function."""
    if not _has_original(call):
        return _forward(call)
    q, k, v, spec = call[:4]
    random, generator_state = empty_random(q, spec.dropout_p)
    if spec.dropout_p > 0:
        generator_state.copy_(generator_of(q.device).get_state())
    if call.training:  # PyTorch's choice of a kernel depends on it
        q, k, v = (x.detach().requires_grad_() for x in (q, k, v))
    with torch.set_grad_enabled(call.training):
        out = _by_pytorch(call._replace(q=q, k=k, v=v)).detach()
    lse = q.new_zeros(q.shape[:-1], dtype=torch.float32, requires_grad=False)
    residual = torch.empty(0, dtype=torch.int8, device=q.device)
    if call.traced:
        out = aligned(heads.laid_out_as(out, empty_out(call)))
        if call.keeps_residual:
            residual = torch.empty_like(call.q, dtype=torch.int8)
    kernels = torch.full((NUM_KERNEL_FACTS + q.size(1),), _BY_PYTORCH, dtype=torch.int64)
    try:
        backend = engines.choose(q, k, v, spec, call.training, call.wants_mask).backend
    except Exception:
        backend = SDPBackend.MATH  # takes every call
    kernels[1] = int(backend.value)
    return Left(out, lse, residual, kernels, random, generator_state)


def _by_pytorch(call: Call) -> Tensor:
    q, k, v, spec = call[:4]
    with torch.autocast(q.device.type, enabled=False):
        return scaled_dot_product_attention(
            q, k, v, spec.mask, spec.dropout_p, spec.causal is not False,
            scale=spec.scale, enable_gqa=q.size(1) != k.size(1),
        )  # fmt: skip


@guard.function(runtime.tell_fault, otherwise=forward_by_pytorch)
def run_forward(call: Call) -> Left:
    """Runs the forward."""
    try:
        return drawing_once(partial(_forward, call), call.q.device, call.spec.dropout_p > 0)
    except Exception as error:
        state = runtime.site(int(call.site))
        if {*state.running} - {"none"}:
            state.fall_back(error)
        raise


# --- backward ------------------------------------------------------------------------------------


def _backward(call: Call, d_out: Tensor, left: Left) -> tuple[Tensor, ...]:
    q, traced, mask, sinks = call.q, call.traced, call.spec.mask, call.spec.sinks
    ran = ran_of(call, left)
    found, carried, names = heads.backward(call, d_out, ran, left.random, left.generator_state)
    gradients = found[:3]
    if traced or not call.native:
        gradients = tuple(map(heads.laid_out_as, gradients, call[:3]))
    d_mask, d_sinks = (
        q.new_empty(0) if traced else _nothing(q.dtype, q.device, place) for place in range(2)
    )
    if found.d_mask is not None and mask is not None:
        d_mask = heads.laid_out_as(found.d_mask.to(mask.dtype), mask)
    if found.d_sinks is not None and sinks is not None:
        d_sinks = found.d_sinks.to(sinks.dtype)
    if traced:
        gradients = tuple(map(aligned, gradients))
        d_mask, d_sinks = aligned(d_mask), aligned(d_sinks)

    def again() -> tuple[Tensor, Tensor, Tensor]:
        with runtime.site(int(call.site)).uncounted():
            found, _, _ = heads.backward(call, d_out, ran, left.random, left.generator_state)
        return found.dq, found.dk, found.dv

    _report(call, d_out, ran, carried, names, gradients, left.random, again)
    return (*gradients, d_mask, d_sinks)


@guard.function(runtime.tell_fault)
def _report(
    call: Call,
    d_out: Tensor,
    ran: heads.Ran,
    carried: Tensor,
    names: tuple[str, ...],
    gradients: tuple[Tensor, ...],
    random: Tensor,
    again: Callable[[], tuple[Tensor, Tensor, Tensor]],
) -> None:
    """Reports a call to the observer of its attention module, if there is one."""
    number = int(call.site)
    state = runtime.site(number)
    if state.observer is None:
        return
    dq, dk, dv = gradients
    state.observer(
        AttentionCall(
            site=number,
            q=call.q,
            k=call.k,
            v=call.v,
            out=carried,
            residual=None if ran.shared else ran.residual,
            d_out=d_out,
            dq=dq,
            dk=dk,
            dv=dv,
            spec=call.spec,
            stabilizers=names,
            dropout=heads.dropout_of(call, plan_of(names, call.native), random),
            kernel="guardbit" if ran.engine is None else ran.engine.name,
            again=again,
        )
    )


def backward_by_pytorch(call: Call, d_out: Tensor, left: Left) -> tuple[Tensor, ...]:
    """Computes the gradients of a call by PyTorch's function."""
    drawn = drawn_of(call, left)
    # Only GuardBit knows what its own forward dropped.
    if not is_by_pytorch(left) and (not _has_original(call) or drawn is not None):
        return _backward(call, d_out, left)
    q, k, v = (x.detach().requires_grad_() for x in call[:3])
    spec, leaves = call.spec, [q, k, v]
    if call.wants_mask and spec.mask is not None:
        mask = spec.mask.detach().requires_grad_()
        spec = replace(spec, mask=mask)
        leaves.append(mask)
    with torch.enable_grad(), drawing_again(q.device, drawn):
        again = _by_pytorch(call._replace(q=q, k=k, v=v, spec=spec))
    found = list(torch.autograd.grad(again, leaves, d_out))
    if call.traced:
        found[:3] = map(heads.laid_out_as, found[:3], call[:3])
    found += [q.new_empty(0, requires_grad=False) for _ in range(5 - len(found))]
    return tuple(map(aligned, found)) if call.traced else tuple(found)


@guard.function(runtime.tell_fault, otherwise=backward_by_pytorch)
def run_backward(call: Call, d_out: Tensor, left: Left) -> tuple[Tensor, ...]:
    """Computes dq, dk, dv, and the gradients of mask and sinks, empty where not asked for."""
    if is_by_pytorch(left):
        return backward_by_pytorch(call, d_out, left)
    return _backward(call, d_out, left)
