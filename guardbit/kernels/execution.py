"""What the attention op does when it runs, forward and backward.

Shapes: q `(B, H, N, D)`; k, v `(B, H_kv, M, D)`, H a multiple of H_kv; out `(B, H, N, D)`;
lse `(B, H, N)` FP32; mask broadcasts to `(B, H, N, M)`.

Each head is computed as `guardbit.kernels.runtime` says at that moment, see
`guardbit.kernels.heads`. A head that is not switched keeps its bits.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend

from guardbit import guard
from guardbit.kernels import dispatch, engines, heads
from guardbit.kernels.alignment import aligned
from guardbit.kernels.attention_call import AttentionCall
from guardbit.kernels.engines import Engine
from guardbit.kernels.plan import Call, plan_of
from guardbit.kernels.runtime import runtime
from guardbit.kernels.spec import AttentionSpec, Causal
from guardbit.records import STABILIZERS

_CAUSAL_NAMES: tuple[Causal, ...] = (False, True, "top-left")


class Request(NamedTuple):
    """The arguments of the op, in the order of its schema.

    Attributes:
        q: Queries.
        k: Keys.
        v: Values.
        mask: Boolean or additive, see `AttentionSpec`; None for none.
        site: Number of the attention module, a 0-d CPU tensor: the compiler would specialise on a
            Python number.
        stabilizers: For each head, its stabilizer's index in `STABILIZERS`.
        causal: Index in (False, True, "top-left").
        scale: Factor of the scores; None for 1 / sqrt(D).
        dropout_p: Probability with which an entry of P is dropped.
        beta: See `guardbit.flash_attention`.
        eps: The same.
        backend: Index in `dispatch.BACKENDS`.
        native: Whether PyTorch's function was called, and not `flash_attention`.
        training: Whether a gradient will be asked for.
        wants_mask: Whether the gradient of the mask is asked for.
        traced: Whether a compiler traces the call.
        keeps_residual: Whether a compiled graph reserves memory for the residual of `compensated`.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    mask: Tensor | None
    site: Tensor
    stabilizers: list[int]
    causal: int = 0
    scale: float | None = None
    dropout_p: float = 0.0
    beta: float = 2.0
    eps: float = 1e-3
    backend: int = 0
    native: bool = True
    training: bool = False
    wants_mask: bool = False
    traced: bool = False
    keeps_residual: bool = True


def is_training(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether a gradient of the call will be asked for."""
    return torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad)


def causal_code(causal: Causal) -> int:
    """The op's number for a causal mask."""
    return {False: 0, True: 1, "top-left": 2}[causal]


@lru_cache(maxsize=1024)
def _names(codes: tuple[int, ...]) -> tuple[str, ...]:
    return tuple(STABILIZERS[code] for code in codes)


def spec_of(
    q: Tensor, mask: Tensor | None, causal: int, scale: float | None, dropout_p: float
) -> AttentionSpec:
    """Puts together what the call asks for; arguments as in `Request`."""
    scale = 1.0 / math.sqrt(q.size(-1)) if scale is None else scale
    if mask is None:
        return _spec_without_mask(scale, causal, dropout_p)
    return AttentionSpec(scale, _CAUSAL_NAMES[causal], mask, dropout_p)


@lru_cache(maxsize=1024)
def _spec_without_mask(scale: float, causal: int, dropout_p: float) -> AttentionSpec:
    return AttentionSpec(scale, _CAUSAL_NAMES[causal], None, dropout_p)


# Small tensors that are made once: at 5 us each they would be half of a call's time on the host.
# Not in inference mode, whose tensors a later training step could not save for its backward.


@lru_cache(maxsize=1024)
@torch.inference_mode(False)
def _kernels(backend: SDPBackend, shared: bool, on_triton: bool, names: tuple[str, ...]) -> Tensor:
    """Encodes what ran, for the backward; see `run_forward`."""
    codes = [STABILIZERS.index(name) for name in names]
    return torch.tensor(
        [int(backend.value), int(shared), int(on_triton), *codes], dtype=torch.int64
    )


NUM_KERNEL_FACTS = 3


def read_kernels(kernels: Tensor, q: Tensor) -> tuple[Engine | None, bool, bool, tuple[str, ...]]:
    """Decodes `_kernels`: engine, shared backward, Triton, and one stabilizer for each head."""
    backend, shared, on_triton, *codes = kernels.tolist()
    backend = SDPBackend(backend)
    engine = None if backend == SDPBackend.ERROR else engines.engine_of(backend, q)
    return engine, bool(shared), bool(on_triton), _names(tuple(codes))


@lru_cache
@torch.inference_mode(False)
def _nothing(dtype: torch.dtype, device: torch.device | str) -> Tensor:
    return torch.empty(0, dtype=dtype, device=device)


def run_forward(*arguments: Any) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Runs the forward; arguments as in `Request`."""
    request = Request(*arguments)
    q, traced = request.q, request.traced
    spec = spec_of(q, request.mask, request.causal, request.scale, request.dropout_p)
    state = runtime.site(int(request.site))
    state.requested = _names(tuple(request.stabilizers))
    state.native_dropout_p = spec.dropout_p if request.native else 0.0
    state.is_masked = spec.mask is not None
    state.begin_forward()
    if request.training:
        state.ran_at = state.clock.now
    if traced or spec.dropout_p > 0:
        random, generator_state = empty_random_outputs(q, spec.dropout_p)
    else:
        random, generator_state = _nothing(torch.int64, q.device), _nothing(torch.uint8, "cpu")
    call = Call(
        q, request.k, request.v, spec, state, request.native, request.wants_mask
    )  # fmt: skip
    options = heads.Options(request.beta, request.eps, dispatch.BACKENDS[request.backend])
    ran = heads.forward(
        call,
        state.running,
        options,
        request.training,
        request.keeps_residual or not traced,
        random,
        generator_state,
    )
    out, residual = ran.out, ran.residual
    if traced:
        out = heads.laid_out_as(out, heads.empty_out(q, request.v))
    if residual is not None:
        residual = heads.laid_out_as(residual, q)
    elif traced and request.keeps_residual:
        residual = torch.empty_like(q, dtype=torch.int8)
    else:
        residual = _nothing(torch.int8, q.device)
    backend = SDPBackend.ERROR if ran.engine is None else ran.engine.backend
    kernels = _kernels(backend, ran.shared, ran.on_triton, ran.names)
    lse = ran.lse.contiguous()
    if traced:
        # The compiler may use the memory of what an op returns again.
        kernels = kernels.clone()
        residual = residual if residual.numel() else residual.clone()
        out, lse, residual = map(aligned, (out, lse, residual))
    return out, lse, residual, kernels, random, generator_state


def empty_random_outputs(q: Tensor, dropout_p: float) -> tuple[Tensor, Tensor]:
    """Allocates `random` and `generator_state` of `run_forward`; both are empty without dropout."""
    words, state_bytes = (3, engines.state_bytes(q.device)) if dropout_p > 0 else (0, 0)
    return (
        q.new_empty(words, dtype=torch.int64),
        torch.empty(state_bytes, dtype=torch.uint8, device="cpu"),
    )


def run_backward(
    d_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    site: Tensor,
    out: Tensor,
    lse: Tensor,
    residual: Tensor,
    kernels: Tensor,
    random: Tensor,
    generator_state: Tensor,
    causal: int,
    scale: float | None,
    dropout_p: float,
    native: bool,
    wants_mask: bool,
    traced: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Runs the backward; arguments as in the op's schema, `traced` as for the forward."""
    number = int(site)
    state = runtime.site(number)
    spec = spec_of(q, mask, causal, scale, dropout_p)
    engine, shared, on_triton, names = read_kernels(kernels, q)
    call = Call(q, k, v, spec, state, native, wants_mask)
    kept = residual if "compensated" in names else None
    ran = heads.Ran(out, lse, kept, engine, shared, on_triton, names)
    gradients, carried, names = heads.backward(call, d_out, ran, random, generator_state)
    dq, dk, dv, d_mask = gradients[:4]
    if traced or not native:
        dq, dk, dv = map(heads.laid_out_as, (dq, dk, dv), (q, k, v))
    if d_mask is None:
        d_mask = q.new_empty(0) if traced else _nothing(q.dtype, q.device)
    elif mask is not None:
        d_mask = heads.laid_out_as(d_mask.to(mask.dtype), mask)
    if traced:
        dq, dk, dv, d_mask = map(aligned, (dq, dk, dv, d_mask))

    def again() -> tuple[Tensor, Tensor, Tensor]:
        with state.uncounted():
            same = Call(q, k, v, spec, state, native, wants_mask)
            found, _, _ = heads.backward(same, d_out, ran, random, generator_state)
        return found.dq, found.dk, found.dv

    gradients = dq, dk, dv
    _report(
        call,
        number,
        k,
        carried,
        None if shared else kept,
        d_out,
        gradients,
        names,
        random,
        engine,
        again,
    )
    return dq, dk, dv, d_mask


@guard.function(runtime.tell_fault)
def _report(
    call: Call,
    number: int,
    k: Tensor,
    carried: Tensor,
    residual: Tensor | None,
    d_out: Tensor,
    gradients: tuple[Tensor, Tensor, Tensor],
    names: tuple[str, ...],
    random: Tensor,
    engine: Engine | None,
    again: Callable[[], tuple[Tensor, Tensor, Tensor]],
) -> None:
    """Reports a call to the observer of its attention module, if there is one."""
    if call.state.observer is None:
        return
    dq, dk, dv = gradients
    call.state.observer(
        AttentionCall(
            site=number,
            q=call.q,
            k=k,
            v=call.v,
            out=carried,
            residual=residual,
            d_out=d_out,
            dq=dq,
            dk=dk,
            dv=dv,
            spec=call.spec,
            stabilizers=names,
            dropout=heads.dropout_of(call, plan_of(names, call.native), random),
            kernel="guardbit" if engine is None else engine.name,
            again=again,
        )
    )
