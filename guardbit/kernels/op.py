"""The opaque op behind every attention call: looks its site up when it runs, and dispatches.

Shapes: q `(B, H, N, D)`; k, v `(B, H_kv, M, D)`, H a multiple of H_kv; out `(B, H, N, D)`;
lse `(B, H, N)` FP32.

Each head is computed as `guardbit.kernels.switchboard` says at that moment: with the kernel PyTorch
would have used, or with one of ours, in Triton or in plain torch. A head that is not switched keeps
its bits.

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

from guardbit.kernels import dispatch, stock
from guardbit.kernels.constants import device_constant
from guardbit.kernels.reference import Causal, Dropout, Forward
from guardbit.kernels.switchboard import AttentionCall, is_recomputing, random_offset, site_state
from guardbit.records import STABILIZERS

CAUSAL_CODES: dict[bool | str, int] = {False: 0, True: 1, "top-left": 2}
_CAUSAL_NAMES: tuple[Causal, ...] = (False, True, "top-left")

# A replayed CUDA graph would not look the site up again: the compiler is to leave the op out.
_LOOKED_UP = torch.Tag.cudagraph_unsafe

_library = torch.library.Library("guardbit", "DEF")
for _name, _tags in (
    ("", (_LOOKED_UP,)),
    ("_with_dropout", (_LOOKED_UP, torch.Tag.nondeterministic_seeded)),
):
    _library.define(
        f"attention{_name}(Tensor q, Tensor k, Tensor v, Tensor site, int[] stabilizers,"
        " int causal, float? scale, float beta, float eps, int seed, float dropout_p, int backend,"
        " bool stock, bool training, bool traced) -> (Tensor out, Tensor lse, Tensor residual,"
        " Tensor kernels, Tensor random, Tensor generator_state)",
        tags=_tags,
    )
_library.define(
    "attention_backward(Tensor d_out, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse,"
    " Tensor residual, Tensor kernels, Tensor random, Tensor generator_state, Tensor site,"
    " int causal, float? scale, float dropout_p, bool stock, bool traced)"
    " -> (Tensor dq, Tensor dk, Tensor dv)",
    tags=(_LOOKED_UP,),
)


def attention(*arguments: Any) -> tuple[Tensor, Tensor]:
    """Calls the op, by the schema above, and returns out and lse."""
    op = _with_dropout if arguments[10] > 0 else _without_dropout
    return op(*arguments)[:2]


class _Plan(NamedTuple):
    """Which heads of a call are ours.

    Attributes:
        own: Their numbers.
        names: Their stabilizers.
        kinds: These, each once.
    """

    own: tuple[int, ...]
    names: tuple[str, ...]
    kinds: tuple[str, ...]


@lru_cache(maxsize=1024)
def _plan(names: tuple[str, ...], use_stock: bool) -> _Plan:
    own = tuple(h for h, name in enumerate(names) if not use_stock or name != "none")
    own_names = tuple(names[h] for h in own)
    return _Plan(own, own_names, tuple(dict.fromkeys(own_names)))


@lru_cache(maxsize=1024)
def _names(codes: tuple[int, ...]) -> tuple[str, ...]:
    return tuple(STABILIZERS[code] for code in codes)


@lru_cache
def _kernel_name(backend: SDPBackend) -> str:
    return backend.name  # which searches all names


# Small tensors that are made once: at 5 us each they would be half of a call's time on the host.
# Not in inference mode, whose tensors a later training step could not save for its backward.


@lru_cache(maxsize=1024)
@torch.inference_mode(False)
def _kernels(backend: SDPBackend, on_triton: bool, names: tuple[str, ...]) -> Tensor:
    """What ran, for the backward: see `_attention`."""
    codes = [STABILIZERS.index(name) for name in names]
    return torch.tensor([int(backend.value), int(on_triton), *codes])


def _index(heads: tuple[int, ...], device: torch.device) -> Tensor:
    return device_constant(heads, torch.int64, device)


@lru_cache
@torch.inference_mode(False)
def _nothing(dtype: torch.dtype, device: torch.device | str) -> Tensor:
    return torch.empty(0, dtype=dtype, device=device)


# --- forward ---------------------------------------------------------------------------------


def _attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    site: Tensor,
    stabilizers: list[int],
    causal: int,
    scale: float | None,
    beta: float,
    eps: float,
    seed: int,
    dropout_p: float,
    backend: int,
    use_stock: bool,
    training: bool,
    traced: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Runs forward.

    A compiled graph fixes every shape and stride when it is traced, before anyone knows whether a
    head will be switched. There (`traced`) `residual` is always allocated, and the output is laid
    out as q, as PyTorch's flash kernels do. Elsewhere `residual` is empty unless a head needs it,
    and the output keeps the layout of the kernel that ran: models may depend on it.

    The last three outputs are for the backward, so that the two always agree, whatever is switched
    in between: `kernels`, `(2 + H,)` on the CPU, PyTorch's backend, whether ours ran in Triton, and
    one stabilizer a head; with dropout `random`, INT64 `(3,)`, seed and offset of PyTorch's kernel
    and the word of ours, and `generator_state`, UINT8 on the CPU, see `stock.Drawn`.
    """
    state = site_state(int(site))
    state.requested = _names(tuple(stabilizers))
    state.stock_dropout_p = dropout_p if use_stock else 0.0
    state.begin_forward()
    if training:
        state.ran_at = state.clock.now
    names = state.running
    plan = _plan(names, use_stock)
    if traced or dropout_p > 0:
        random, generator_state = _random_outputs(q, dropout_p)
    else:
        random, generator_state = _nothing(torch.int64, q.device), _nothing(torch.uint8, "cpu")
    out, lse, residual, stock_backend, on_triton = None, None, None, SDPBackend.ERROR, False
    own: Forward | None = None

    def run_stock() -> tuple[Tensor, Tensor, SDPBackend]:
        settings = stock.Settings(causal != 0, scale, dropout_p)
        drawn = _drawn(dropout_p, random, generator_state)
        result = stock.forward(q, k, v, settings, training, drawn)
        state.launches["forward", _kernel_name(result[2])] += 1
        return result

    if len(plan.own) < q.size(1):
        # First, so that it draws the random numbers that it would draw by itself.
        out, lse, stock_backend = run_stock()
    if plan.own:
        try:
            on_triton = dispatch.on_triton(dispatch.BACKENDS[backend], q)
            if dropout_p > 0:
                random[2].random_()
            result = dispatch.launcher("forward", on_triton, q.device.type)(
                q,
                k,
                v,
                causal=_CAUSAL_NAMES[causal],
                scale=_scale(scale, q),
                stabilizers=plan.names,
                beta=beta,
                eps=eps,
                seed=seed,
                offset=random_offset(),
                heads=plan.own if out is not None else None,
                dropout=_dropout(dropout_p, random, plan, q),
            )
            if result.residual is not None and out is not None:
                residual = torch.zeros_like(q, dtype=torch.int8)
            own = result
        except Exception as error:
            if not use_stock:
                raise
            state.fall_back(error)
            if "compensated" in names and is_recomputing():
                # What is recomputed must be of the first forward's shape.
                residual = torch.zeros_like(q, dtype=torch.int8)
            names, on_triton = ("none",) * q.size(1), False
        else:
            state.succeed()
            _count(state.launches, "forward", plan, on_triton)
        if own is None and out is None:  # past the except clause, which holds memory
            out, lse, stock_backend = run_stock()
    if own is not None:
        if out is None or lse is None:
            out, lse, residual = _laid_out_as(own.out, q), own.lse, own.residual
        else:
            index = _index(plan.own, q.device)
            out.index_copy_(1, index, own.out)
            lse.index_copy_(1, index, own.lse)
            if own.residual is not None and residual is not None:
                residual.index_copy_(1, index, own.residual)
    assert out is not None and lse is not None
    if traced:
        out = _laid_out_as(out, q)
    if residual is not None:
        residual = _laid_out_as(residual, q)
    elif traced:
        residual = torch.empty_like(q, dtype=torch.int8)
    else:
        residual = _nothing(torch.int8, q.device)
    kernels = _kernels(stock_backend, on_triton, names)
    if traced:
        kernels = kernels.clone()  # the compiler may use the memory of what an op returns again
    return out, lse.contiguous(), residual, kernels, random, generator_state


def _attention_fake(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    site: Tensor,
    stabilizers: list[int],
    causal: int,
    scale: float | None,
    beta: float,
    eps: float,
    seed: int,
    dropout_p: float,
    backend: int,
    use_stock: bool,
    training: bool,
    traced: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    return (
        torch.empty_like(q),
        q.new_empty(q.shape[:-1], dtype=torch.float32),
        torch.empty_like(q, dtype=torch.int8) if traced else q.new_empty(0, dtype=torch.int8),
        site.new_empty(2 + q.size(1), dtype=torch.int64),
        *_random_outputs(q, dropout_p),
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
    words, state_bytes = (3, stock.state_bytes(q.device)) if dropout_p > 0 else (0, 0)
    return (
        q.new_empty(words, dtype=torch.int64),
        torch.empty(state_bytes, dtype=torch.uint8, device="cpu"),
    )


def _drawn(dropout_p: float, random: Tensor, generator_state: Tensor) -> stock.Drawn | None:
    return stock.Drawn(random[:2], generator_state) if dropout_p > 0 else None


def _dropout(dropout_p: float, random: Tensor, plan: _Plan, q: Tensor) -> Dropout | None:
    return Dropout(dropout_p, random[2], plan.own, q.size(1)) if dropout_p > 0 else None


def _count(launches: dict[tuple[str, str], int], way: str, plan: _Plan, on_triton: bool) -> None:
    for name in plan.kinds:
        launches[way, name] += 1
    if on_triton:
        launches[way, "triton"] += 1


def _laid_out_as(x: Tensor, like: Tensor) -> Tensor:
    """Gives x the memory layout of `like`, which the op's fake kernels promise."""
    if x.stride() == like.stride():
        return x
    promised = torch.empty_like(like, dtype=x.dtype)
    return x if x.stride() == promised.stride() else promised.copy_(x)


def _scale(scale: float | None, q: Tensor) -> float:
    return 1.0 / math.sqrt(q.size(-1)) if scale is None else scale


# --- backward --------------------------------------------------------------------------------


def _attention_backward(
    d_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    residual: Tensor,
    kernels: Tensor,
    random: Tensor,
    generator_state: Tensor,
    site: Tensor,
    causal: int,
    scale: float | None,
    dropout_p: float,
    use_stock: bool,
    traced: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Runs backward; `traced` as for the forward."""
    number = int(site)
    state = site_state(number)
    stock_backend, on_triton, *codes = kernels.tolist()
    names = _names(tuple(codes))
    plan = _plan(names, use_stock)
    kept = residual if "compensated" in names else None
    dropout = _dropout(dropout_p, random, plan, q)
    own = None
    if plan.own:
        try:
            tensors = (d_out, q, k, v, out, lse, kept)
            if len(plan.own) < q.size(1):
                tensors = _chosen(plan.own, *tensors)
            own = dispatch.launcher("backward", bool(on_triton), q.device.type)(
                *tensors,
                causal=_CAUSAL_NAMES[causal],
                scale=_scale(scale, q),
                stabilizers=plan.names,
                dropout=dropout,
            )
        except Exception as error:
            if not use_stock or dropout_p > 0:  # what ours dropped, PyTorch's kernel cannot know
                raise
            # Its backward works with our out and lse too: only the rounding is different.
            state.fall_back(error)
            names, kept = ("none",) * q.size(1), None
            plan = _plan(names, use_stock)
        else:
            _count(state.launches, "backward", plan, bool(on_triton))
    gradients = None
    if len(plan.own) < q.size(1):
        settings = stock.Settings(causal != 0, scale, dropout_p)
        stock_backend = SDPBackend(stock_backend)
        if stock_backend == SDPBackend.ERROR:  # all heads ran ours
            stock_backend = stock.choose(q, k, v, settings, training=True)
        # A zero gradient contributes exact zeros: the other heads' gradients keep their bits,
        # and key heads shared with a switched query head receive only the others' share.
        rest = d_out.index_fill(1, _index(plan.own, q.device), 0) if plan.own else d_out
        drawn = _drawn(dropout_p, random, generator_state)
        gradients = stock.backward(rest, q, k, v, out, lse, stock_backend, settings, drawn)
        state.launches["backward", _kernel_name(stock_backend)] += 1
    if own is not None:
        parts = (own.dq, own.dk, own.dv)
        gradients = parts if gradients is None else _merge(gradients, parts, plan.own)
    assert gradients is not None
    if traced or len(plan.own) == q.size(1):
        gradients = map(_laid_out_as, gradients, (q, k, v))
    dq, dk, dv = gradients
    if state.observer is not None:
        state.observer(
            AttentionCall(
                site=number,
                q=q,
                k=k,
                v=v,
                out=out,
                residual=kept,
                d_out=d_out,
                dq=dq,
                dk=dk,
                dv=dv,
                causal=_CAUSAL_NAMES[causal],
                scale=_scale(scale, q),
                stabilizers=names,
                dropout=dropout,
            )
        )
    return dq, dk, dv


def _attention_backward_fake(
    d_out: Tensor, q: Tensor, k: Tensor, v: Tensor, *_: object
) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)


def _chosen(
    heads: tuple[int, ...],
    d_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    residual: Tensor | None,
) -> tuple[Tensor | None, ...]:
    """Takes some query heads, each with a key head of its own."""
    group = q.size(1) // k.size(1)
    index = _index(heads, q.device)
    key_index = _index(tuple(h // group for h in heads), q.device)
    k, v = k.index_select(1, key_index), v.index_select(1, key_index)
    d_out, q, out, lse = (x.index_select(1, index) for x in (d_out, q, out, lse))
    return d_out, q, k, v, out, lse, None if residual is None else residual.index_select(1, index)


def _merge(
    rest: tuple[Tensor, Tensor, Tensor],
    own: tuple[Tensor, Tensor, Tensor],
    heads: tuple[int, ...],
) -> tuple[Tensor, Tensor, Tensor]:
    """Puts the chosen heads' gradients among the others', in place."""
    dq, dk, dv = rest
    dq.index_copy_(1, _index(heads, dq.device), own[0])
    group = dq.size(1) // dk.size(1)
    for member in range(group):
        # One query head of a group at a time: adding two in one go would be atomic, in any order.
        places = tuple(place for place, head in enumerate(heads) if head % group == member)
        if not places:
            continue
        chosen = _index(places, dk.device)
        key_heads = _index(tuple(heads[place] // group for place in places), dk.device)
        for whole, part in ((dk, own[1]), (dv, own[2])):
            whole.index_add_(1, key_heads, part.index_select(1, chosen))
    return dq, dk, dv


# --- autograd --------------------------------------------------------------------------------


class _Attention(torch.autograd.Function):
    # Registered by hand: `torch.library.register_autograd` converts the op's schema argument by
    # argument at every call, which doubles the host's time for a forward (425 against 226 us).
    @staticmethod
    def forward(ctx, *arguments):
        q, k, v, site, _, causal, scale, _, _, _, dropout_p, _, use_stock, _, traced = arguments
        outputs = _below_autograd(arguments)
        ctx.save_for_backward(q, k, v, *outputs, site)
        ctx.arguments = (causal, scale, dropout_p, use_stock, traced)
        ctx.mark_non_differentiable(*outputs[1:])
        ctx.set_materialize_grads(False)
        return outputs

    @staticmethod
    def backward(ctx, *d_outputs):
        d_out = d_outputs[0]
        if d_out is None:
            return (None,) * 15
        if not torch.is_grad_enabled():
            gradients = _backward(d_out, *ctx.saved_tensors, *ctx.arguments)
        else:
            gradients = _backward_of_create_graph(d_out, ctx.saved_tensors, ctx.arguments)
        return (*gradients, *(None,) * 12)


def _below_autograd(arguments: tuple[Any, ...]) -> tuple[Tensor, ...]:
    op = _with_dropout if arguments[10] > 0 else _without_dropout
    with torch._C._AutoDispatchBelowAutograd():
        return op(*arguments)


def has_tangent(*tensors: Tensor) -> bool:
    """Whether forward-mode differentiation is under way for one of some tensors."""
    if forward_ad._current_level < 0:
        return False
    return any(forward_ad.unpack_dual(x).tangent is not None for x in tensors)


def _differentiable(*arguments: Any) -> tuple[Tensor, ...]:
    # A compiled graph runs its forward without autograd, which would cost a third of the call.
    q, k, v = arguments[:3]
    if has_tangent(q, k, v):
        raise NotImplementedError(
            "guardbit.flash_attention has no forward-mode derivative; use reverse mode"
            " (`Tensor.backward`, `torch.autograd.grad`) or F.scaled_dot_product_attention"
        )
    if torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad):
        if torch._C._are_functorch_transforms_active():
            raise NotImplementedError(
                "guardbit.flash_attention cannot be differentiated by torch.func; use"
                " `Tensor.backward`, `torch.autograd.grad` or F.scaled_dot_product_attention"
            )
        return _Attention.apply(*arguments)
    return _below_autograd(arguments)


def _backward_of_create_graph(d_out: Tensor, saved, arguments):
    """As differentiable as PyTorch's own: the math kernel is, and all others say that they are not.

    The op itself would pass for a constant.
    """
    q, k, v, _, _, _, kernels, random, generator_state, _ = saved
    causal, scale, dropout_p, use_stock, _ = arguments
    backend, _, *codes = kernels.tolist()
    if use_stock and backend == SDPBackend.MATH.value and not any(codes):
        return stock.differentiable_backward(
            d_out, q, k, v, stock.Settings(causal != 0, scale, dropout_p),
            _drawn(dropout_p, random, generator_state),
        )  # fmt: skip
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
