"""Triton's kernels where they can run, plain torch elsewhere: the one place that chooses.

Triton is imported when it is first needed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from importlib.util import find_spec
from typing import Any, Literal

import torch
from torch import Tensor

from guardbit.kernels import reference
from guardbit.kernels.reference import Causal, Dropout, Shadow

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
    """Whether Triton's kernels serve a call, or the plain-torch ones.

    Args:
        backend: One of `BACKENDS`.
        q: Queries of the call; keys and values have the same dtype and device.

    Raises:
        ValueError: If Triton's are asked for and cannot.
    """
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
    from guardbit.kernels.primitives import INTERPRET

    return None if INTERPRET.value else f"needs CUDA tensors, but q is on {q.device}"


@lru_cache
def launcher(
    direction: Literal["forward", "backward"], triton: bool, device_type: str
) -> Callable[..., Any]:
    """Our own forward or backward, see `reference.forward` and `reference.backward`."""
    if triton:  # takes no notice of autocast, which costs 10 us to leave
        from guardbit.kernels import backward, forward

        return forward.forward if direction == "forward" else backward.backward
    run = reference.forward if direction == "forward" else reference.backward
    return torch.autocast(device_type, enabled=False)(run)


def shadow(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: Causal,
    scale: float,
    eps: float,
    rows: Tensor | None,
    dropout: Dropout | None,
) -> Shadow:
    """O and row statistics to FP32 accuracy, see `reference.shadow`.

    With dropout always in plain torch: Triton's kernel drops nothing.
    """
    settings: dict[str, Any] = {"causal": causal, "scale": scale, "eps": eps, "rows": rows}
    if dropout is None and on_triton("auto", q):
        from guardbit.kernels import shadow as kernels

        return kernels.shadow(q, k, v, **settings)
    return reference.shadow(q, k, v, **settings, dropout=dropout)


def delta_bias(
    d_out: Tensor,
    out: Tensor,
    exact: Tensor,
    *,
    residual: Tensor | None,
    rows: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """The error of delta that adds up, see `reference.delta_bias`."""
    if on_triton("auto", out):
        from guardbit.kernels import shadow as kernels

        return kernels.delta_bias(d_out, out, exact, residual=residual, rows=rows)
    return reference.delta_bias(d_out, out, exact, residual=residual, rows=rows)


def exact_query_gradient(
    d_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: Causal,
    scale: float,
    heads: Sequence[int],
    dropout: Dropout | None,
) -> Tensor:
    """DQ of a few heads to FP32 accuracy, see `reference.exact_query_gradient`.

    With dropout always in plain torch, as `shadow`.
    """
    settings: dict[str, Any] = {"causal": causal, "scale": scale, "heads": heads}
    if dropout is None and on_triton("auto", q):
        from guardbit.kernels import audit

        return audit.exact_query_gradient(d_out, q, k, v, **settings)
    return reference.exact_query_gradient(d_out, q, k, v, **settings, dropout=dropout)
