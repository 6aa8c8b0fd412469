"""The opaque op behind every attention call: looks its site up when it runs, and dispatches.

Shapes: q `(B, H, N, D)`; k, v `(B, H_kv, M, D)`, H a multiple of H_kv; out `(B, H, N, D)`;
lse `(B, H, N)` FP32; mask broadcasts to `(B, H, N, M)`.

Each head is computed as `guardbit.kernels.switchboard` says at that moment, see
`guardbit.kernels.heads`. A head that is not switched keeps its bits.

The op stands twice under two names. The compiler must not merge, drop or repeat calls that draw
random numbers, and is told so by a tag; without dropout nothing is drawn, and nothing is to change.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn.attention import SDPBackend

from guardbit.kernels import dispatch, engines, heads
from guardbit.kernels.alignment import aligned, promise_aligned_outputs
from guardbit.kernels.engines import Drawn, Engine
from guardbit.kernels.plan import Call, plan_of
from guardbit.kernels.spec import AttentionSpec, Causal
from guardbit.kernels.switchboard import AttentionCall, site_state
from guardbit.records import STABILIZERS

_CAUSAL_NAMES: tuple[Causal, ...] = (False, True, "top-left")

# A replayed CUDA graph would not look the site up again: the compiler is to leave the op out.
_LOOKED_UP = torch.Tag.cudagraph_unsafe

_library = torch.library.Library("guardbit", "DEF")
for _name, _tags in (
    ("", (_LOOKED_UP,)),
    ("_with_dropout", (_LOOKED_UP, torch.Tag.nondeterministic_seeded)),
):
    _library.define(
        f"attention{_name}(Tensor q, Tensor k, Tensor v, Tensor? mask, Tensor site,"
        " int[] stabilizers, int causal, float? scale, float dropout_p, float beta, float eps,"
        " int seed, int backend, bool native, bool training, bool wants_mask, bool traced,"
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


class Request(NamedTuple):
    """What a call hands the op, in the order of its schema.

    Attributes:
        q: Queries.
        k: Keys.
        v: Values.
        mask: Boolean or additive, see `AttentionSpec`; None for none.
        site: Number of the site, a 0-d CPU tensor: the compiler would specialise on a number.
        stabilizers: One place in `STABILIZERS` a head.
        causal: Place in (False, True, "top-left").
        scale: Factor of the scores; None for 1 / sqrt(D).
        dropout_p: Probability with which an entry of P is dropped.
        beta: See `guardbit.flash_attention`.
        eps: The same.
        seed: The same.
        backend: Place in `dispatch.BACKENDS`.
        native: Whether PyTorch's function was called, and not `flash_attention`.
        training: Whether a gradient will be asked for.
        wants_mask: Whether the gradient of the mask is asked for.
        traced: Whether a compiler traces the call.
        keeps_residual: Whether a compiled graph reserves room for what `compensated` keeps.
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
    seed: int = 0
    backend: int = 0
    native: bool = True
    training: bool = False
    wants_mask: bool = False
    traced: bool = False
    keeps_residual: bool = True


def causal_code(causal: Causal) -> int:
    """The op's number for a causal mask."""
    return {False: 0, True: 1, "top-left": 2}[causal]


def attention(request: Request) -> tuple[Tensor, Tensor]:
    """Calls the op and returns out and lse."""
    op = _with_dropout if request.dropout_p > 0 else _without_dropout
    return op(*request)[:2]


@lru_cache(maxsize=1024)
def _names(codes: tuple[int, ...]) -> tuple[str, ...]:
    return tuple(STABILIZERS[code] for code in codes)


def _spec(
    q: Tensor, mask: Tensor | None, causal: int, scale: float | None, dropout_p: float
) -> AttentionSpec:
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
    """What ran, for the backward: see `_attention`."""
    codes = [STABILIZERS.index(name) for name in names]
    return torch.tensor([int(backend.value), int(shared), int(on_triton), *codes])


_NUM_KERNEL_FACTS = 3


def _read_kernels(kernels: Tensor, q: Tensor) -> tuple[Engine | None, bool, bool, tuple[str, ...]]:
    """Undoes `_kernels`."""
    backend, shared, on_triton, *codes = kernels.tolist()
    backend = SDPBackend(backend)
    engine = None if backend == SDPBackend.ERROR else engines.engine_of(backend, q)
    return engine, bool(shared), bool(on_triton), _names(tuple(codes))


@lru_cache
@torch.inference_mode(False)
def _nothing(dtype: torch.dtype, device: torch.device | str) -> Tensor:
    return torch.empty(0, dtype=dtype, device=device)


# --- forward ---------------------------------------------------------------------------------


def _attention(*arguments: Any) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Runs forward.

    A compiled graph fixes every shape and stride when it is traced, before anyone knows whether a
    head will be switched. There (`traced`) `residual` is always allocated where it is kept room
    for, and the output is laid out as q, as PyTorch's flash kernels do. Elsewhere `residual` is
    empty unless a head needs it, and the output keeps the layout of the kernel that ran: models may
    depend on it.

    The last three outputs are for the backward, so that the two always agree, whatever is switched
    in between: `kernels`, `(3 + H,)` on the CPU, PyTorch's backend, whether its backward serves all
    heads, whether ours ran in Triton, and one stabilizer a head; with dropout `random`, INT64
    `(3,)`, seed and offset of PyTorch's kernel and the word of ours, and `generator_state`, UINT8
    on the CPU, see `engines.Drawn`.
    """
    request = Request(*arguments)
    q, traced = request.q, request.traced
    spec = _spec(q, request.mask, request.causal, request.scale, request.dropout_p)
    state = site_state(int(request.site))
    state.requested = _names(tuple(request.stabilizers))
    state.stock_dropout_p = spec.dropout_p if request.native else 0.0
    state.is_masked = spec.mask is not None
    state.begin_forward()
    if request.training:
        state.ran_at = state.clock.now
    if traced or spec.dropout_p > 0:
        random, generator_state = _random_outputs(q, spec.dropout_p)
    else:
        random, generator_state = _nothing(torch.int64, q.device), _nothing(torch.uint8, "cpu")
    call = Call(
        q, request.k, request.v, spec, state, request.native, request.wants_mask
    )  # fmt: skip
    options = heads.Options(
        request.beta, request.eps, request.seed, dispatch.BACKENDS[request.backend]
    )  # fmt: skip
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


def _attention_fake(*arguments: Any) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    promise_aligned_outputs(_without_dropout, _with_dropout, _backward)
    request = Request(*arguments)
    q = request.q
    kept = request.traced and request.keeps_residual
    return (
        heads.empty_out(q, request.v),
        q.new_empty(q.shape[:-1], dtype=torch.float32),
        torch.empty_like(q, dtype=torch.int8) if kept else q.new_empty(0, dtype=torch.int8),
        request.site.new_empty(_NUM_KERNEL_FACTS + q.size(1), dtype=torch.int64),
        *_random_outputs(q, request.dropout_p),
    )


def _attention_with_dropout_fake(*arguments: Any) -> tuple[Tensor, ...]:
    _forbid_merging()
    return _attention_fake(*arguments)


@lru_cache
def _forbid_merging() -> None:
    """Keeps the compiler from taking two calls alike for one: the tag does not.

    Its elimination of common subexpressions knows random ops by a list of its own (`fx_graph_cse`
    of torch 2.11 to 2.13). Done when the op is first traced, because the import takes 0.4 s.
    """
    from torch._functorch.compile_utils import rand_ops

    rand_ops.append(torch.ops.guardbit.attention_with_dropout)


def _random_outputs(q: Tensor, dropout_p: float) -> tuple[Tensor, Tensor]:
    """`random` and `generator_state`, uninitialised; empty without dropout."""
    words, state_bytes = (3, engines.state_bytes(q.device)) if dropout_p > 0 else (0, 0)
    return (
        q.new_empty(words, dtype=torch.int64),
        torch.empty(state_bytes, dtype=torch.uint8, device="cpu"),
    )


# --- backward --------------------------------------------------------------------------------


def _attention_backward(
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
    """Runs backward; `traced` as for the forward."""
    number = int(site)
    state = site_state(number)
    spec = _spec(q, mask, causal, scale, dropout_p)
    engine, shared, on_triton, names = _read_kernels(kernels, q)
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
    if state.observer is not None:
        plan = plan_of(names, native)
        state.observer(
            AttentionCall(
                site=number,
                q=q,
                k=k,
                v=v,
                out=carried,
                residual=None if shared else kept,
                d_out=d_out,
                dq=dq,
                dk=dk,
                dv=dv,
                spec=spec,
                stabilizers=names,
                dropout=heads.dropout_of(call, plan, random),
            )
        )
    return dq, dk, dv, d_mask


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


# --- autograd --------------------------------------------------------------------------------


class _Attention(torch.autograd.Function):
    # Registered by hand: `torch.library.register_autograd` converts the op's schema argument by
    # argument at every call, which doubles the host's time for a forward (425 against 226 us).
    # What has no gradient comes as one argument, as `apply` looks at each of them.
    @staticmethod
    def forward(ctx, q, k, v, mask, others):
        request = Request(q, k, v, mask, *others)
        outputs = _below_autograd(request)
        # A plain tensor: who offloads what is saved may write it to disk.
        saved = (request.q, request.k, request.v, request.mask, request.site.detach(), *outputs)
        ctx.save_for_backward(*saved)
        ctx.arguments = (
            request.causal, request.scale, request.dropout_p, request.native, request.wants_mask,
            request.traced,
        )  # fmt: skip
        ctx.mark_non_differentiable(*outputs[1:])
        ctx.set_materialize_grads(False)
        return outputs

    @staticmethod
    def backward(ctx, *d_outputs):
        d_out = d_outputs[0]
        if d_out is None:
            return (None,) * 5
        if not torch.is_grad_enabled():
            saved = ctx.saved_tensors
            run = _attention_backward if dispatch.is_direct(d_out, *saved[:3]) else _backward
            gradients = run(d_out, *saved, *ctx.arguments)
        else:
            gradients = _backward_of_create_graph(d_out, ctx.saved_tensors, ctx.arguments)
        wants_mask = ctx.arguments[4]
        return (*gradients[:3], gradients[3] if wants_mask else None, None)


def _below_autograd(request: Request) -> tuple[Tensor, ...]:
    with torch._C._AutoDispatchBelowAutograd():
        if dispatch.is_direct(request.q, request.k, request.v):
            return _attention(*request)
        op = _with_dropout if request.dropout_p > 0 else _without_dropout
        return op(*request)


def has_tangent(*tensors: Tensor) -> bool:
    """Whether forward-mode differentiation is under way for one of some tensors."""
    if forward_ad._current_level < 0:
        return False
    return any(forward_ad.unpack_dual(x).tangent is not None for x in tensors)


def _differentiable(*arguments: Any) -> tuple[Tensor, ...]:
    # A compiled graph runs its forward without autograd, which would cost a third of the call.
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
        return _Attention.apply(q, k, v, mask, arguments[4:])
    return _below_autograd(Request(*arguments))


def _backward_of_create_graph(d_out: Tensor, saved, arguments):
    """As differentiable as PyTorch's own: the math kernel is, and all others say that they are not.

    The op itself would pass for a constant.
    """
    q, k, v, mask, _, _, _, _, kernels, random, generator_state = saved
    causal, scale, dropout_p, native, wants_mask, _ = arguments
    engine, _, _, names = _read_kernels(kernels, q)
    if (
        native
        and isinstance(engine, engines.Whole)
        and engine.backend == SDPBackend.MATH
        and set(names) == {"none"}
    ):
        spec = _spec(q, mask, causal, scale, dropout_p)
        drawn = Drawn(random[:2], generator_state) if dropout_p > 0 else None
        return engine.differentiable_backward(d_out, q, k, v, spec, drawn, wants_mask)
    with torch.no_grad():
        gradients = _backward(d_out, *saved, *arguments)
    return _NotDifferentiable.apply(d_out, q, k, v, *gradients)


class _NotDifferentiable(torch.autograd.Function):
    @staticmethod
    def forward(ctx, d_out, q, k, v, *gradients):
        return tuple(x.detach() for x in gradients)

    @staticmethod
    def backward(ctx, *d_gradients):
        raise RuntimeError(
            "fused attention has no second derivative; PyTorch's math kernel has one, see"
            " torch.nn.attention.sdpa_kernel"
        )


for _name, _fake in (
    ("attention", _attention_fake),
    ("attention_with_dropout", _attention_with_dropout_fake),
):
    _library.impl(_name, _attention, "CompositeExplicitAutograd")
    _library.impl(_name, _differentiable, "Autograd")
    torch.library.register_fake(f"guardbit::{_name}", _fake, lib=_library)
_library.impl("attention_backward", _attention_backward, "CompositeExplicitAutograd")
torch.library.register_fake("guardbit::attention_backward", _attention_backward_fake, lib=_library)

_without_dropout = torch.ops.guardbit.attention.default
_with_dropout = torch.ops.guardbit.attention_with_dropout.default
_backward = torch.ops.guardbit.attention_backward.default
