"""Chooses between the Triton kernels and plain torch, here and nowhere else.

Triton is imported when it is first needed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import lru_cache
from importlib.util import find_spec
from typing import Any, Literal

import torch
from torch import Tensor

from guardbit.kernels import reference
from guardbit.kernels.constants import device_constant
from guardbit.kernels.reference import Dropout, RowMaxima, Shadow
from guardbit.kernels.spec import AttentionSpec
from guardbit.numerics import decode_residual

BACKENDS = ("auto", "torch", "triton")

# Compute capability from which on the Triton kernels are compiled and tested: BF16 products.
_OLDEST_CAPABILITY = (8, 0)


@lru_cache
def _has_triton() -> bool:
    return find_spec("triton") is not None


@lru_cache
def _capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device)


def on_triton(backend: str, q: Tensor) -> bool:
    """Whether a call runs the Triton kernels; otherwise it runs plain torch."""
    if backend == "torch" or (backend == "auto" and not q.is_cuda):
        return False
    obstacle = _triton_obstacle(q)
    if obstacle is not None and backend == "triton":
        raise ValueError(f"backend 'triton' {obstacle}; use 'auto' or 'torch'")
    return obstacle is None


def _triton_obstacle(q: Tensor) -> str | None:
    if not _has_triton():
        return "needs the package triton, which is not installed"
    if q.dtype not in (torch.bfloat16, torch.float16):
        return f"takes bfloat16 and float16, but q is {q.dtype}"
    if q.is_cuda:
        capability = _capability(q.device)
        if capability < _OLDEST_CAPABILITY:
            found = ".".join(map(str, capability))
            return f"needs compute capability 8.0 or newer, but {q.device} has {found}"
        return None
    from guardbit.kernels.device.rounding import INTERPRET

    return None if INTERPRET.value else f"needs CUDA tensors, but q is on {q.device}"


@lru_cache
def launcher(
    direction: Literal["forward", "backward"], triton: bool, device_type: str
) -> Callable[..., Any]:
    """Returns our forward or backward, see `reference.forward` and `reference.backward`."""
    if triton:  # ignores autocast, which takes 10 us to leave
        from guardbit.kernels import backward, forward

        return forward.forward if direction == "forward" else backward.backward
    run = reference.forward if direction == "forward" else reference.backward
    return torch.autocast(device_type, enabled=False)(run)


def shadow(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    spec: AttentionSpec,
    eps: float,
    query_ids: Tensor | None,
    dropout: Dropout | None,
) -> Shadow:
    """Computes O and row statistics to FP32 accuracy, see `reference.shadow`."""
    settings: dict[str, Any] = {"spec": spec, "eps": eps, "query_ids": query_ids}
    if _is_audited_by_triton(q, k, v, spec, dropout):
        from guardbit.kernels import shadow as kernels

        return kernels.shadow(q, k, v, **settings)
    return reference.shadow(q, k, v, **settings, dropout=dropout)


def row_maxima(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    spec: AttentionSpec,
    query_ids: Tensor | None,
    dropout: Dropout | None,
) -> RowMaxima:
    """The maxima of `shadow` alone, for less; of the same backend, so that they are the same."""
    if _is_audited_by_triton(q, k, v, spec, dropout):
        from guardbit.kernels import shadow as kernels

        return kernels.row_maxima(q, k, spec=spec, query_ids=query_ids)
    return reference.row_maxima(q, k, spec=spec, query_ids=query_ids)


def _is_audited_by_triton(
    q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec, dropout: Dropout | None
) -> bool:
    is_plain = dropout is None and not spec.has_functions and k.shape == v.shape
    return is_plain and on_triton("auto", q)


def delta_bias(
    d_out: Tensor,
    out: Tensor,
    exact: Tensor,
    *,
    residual: Tensor | None,
    query_ids: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Sums the error of delta, see `reference.delta_bias`."""
    if on_triton("auto", out):
        from guardbit.kernels import delta_bias as kernels

        return kernels.delta_bias(d_out, out, exact, residual=residual, query_ids=query_ids)
    return reference.delta_bias(d_out, out, exact, residual=residual, query_ids=query_ids)


def exact_query_gradient(
    d_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    spec: AttentionSpec,
    head_ids: Sequence[int],
    dropout: Dropout | None,
) -> Tensor:
    """Computes dQ of a few heads to FP32 accuracy, see `reference.exact_query_gradient`."""
    settings: dict[str, Any] = {"spec": spec, "head_ids": head_ids}
    if _is_audited_by_triton(q, k, v, spec, dropout):
        from guardbit.kernels import audit

        return audit.exact_query_gradient(d_out, q, k, v, **settings)
    return reference.exact_query_gradient(d_out, q, k, v, **settings, dropout=dropout)


def exact_delta(
    d_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lse: Tensor,
    *,
    spec: AttentionSpec,
    head_ids: Sequence[int],
) -> Tensor:
    """Computes delta of some heads from unrounded probabilities, see `reference.exact_delta`."""
    if not spec.has_functions and on_triton("auto", q):
        from guardbit.kernels import delta

        return delta.exact_delta(d_out, q, k, v, lse, spec=spec, head_ids=head_ids)
    with torch.autocast(q.device.type, enabled=False):
        return reference.exact_delta(d_out, q, k, v, lse, spec=spec, head_ids=head_ids)


def carry_exact_delta(
    d_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    *,
    spec: AttentionSpec,
    head_ids: Sequence[int],
    into: Tensor | None = None,
) -> Tensor:
    """Returns an O' that carries the exact delta of some heads, see `reference.write_carrier`."""
    if not spec.has_functions and on_triton("auto", q):
        from guardbit.kernels import delta

        settings: dict[str, Any] = {"spec": spec, "head_ids": head_ids, "into": into}
        return delta.carry_exact_delta(d_out, q, k, v, out, lse, **settings).out
    with torch.autocast(q.device.type, enabled=False):
        exact = reference.exact_delta(
            d_out, q, k, v, lse, spec=spec, head_ids=head_ids, unseeing=math.nan
        )  # fmt: skip
        carried = torch.empty_like(out).copy_(out) if into is None else into
        reference.write_carrier(carried, d_out, exact, head_ids)
    return carried


def carry_compensated_delta(
    d_out: Tensor, out: Tensor, residual: Tensor, *, head_ids: Sequence[int], into: Tensor | None
) -> Tensor:
    """Returns an O' whose rows carry the compensated delta of some heads."""
    triton = on_triton("auto", out)
    carried = torch.empty_like(out) if into is None else into
    # The Triton kernel writes all rows of its heads; torch only those that can carry their delta.
    if into is None and not (triton and len(head_ids) == out.size(1)):
        carried.copy_(out)
    if triton:
        from guardbit.kernels import compensated

        compensated.carry_compensated_delta(d_out, out, residual, carried, head_ids=head_ids)
        return carried
    index = device_constant(tuple(head_ids), torch.int64, out.device)
    rounded, lost, gradients = (x.index_select(1, index) for x in (out, residual, d_out))
    delta = (gradients.float() * (rounded.float() + decode_residual(rounded, lost))).sum(-1)
    reference.write_carrier(carried, d_out, delta, head_ids)
    return carried


def is_direct(*tensors: Tensor) -> bool:
    """Whether an op's implementation may be called directly: no mode or subclass intercepts it."""
    return (
        torch._C._len_torch_dispatch_stack() == 0
        and not torch._C._are_functorch_transforms_active()
        and all(type(x) in _PLAIN and (x.is_cuda or x.is_cpu) for x in tensors)
    )


_PLAIN = (Tensor, torch.nn.Parameter)
