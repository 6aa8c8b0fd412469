"""Engines, the ways to compute attention: one file each, and the choice for a call.

An engine runs a forward, and runs its backward from a given O'. It calls PyTorch's or a library's
own kernel with its own arguments, so its results equal those of the original function bit for bit.
`proof` finds out whether the backward reads O for delta only; otherwise no O' is handed to it.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend

from guardbit.kernels.engines.base import Drawn, Engine, Gradients, Inputs
from guardbit.kernels.engines.cpu_flash import CPUFlash
from guardbit.kernels.engines.cudnn import CuDNN
from guardbit.kernels.engines.efficient import Efficient
from guardbit.kernels.engines.flash import Flash
from guardbit.kernels.engines.flash_attn import FlashAttn2, FlashAttn3, FlashAttn4
from guardbit.kernels.engines.hub import (
    HubFlashAttn2,
    HubFlashAttn3,
    HubFlashAttn4,
    home_of,
    hub_kernel_is_loaded,
)
from guardbit.kernels.engines.library import SCHEDULING, LibraryEngine
from guardbit.kernels.engines.random import state_bytes
from guardbit.kernels.engines.varlen import Varlen
from guardbit.kernels.engines.whole import Whole, scaled_dot_product_attention
from guardbit.kernels.spec import AttentionSpec

__all__ = [
    "LIBRARIES",
    "SCHEDULING",
    "Drawn",
    "Engine",
    "Gradients",
    "Inputs",
    "LibraryEngine",
    "Whole",
    "choose",
    "engine_of",
    "home_of",
    "hub_kernel_is_loaded",
    "library_engine",
    "scaled_dot_product_attention",
    "state_bytes",
]


def choose(
    q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec, training: bool, wants_mask: bool = False
) -> Engine:
    """Returns the engine that PyTorch would run for a call."""
    if spec.extras:
        raise ValueError(
            f"F.scaled_dot_product_attention has no argument for {' and '.join(spec.extras)}."
        )
    mask = spec.mask
    with torch.set_grad_enabled(training):
        if training and not (q.requires_grad or k.requires_grad or v.requires_grad):
            q = q.detach().requires_grad_()  # in a compiled graph, where nothing says so
        if wants_mask and mask is not None and not mask.requires_grad:
            mask = mask.detach().requires_grad_()
        choice = torch.ops.aten._fused_sdp_choice(
            q, k, v, mask, spec.dropout_p, spec.causal is not False,
            scale=spec.scale, enable_gqa=q.size(1) != k.size(1),
        )  # fmt: skip
    return engine_of(SDPBackend(choice), q)


def engine_of(backend: SDPBackend, q: Tensor) -> Engine:
    """Returns the engine of a PyTorch backend, for queries like q."""
    return _engine(backend, q.is_cuda, q.size(-1))


@lru_cache
def _engine(backend: SDPBackend, is_cuda: bool, head_dim: int) -> Engine:
    if backend == SDPBackend.FLASH_ATTENTION and not is_cuda:
        return CPUFlash()
    # PyTorch pads other head sizes itself.
    if backend == SDPBackend.FLASH_ATTENTION and head_dim % 8 == 0:
        return Flash()
    if backend == SDPBackend.CUDNN_ATTENTION:
        return CuDNN()
    if backend == SDPBackend.EFFICIENT_ATTENTION:
        return Efficient()
    return Whole(backend)


#: The engines of libraries, by their names.
LIBRARIES: dict[str, type[LibraryEngine]] = {
    engine.label: engine
    for engine in (
        Varlen, FlashAttn2, FlashAttn3, FlashAttn4, HubFlashAttn2, HubFlashAttn3, HubFlashAttn4
    )
}  # fmt: skip


@lru_cache
def library_engine(
    name: str, deterministic: bool, scheduling: tuple[int, ...] = ()
) -> LibraryEngine:
    """Returns the engine of a library, see `LIBRARIES` and `LibraryEngine`."""
    return LIBRARIES[name](deterministic, scheduling)
