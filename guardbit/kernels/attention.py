"""The public attention function and the opaque op behind it.

Shapes: q `(B, H, N, D)`; k, v `(B, H_kv, M, D)`, H a multiple of H_kv; out `(B, H, N, D)`;
lse `(B, H, N)` FP32.

One op serves every attention call GuardBit handles. When it runs, it looks its site up in
`guardbit.kernels.switchboard` and computes each head as that says: with the kernel PyTorch would
have used, or with one of ours. A head that is not switched keeps its bits.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Literal, overload

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend

from guardbit.kernels import reference, stock
from guardbit.kernels.reference import Causal
from guardbit.kernels.reference.forward_pass import select_heads
from guardbit.kernels.switchboard import NO_SITE, AttentionCall, random_offset, site_state
from guardbit.records import STABILIZERS

#: Head sizes every backend supports.
MIN_HEAD_DIM, MAX_HEAD_DIM = 16, 256

_CAUSAL_CODES: dict[bool | str, int] = {False: 0, True: 1, "top-left": 2}
_CAUSAL_NAMES: tuple[Causal, ...] = (False, True, "top-left")
_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_BACKENDS = ("auto", "torch", "triton")

#: The site of the innermost instrumented module that is running; outermost first. It lives here so
#: that `flash_attention` can find it; the monitor pushes and pops. A 0-d CPU tensor rather than a
#: number, because the compiler would specialise on a number.
site_stack: list[Tensor] = []

#: Is told the tensors of every eager `flash_attention` call inside an instrumented module, before
#: it runs; set by the monitor.
call_listeners: list[Callable[[Tensor, Tensor, Tensor], None]] = []

_NO_SITE_TENSOR = torch.tensor(NO_SITE)


@overload
def flash_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: Causal = ...,
    scale: float | None = ...,
    stabilizer: str | Sequence[str] = ...,
    beta: float = ...,
    eps: float = ...,
    seed: int = ...,
    backend: str = ...,
    return_lse: Literal[False] = ...,
) -> Tensor: ...


@overload
def flash_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: Causal = ...,
    scale: float | None = ...,
    stabilizer: str | Sequence[str] = ...,
    beta: float = ...,
    eps: float = ...,
    seed: int = ...,
    backend: str = ...,
    return_lse: Literal[True],
) -> tuple[Tensor, Tensor]: ...


def flash_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: Causal = False,
    scale: float | None = None,
    stabilizer: str | Sequence[str] = "none",
    beta: float = 2.0,
    eps: float = 1e-3,
    seed: int = 0,
    backend: str = "auto",
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Exact attention with a choice of how its roundings are kept from adding up.

    With ``causal=True`` the mask is aligned to the bottom right, as in FlashAttention; with
    ``causal="top-left"`` as in ``F.scaled_dot_product_attention(is_causal=True)``. For N = 2 and
    M = 4 (1 = may attend)::

        True     1 1 1 0     "top-left"  1 0 0 0
                 1 1 1 1                 1 1 0 0

    A row with no allowed key gives output 0, lse -inf and gradients 0.

    Args:
        q: Queries `(B, H, N, D)`, BF16, FP16 or FP32, 16 <= D <= 256.
        k: Keys `(B, H_kv, M, D)`, H a multiple of H_kv (grouped-query attention).
        v: Values, shape of k.
        causal: False, True (bottom-right) or "top-left".
        scale: Factor of the scores; None for 1 / sqrt(D).
        stabilizer: One name of `guardbit.STABILIZERS`, or one a head. "none" is plain
            FlashAttention-2; "compensated" keeps the rounding residual of the output for the
            backward's delta; "stochastic" rounds the output stochastically; "row_max" shifts the
            row maximum where it is attained more than once (arXiv 2510.04212, Algorithm 3, made
            safe).
        beta: Strength of the shift of "row_max", > 1.
        eps: Distance from the row maximum, in logits, within which scores count as maxima, > 0.
        seed: Seed of "stochastic".
        backend: "auto" (the fastest for the device), "torch" or "triton".
        return_lse: Whether to return the logsumexp too. It carries no gradient.

    Returns:
        The output `(B, H, N, D)` in q's dtype, and with `return_lse` lse `(B, H, N)` in FP32,
        natural logarithm.

    Raises:
        ValueError: If a shape, dtype, name or number is not one of the above.
        TypeError: If q, k or v is no tensor.
    """
    _check_tensors(q, k, v)
    q, k, v = _autocast(q), _autocast(k), _autocast(v)
    _check_agreement(q, k, v)
    stabilizers = check_stabilizers(stabilizer, q.size(1))
    if not isinstance(causal, bool) and causal != "top-left":
        raise ValueError(f"causal is {causal!r}; allowed are False, True and 'top-left'")
    if scale is not None and not math.isfinite(scale):
        raise ValueError(f"scale is {scale}; it must be finite, or None for 1 / sqrt(D)")
    if not 1.0 < beta < math.inf:
        raise ValueError(f"beta is {beta}; it must be greater than 1 and finite")
    if not 0.0 < eps < math.inf:
        raise ValueError(f"eps is {eps}; it must be greater than 0 and finite")
    if not -(2**63) <= seed < 2**63:
        raise ValueError(f"seed is {seed}; it must fit 64 bits with sign")
    if backend not in _BACKENDS:
        raise ValueError(f"backend is {backend!r}; allowed are {', '.join(_BACKENDS)}")
    if backend == "triton":
        raise ValueError("backend 'triton' has no kernels in this version; use 'auto' or 'torch'")
    if site_stack and not torch.compiler.is_compiling():
        for listener in call_listeners:
            listener(q, k, v)
    out, lse, _, _ = torch.ops.guardbit.attention(
        q,
        k,
        v,
        site_stack[-1] if site_stack else _NO_SITE_TENSOR,
        [STABILIZERS.index(name) for name in stabilizers],
        _CAUSAL_CODES[causal],
        1.0 / math.sqrt(q.size(-1)) if scale is None else scale,
        beta,
        eps,
        seed,
        False,
        torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad),
        torch.compiler.is_compiling(),
    )
    return (out, lse) if return_lse else out


def switchable_attention(
    q: Tensor, k: Tensor, v: Tensor, site: Tensor, *, is_causal: bool, scale: float | None
) -> Tensor:
    """`F.scaled_dot_product_attention` without mask and dropout, with heads that can be switched.

    Until a head of the site is switched the result has the very bits of PyTorch's own function.

    Args:
        q: Queries `(B, H, N, D)`.
        k: Keys `(B, H_kv, M, D)`.
        v: Values, shape of k.
        site: Number of the site, 0-d CPU tensor.
        is_causal: Whether the top-left aligned causal mask applies.
        scale: Factor of the scores; None for 1 / sqrt(D).

    Returns:
        The output `(B, H, N, D)`.
    """
    q, k, v = _autocast(q), _autocast(k), _autocast(v)
    out, _, _, _ = torch.ops.guardbit.attention(
        q,
        k,
        v,
        site,
        [0] * q.size(1),
        _CAUSAL_CODES["top-left"] if is_causal else 0,
        scale,
        2.0,
        1e-3,
        0,
        True,
        torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad),
        torch.compiler.is_compiling(),
    )
    return out


def check_stabilizers(stabilizer: str | Sequence[str], num_heads: int) -> tuple[str, ...]:
    """Returns one name a head, or says what is wrong.

    Args:
        stabilizer: One name, or one a head.
        num_heads: Number of query heads.

    Raises:
        ValueError: If a name is unknown or there are not as many as heads.
    """
    if not isinstance(stabilizer, str | Sequence):
        raise ValueError(f"stabilizer is {stabilizer!r}; expected a name or one name a head")
    names = (stabilizer,) * num_heads if isinstance(stabilizer, str) else tuple(stabilizer)
    for name in names:
        if name not in STABILIZERS:
            raise ValueError(
                f"stabilizer {name!r} is unknown; allowed are {', '.join(STABILIZERS)}"
            )
    if len(names) != num_heads:
        raise ValueError(f"{len(names)} stabilizers were given for {num_heads} heads")
    return names


def is_autocast(x: Tensor) -> bool:
    """Whether autocast is on for x's device; on meta, which has none, the question is an error."""
    return x.device.type != "meta" and torch.is_autocast_enabled(x.device.type)


def _autocast(x: Tensor) -> Tensor:
    """Casts as autocast casts the arguments of `F.scaled_dot_product_attention`."""
    if is_autocast(x) and x.dtype in _DTYPES:
        return x.to(torch.get_autocast_dtype(x.device.type))
    return x


def _check_tensors(q: Tensor, k: Tensor, v: Tensor) -> None:
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not isinstance(x, Tensor):
            raise TypeError(f"{name} is a {type(x).__name__}; expected a tensor")
        if x.dim() != 4:
            raise ValueError(f"{name} has {x.dim()} dimensions; expected 4: (B, H, N, D)")
        if x.dtype not in _DTYPES:
            raise ValueError(f"{name} is {x.dtype}; allowed are bfloat16, float16 and float32")


def _check_agreement(q: Tensor, k: Tensor, v: Tensor) -> None:
    if q.dtype != k.dtype or q.dtype != v.dtype:
        raise ValueError(f"q, k, v are {q.dtype}, {k.dtype}, {v.dtype}; they must agree")
    if q.device != k.device or q.device != v.device:
        raise ValueError(f"q, k, v are on {q.device}, {k.device}, {v.device}; they must agree")
    if k.shape != v.shape:
        raise ValueError(f"k is {tuple(k.shape)} and v {tuple(v.shape)}; they must agree")
    if q.size(0) != k.size(0) or q.size(3) != k.size(3):
        raise ValueError(
            f"q is {tuple(q.shape)} and k {tuple(k.shape)}; batch and head size must agree"
        )
    if k.size(1) == 0 or q.size(1) % k.size(1):
        raise ValueError(f"{q.size(1)} query heads do not divide into {k.size(1)} key heads")
    if not MIN_HEAD_DIM <= q.size(3) <= MAX_HEAD_DIM:
        raise ValueError(f"head size is {q.size(3)}; allowed are {MIN_HEAD_DIM} to {MAX_HEAD_DIM}")


_library = torch.library.Library("guardbit", "DEF")
_library.define(
    "attention(Tensor q, Tensor k, Tensor v, Tensor site, int[] stabilizers, int causal,"
    " float? scale, float beta, float eps, int seed, bool stock, bool training, bool traced)"
    " -> (Tensor out, Tensor lse, Tensor residual, Tensor kernels)"
)
_library.define(
    "attention_backward(Tensor d_out, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse,"
    " Tensor residual, Tensor kernels, Tensor site, int causal, float? scale, bool stock,"
    " bool traced)"
    " -> (Tensor dq, Tensor dk, Tensor dv)"
)


def _laid_out_as(x: Tensor, like: Tensor) -> Tensor:
    """Gives x the memory layout of `like`, which the op's fake kernels promise."""
    promised = torch.empty_like(like)
    return x if x.stride() == promised.stride() else promised.copy_(x)


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
    use_stock: bool,
    training: bool,
    traced: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Runs forward.

    A compiled graph fixes every shape and stride when it is traced, before anyone knows whether a
    head will be switched. There (`traced`) `residual` is always allocated, and the output is laid
    out as q, as PyTorch's flash kernels do. Elsewhere `residual` is empty unless a head needs it,
    and the output keeps the layout of the kernel that ran: models may depend on it.

    `kernels`, `(1 + H,)` on the CPU, tells the backward what ran: PyTorch's backend, then one
    stabilizer a head. So the two always agree, whatever is switched in between.
    """
    number = int(site)
    state = site_state(number)
    state.requested = tuple(STABILIZERS[code] for code in stabilizers)
    names = state.in_force
    ours = [h for h, name in enumerate(names) if not use_stock or name != "none"]
    out, lse, backend = None, None, SDPBackend.ERROR
    with torch.autocast(q.device.type, enabled=False):
        if len(ours) < q.size(1):
            out, lse, backend = stock.forward(q, k, v, causal != 0, scale, training)
            state.launches["forward", backend.name] += 1
        residual = None
        if ours:
            result = reference.forward(
                q,
                k,
                v,
                causal=_CAUSAL_NAMES[causal],
                scale=_scale(scale, q),
                stabilizers=[names[h] for h in ours],
                beta=beta,
                eps=eps,
                seed=seed,
                offset=random_offset(),
                heads=ours if len(ours) < q.size(1) else None,
            )
            for name in {names[h] for h in ours}:
                state.launches["forward", name] += 1
            if out is None or lse is None:
                out, lse, residual = _laid_out_as(result.out, q), result.lse, result.residual
            else:
                out, lse = out.clone(), lse.clone()
                out[:, ours], lse[:, ours] = result.out, result.lse
                if result.residual is not None:
                    residual = torch.zeros_like(out)
                    residual[:, ours] = result.residual
    assert out is not None and lse is not None
    if traced:
        out = _laid_out_as(out, q)
    if residual is None:
        residual = torch.empty_like(q) if traced else q.new_empty(0)
    else:
        residual = _laid_out_as(residual, q)
    kernels = torch.tensor([backend.value, *(STABILIZERS.index(name) for name in names)])
    return out, lse.contiguous(), residual, kernels


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
    use_stock: bool,
    training: bool,
    traced: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return (
        torch.empty_like(q),
        q.new_empty(q.shape[:-1], dtype=torch.float32),
        torch.empty_like(q) if traced else q.new_empty(0),
        site.new_empty(1 + q.size(1), dtype=torch.int64),
    )


def _attention_backward(
    d_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    residual: Tensor,
    kernels: Tensor,
    site: Tensor,
    causal: int,
    scale: float | None,
    use_stock: bool,
    traced: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Runs backward; `traced` as for the forward."""
    number = int(site)
    state = site_state(number)
    backend, *codes = kernels.tolist()
    names = tuple(STABILIZERS[code] for code in codes)
    ours = [h for h, name in enumerate(names) if not use_stock or name != "none"]
    keeps_residual = "compensated" in names
    gradients = None
    with torch.autocast(q.device.type, enabled=False):
        if len(ours) < q.size(1):
            stock_backend = SDPBackend(backend)
            # A zero gradient contributes exact zeros: the other heads' gradients keep their bits,
            # and key heads shared with a switched query head receive only the others' share.
            rest = d_out.index_fill(1, _index(ours, d_out), 0) if ours else d_out
            gradients = stock.backward(rest, q, k, v, out, lse, stock_backend, causal != 0, scale)
            state.launches["backward", stock_backend.name] += 1
        if ours:
            some = len(ours) < q.size(1)
            result = reference.backward(
                d_out[:, ours],
                *(select_heads(q, k, v, ours) if some else (q, k, v)),
                out[:, ours],
                lse[:, ours],
                residual[:, ours] if keeps_residual else None,
                causal=_CAUSAL_NAMES[causal],
                scale=_scale(scale, q),
                stabilizers=[names[h] for h in ours],
            )
            for name in {names[h] for h in ours}:
                state.launches["backward", name] += 1
            gradients = _merge(gradients, (result.dq, result.dk, result.dv), ours, k)
    assert gradients is not None
    if traced or len(ours) == q.size(1):
        gradients = map(_laid_out_as, gradients, (q, k, v))
    dq, dk, dv = gradients
    if state.observer is not None:
        state.observer(
            AttentionCall(
                number,
                q,
                k,
                v,
                out,
                residual if keeps_residual else None,
                d_out,
                dq,
                dk,
                dv,
                _CAUSAL_NAMES[causal],
                _scale(scale, q),
                names,
            )
        )
    return dq, dk, dv


def _attention_backward_fake(
    d_out: Tensor, q: Tensor, k: Tensor, v: Tensor, *_: object
) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)


def _scale(scale: float | None, q: Tensor) -> float:
    return 1.0 / math.sqrt(q.size(-1)) if scale is None else scale


def _index(heads: list[int], like: Tensor) -> Tensor:
    return torch.tensor(heads, device=like.device)


def _merge(
    rest: tuple[Tensor, Tensor, Tensor] | None,
    ours: tuple[Tensor, Tensor, Tensor],
    heads: list[int],
    k: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """Puts the chosen heads' gradients among the others'."""
    if rest is None:
        return ours
    dq, dk, dv = (x.clone() for x in rest)
    dq[:, heads] = ours[0]
    group = dq.size(1) // k.size(1)
    key_heads = _index([h // group for h in heads], k)
    dk.index_add_(1, key_heads, ours[1])
    dv.index_add_(1, key_heads, ours[2])
    return dq, dk, dv


class _Attention(torch.autograd.Function):
    # Registered by hand: `torch.library.register_autograd` converts the op's schema argument by
    # argument at every call, which doubles the host's time for a forward (425 against 226 us).
    @staticmethod
    def forward(ctx, *arguments):
        with torch._C._AutoDispatchBelowAutograd():
            out, lse, residual, kernels = torch.ops.guardbit.attention.default(*arguments)
        q, k, v, site, _, causal, scale, _, _, _, use_stock, _, traced = arguments
        ctx.save_for_backward(q, k, v, out, lse, residual, kernels, site)
        ctx.arguments = (causal, scale, use_stock, traced)
        ctx.mark_non_differentiable(lse, residual, kernels)
        ctx.set_materialize_grads(False)
        return out, lse, residual, kernels

    @staticmethod
    def backward(ctx, *d_outputs):
        d_out = d_outputs[0]
        if d_out is None:
            return (None,) * 13
        if not torch.is_grad_enabled():
            gradients = torch.ops.guardbit.attention_backward.default(
                d_out, *ctx.saved_tensors, *ctx.arguments
            )
        else:
            gradients = _backward_of_create_graph(d_out, ctx.saved_tensors, ctx.arguments)
        return (*gradients, *(None,) * 10)


def _backward_of_create_graph(d_out: Tensor, saved, arguments):
    """As differentiable as PyTorch's own: the math kernel is, and all others say that they are not.

    The op itself would pass for a constant.
    """
    q, k, v, *_, kernels, _ = saved
    causal, scale, use_stock, _ = arguments
    backend, *codes = kernels.tolist()
    if use_stock and backend == SDPBackend.MATH.value and not any(codes):
        return stock.differentiable_backward(d_out, q, k, v, causal != 0, scale)
    with torch.no_grad():
        gradients = torch.ops.guardbit.attention_backward(d_out, *saved, *arguments)
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


_library.impl("attention", _attention, "CompositeExplicitAutograd")
_library.impl("attention_backward", _attention_backward, "CompositeExplicitAutograd")
torch.library.register_fake("guardbit::attention", _attention_fake, lib=_library)
torch.library.register_fake("guardbit::attention_backward", _attention_backward_fake, lib=_library)
_library.impl("attention", _Attention.apply, "Autograd")
