"""What every engine offers: a forward, and a backward from a given O'.

Shapes: q, out, d_out `(B, H, N, D)`; k, v `(B, H_kv, M, D)`; lse `(B, H, N)` FP32.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend

from guardbit.kernels.spec import AttentionSpec


class Drawn(NamedTuple):
    """Where a call's random numbers came from, so that its backward can redraw them.

    The forward fills one of the two. Which one depends on the engine.

    Attributes:
        philox: INT64 `(2,)` on the device of q, seed and offset.
        generator_state: UINT8 `(state_bytes(device),)` on the CPU, see
            `torch.Generator.get_state`; of CUDA devices this, too, is seed and offset.
    """

    philox: Tensor
    generator_state: Tensor


class Inputs(NamedTuple):
    """What an engine computes attention of, forward and backward.

    `drawn` is needed with dropout; `wants_mask` asks for the gradient of an additive mask.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    spec: AttentionSpec
    drawn: Drawn | None = None
    wants_mask: bool = False


class Gradients(NamedTuple):
    """Gradients of one call; `d_mask` and `d_sinks` only where they were asked for."""

    dq: Tensor
    dk: Tensor
    dv: Tensor
    d_mask: Tensor | None = None
    d_sinks: Tensor | None = None


class Engine(ABC):
    """One way to compute attention. Results equal those of the original function bit for bit.

    Attributes:
        backend: PyTorch's name of it.
        reads_out: Whether its backward computes delta from an O that it is given. Otherwise delta
            comes from P and dP, and no O' can be handed over.
        deterministic: Whether the call asks for a backward that adds in a fixed order.
        scheduling: See `LibraryEngine`.
    """

    backend: SDPBackend
    reads_out: bool = True
    deterministic: bool = False
    scheduling: tuple[int, ...] = ()

    @cached_property  # the enum makes it anew each time
    def name(self) -> str:
        """PyTorch's name, as telemetry has it."""
        return self.backend.name

    @property
    def title(self) -> str:
        """What messages call its kernel."""
        return f"PyTorch's {self.name} kernel"

    @abstractmethod
    def forward(self, inputs: Inputs, training: bool) -> tuple[Tensor, Tensor | None]:
        """Computes out and lse; lse is None where the engine returns none."""

    @abstractmethod
    def backward(self, inputs: Inputs, d_out: Tensor, out: Tensor, lse: Tensor) -> Gradients:
        """Computes the gradients."""

    def laid_out(self, out: Tensor, q: Tensor) -> Tensor:
        """Returns `out`, or a copy, in the one layout that the backward can read."""
        return out


def additive(mask: Tensor | None, dtype: torch.dtype, hidden: float = -math.inf) -> Tensor | None:
    """Returns a mask as PyTorch hands it to its kernels, added to the scores; None for none."""
    if mask is None or mask.dtype != torch.bool:
        return mask
    zero = torch.zeros((), dtype=dtype, device=mask.device)
    return torch.where(mask, zero, zero + hidden)
