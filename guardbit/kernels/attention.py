"""The public attention function.

Shapes: q `(B, H, N, D)`; k, v `(B, H_kv, M, D)`, H a multiple of H_kv; out `(B, H, N, D)`;
lse `(B, H, N)` FP32.

`guardbit.kernels.op` decides what a call does, when it runs.
"""

import math
from collections.abc import Sequence
from typing import Literal, TypedDict, Unpack, overload

import torch
from torch import Tensor

from guardbit.kernels import dispatch, op
from guardbit.kernels.dispatch import MAX_HEAD_DIM, MIN_HEAD_DIM
from guardbit.kernels.heads import Call
from guardbit.kernels.runtime import NO_SITE, runtime
from guardbit.kernels.spec import AttentionSpec, Causal, check_causal
from guardbit.kernels.tensors import autocast_tensors
from guardbit.records import STABILIZERS

_DTYPES = (torch.bfloat16, torch.float16, torch.float32)

_NO_SITE_TENSOR = torch.tensor(NO_SITE, dtype=torch.int64, device="cpu")


class _Options(TypedDict, total=False):
    causal: Causal
    scale: float | None
    stabilizer: str | Sequence[str]
    beta: float
    eps: float
    seed: int
    backend: str
    dropout_p: float


@overload
def flash_attention(
    q: Tensor, k: Tensor, v: Tensor, *, return_lse: Literal[True], **options: Unpack[_Options]
) -> tuple[Tensor, Tensor]: ...


@overload
def flash_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    return_lse: Literal[False] = ...,
    **options: Unpack[_Options],
) -> Tensor: ...


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
    dropout_p: float = 0.0,
) -> Tensor | tuple[Tensor, Tensor]:
    """Computes exact attention, with a choice of how its roundings are kept from adding up.

    >>> q, k, v = torch.randn(3, 1, 4, 8, 16)
    >>> out, lse = flash_attention(q, k, v, causal=True, return_lse=True)
    >>> out.shape, lse.shape
    (torch.Size([1, 4, 8, 16]), torch.Size([1, 4, 8]))
    >>> out = flash_attention(q, k, v, stabilizer=["none", "compensated", "none", "none"])

    With ``causal=True`` the mask is aligned to the bottom right, as in FlashAttention; with
    ``causal="top-left"`` as in ``F.scaled_dot_product_attention(is_causal=True)``. For N = 2 and
    M = 4 (1 = may attend)::

        True     1 1 1 0     "top-left"  1 0 0 0
                 1 1 1 1                 1 1 0 0

    A row with no allowed key gives output 0, lse -inf and gradients 0.

    `Tensor.backward` and `torch.autograd.grad` differentiate it. `torch.func.vmap` works; it runs
    one call after the other.

    With ``torch.compile(mode="reduce-overhead")`` attention runs between the CUDA graphs and can be
    switched. A graph captured by hand (``torch.cuda.graph``) keeps the kernels that were captured:
    a later switch does not reach it.

    Args:
        q: Queries `(B, H, N, D)`, BF16, FP16 or FP32, 16 <= D <= 256.
        k: Keys `(B, H_kv, M, D)`, H a multiple of H_kv (grouped-query attention).
        v: Values, shape of k.
        causal: False, True (bottom-right) or "top-left".
        scale: Factor of the scores; None for 1 / sqrt(D).
        stabilizer: One name of `guardbit.STABILIZERS`, or one per head; `guardbit/records.py` has a
            line on each. "none" is plain FlashAttention-2.
        beta: Strength of the shift of "row_max", > 1.
        eps: Distance from the row maximum, in logits, within which scores count as maxima, > 0.
        seed: Anything: has no effect, because no stabilizer draws random numbers. Dropout draws
            from the device's generator.
        backend: "triton" takes BF16 and FP16 on GPUs of compute capability 8.0 or newer, and on
            the CPU in Triton's interpreter (`TRITON_INTERPRET=1` before triton is imported), which
            is there for tests. "torch" takes everything and is slow. "auto" is "triton" where a GPU
            can, else "torch".
        return_lse: Whether to return the logsumexp too. It carries no gradient.
        dropout_p: Probability, 0 <= p < 1 and rounded to 2^-16, with which an entry of the softmax
            is dropped; the others are divided by 1 - p. lse is that of the whole softmax. Each call
            draws one number from the device's default generator, so `torch.manual_seed` and
            activation checkpointing hold, and which entries go does not depend on stabilizers.

    Returns:
        The output `(B, H, N, D)` in q's dtype, and with `return_lse` lse `(B, H, N)` in FP32,
        natural logarithm.

    Raises:
        ValueError: If a shape, dtype, name or number is not one of the above, or the backend
            cannot take the inputs.
        TypeError: If q, k or v is not a tensor.
        NotImplementedError: If a forward-mode derivative, or one of `torch.func`, is asked for.
    """
    _check_tensors(q, k, v)
    q, k, v = autocast_tensors(q, k, v)
    _check_agreement(q, k, v)
    stabilizers = check_stabilizers(stabilizer, q.size(1))
    check_causal(causal)
    numbers = {"beta": beta, "eps": eps, "dropout_p": dropout_p}
    for name, value in (numbers if scale is None else {"scale": scale, **numbers}).items():
        if not isinstance(value, int | float) and not hasattr(value, "__float__"):
            raise ValueError(f"{name} is {value!r}; it must be a number")
    if scale is not None and not math.isfinite(scale):
        raise ValueError(f"scale is {scale}; it must be finite, or None for 1 / sqrt(D)")
    if not 1.0 < beta < math.inf:
        raise ValueError(f"beta is {beta}; it must be greater than 1 and finite")
    if not 0.0 < eps < math.inf:
        raise ValueError(f"eps is {eps}; it must be greater than 0 and finite")
    if not 0.0 <= dropout_p < 1.0:
        raise ValueError(f"dropout_p is {dropout_p}; it must be at least 0 and below 1")
    if backend not in dispatch.BACKENDS:
        raise ValueError(f"backend is {backend!r}; allowed are {', '.join(dispatch.BACKENDS)}")
    scale = 1.0 / math.sqrt(q.size(3)) if scale is None else float(scale)
    inside = runtime.is_inside_site()
    site = runtime.current if inside else _NO_SITE_TENSOR
    if inside and not torch.compiler.is_compiling():
        if runtime.on_flash_call is not None:
            runtime.on_flash_call(q, k, v)
        site = runtime.here()
    out, lse = op.attention(
        Call(
            q,
            k,
            v,
            AttentionSpec(scale, causal, dropout_p=float(dropout_p)),
            site,
            native=False,
            training=op.is_training(q, k, v),
            traced=torch.compiler.is_compiling(),
            stabilizers=tuple(STABILIZERS.index(name) for name in stabilizers),
            beta=float(beta),
            eps=float(eps),
            backend=dispatch.BACKENDS.index(backend),
        )
    )
    return (out, lse) if return_lse else out


def check_stabilizers(stabilizer: str | Sequence[str], num_heads: int) -> tuple[str, ...]:
    if not isinstance(stabilizer, str | Sequence):
        raise ValueError(f"stabilizer is {stabilizer!r}; it must be a name, or one per head")
    names = (stabilizer,) * num_heads if isinstance(stabilizer, str) else tuple(stabilizer)
    for name in names:
        if name not in STABILIZERS:
            raise ValueError(
                f"stabilizer {name!r} is unknown; allowed are {', '.join(STABILIZERS)}"
            )
    if len(names) != num_heads:
        raise ValueError(f"stabilizer has {len(names)} names; there are {num_heads} heads")
    return names


def _check_tensors(q: Tensor, k: Tensor, v: Tensor) -> None:
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not isinstance(x, Tensor):
            raise TypeError(f"{name} is a {type(x).__name__}; it must be a tensor")
        if x.is_nested or x.layout is not torch.strided:
            raise ValueError(f"{name} is a nested or sparse tensor; it must be dense")
        if x.dim() != 4:
            raise ValueError(f"{name} has {x.dim()} dimensions; it must have 4: (B, H, N, D)")
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
