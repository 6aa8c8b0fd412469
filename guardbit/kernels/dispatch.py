"""Chooses between the Triton kernels and plain torch, here and nowhere else.

Both have the same functions, which `reference` describes. Triton is imported when it is needed.
"""

from collections.abc import Callable
from functools import lru_cache, wraps
from importlib import import_module
from importlib.util import find_spec
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor

from guardbit.kernels import reference, tiles
from guardbit.kernels.spec import AttentionSpec

P = ParamSpec("P")
T = TypeVar("T")

BACKENDS = ("auto", "torch", "triton")

#: The smallest and the largest head size that the kernels are written for; plain torch takes all.
MIN_HEAD_DIM = 16
MAX_HEAD_DIM = 256

#: What Triton computes -> the module of `kernels.device` that launches it, if of another name.
_LAUNCHERS = {
    "exact_query_gradient": "audit",
    "exact_delta": "delta",
    "carry_exact_delta": "delta",
    "carry_compensated_delta": "delta",
}


@lru_cache
def _has_triton() -> bool:
    return find_spec("triton") is not None


def on_triton(backend: str, q: Tensor) -> bool:
    """Whether a call runs the Triton kernels; otherwise it runs plain torch."""
    if backend == "torch" or (backend == "auto" and not q.is_cuda):
        return False
    obstacle = ""
    if not _has_triton():
        obstacle = "needs the package triton, which is not installed"
    elif q.dtype not in (torch.bfloat16, torch.float16):
        obstacle = f"takes bfloat16 and float16, but q is {q.dtype}"
    elif q.is_cuda:
        capability = tiles.capability(q.device)
        if capability < (8, 0):  # the kernels need products of BF16
            found = ".".join(map(str, capability))
            obstacle = f"needs compute capability 8.0 or newer, but {q.device} has {found}"
    else:
        from guardbit.kernels.device.primitives import INTERPRET

        obstacle = "" if INTERPRET.value else f"needs CUDA tensors, but q is on {q.device}"
    if obstacle and backend == "triton":
        raise ValueError(f"backend 'triton' {obstacle}; use 'auto' or 'torch'")
    return not obstacle


@lru_cache
def launcher(name: str, triton: bool) -> Callable[..., Any]:
    home = f"guardbit.kernels.device.{_LAUNCHERS.get(name, name)}"
    return getattr(import_module(home) if triton else reference, name)


def _chosen(plain: Callable[P, T], alike: bool = False) -> Callable[P, T]:
    """Returns a function that computes each call where it can be computed faster."""

    @wraps(plain)
    def run(*tensors: Any, **options: Any) -> T:
        spec: AttentionSpec | None = options.get("spec")
        triton = (
            MIN_HEAD_DIM <= tensors[0].size(-1) <= MAX_HEAD_DIM
            and options.get("dropout") is None
            and (spec is None or not spec.has_functions)
            # Audits of narrow values are not tested on GPUs: k and v then need one shape.
            and (not alike or tensors[-2].shape == tensors[-1].shape)
            and on_triton("auto", tensors[0])
        )
        if triton:
            options.pop("dropout", None)
        return launcher(plain.__name__, triton)(*tensors, **options)

    return run


shadow = _chosen(reference.shadow, alike=True)
delta_bias = reference.delta_bias
exact_query_gradient = _chosen(reference.exact_query_gradient, alike=True)
exact_delta = _chosen(reference.exact_delta)
carry_exact_delta = _chosen(reference.carry_exact_delta)
carry_compensated_delta = _chosen(reference.carry_compensated_delta)
