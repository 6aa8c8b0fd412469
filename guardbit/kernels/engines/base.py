"""What every engine offers: a forward, and a backward from a given O'; and its random numbers.

Shapes: q, out, d_out `(B, H, N, D)`; k, v `(B, H_kv, M, D)`; lse `(B, H, N)` FP32.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cached_property, lru_cache
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend

from guardbit.kernels.reference import Gradients
from guardbit.kernels.spec import AttentionSpec

T = TypeVar("T")


class Drawn(NamedTuple):
    """Where a call's random numbers came from, to redraw them; an engine fills one of the two."""

    philox: Tensor  # INT64 `(2,)` on the device of q, seed and offset
    # UINT8 `(state_bytes(device),)` on the CPU, see `torch.Generator.get_state`; of CUDA devices
    # this, too, is seed and offset.
    generator_state: Tensor


class Inputs(NamedTuple):
    """What an engine computes attention of, forward and backward."""

    q: Tensor
    k: Tensor
    v: Tensor
    spec: AttentionSpec
    drawn: Drawn | None = None  # None without dropout
    wants_mask: bool = False  # whether the gradient of an additive mask is asked for
    residual: Tensor | None = None  # what a backward adds to O for delta


class Engine(ABC):
    """One way to compute attention. Results equal the original function's, bit for bit."""

    backend: SDPBackend  # PyTorch's name of it
    # Whether its backward computes delta from an O that it is given. Otherwise delta comes from P
    # and dP, and the engine can get no O'.
    reads_out: bool = True
    deterministic: bool = False  # whether the call asks for a backward that adds in a fixed order
    scheduling: tuple[int, ...] = ()  # see `LibraryEngine`
    longest: int = 1  # queries that the longest packed document of a call has at least

    @cached_property  # the enum builds the name at each access
    def name(self) -> str:
        """PyTorch's name, as telemetry has it."""
        return self.backend.name

    @property
    def title(self) -> str:
        return f"PyTorch's {self.name} kernel"

    @abstractmethod
    def forward(self, inputs: Inputs, training: bool) -> tuple[Tensor, Tensor | None]:
        """Computes out and lse; lse is None where the engine returns none."""

    @abstractmethod
    def backward(self, inputs: Inputs, d_out: Tensor, out: Tensor, lse: Tensor) -> Gradients:
        """Computes the gradients."""

    def forward_with_residual(self, inputs: Inputs) -> tuple[Tensor, Tensor, Tensor] | None:
        """Computes out, lse and what rounding took from out; None if the kernels keep none."""
        return None

    def laid_out(self, out: Tensor, q: Tensor) -> Tensor:
        """Returns `out`, or a copy, in the one layout that the backward can read."""
        return out


def additive(mask: Tensor | None, dtype: torch.dtype, hidden: float = -math.inf) -> Tensor | None:
    """Returns a mask as PyTorch hands it to its kernels, added to the scores; None for none."""
    if mask is None or mask.dtype != torch.bool:
        return mask
    zero = torch.zeros((), dtype=dtype, device=mask.device)
    return torch.where(mask, zero, zero + hidden)


# --- the random numbers of PyTorch's kernels: where they come from, how to redraw them ------------

_STATE_BYTES = {"cpu": torch.default_generator.get_state().numel(), "cuda": 16}


def state_bytes(device: torch.device) -> int:
    """Returns the size of a default generator's state; compiled graphs need it as a shape."""
    return _STATE_BYTES.get(device.type, 0)


def keep(drawn: Drawn | None, seed: Tensor, offset: Tensor) -> None:
    """Keeps the seed and offset that a CUDA kernel returned, if the call draws."""
    if drawn is None:
        return
    pair = seed.view(torch.int64) if seed.numel() == 2 else torch.stack((seed, offset))
    if pair.is_cuda:
        drawn.philox.copy_(pair)
    else:
        drawn.generator_state.copy_(pair.view(torch.uint8))


def philox_of(drawn: Drawn | None, device: torch.device) -> Tensor:
    """Returns seed and offset on the device, INT64 `(2,)`; zeros without dropout."""
    return _nothing_drawn(device)[0] if drawn is None else drawn.philox


def seed_and_offset(drawn: Drawn | None, device: torch.device) -> tuple[Tensor, ...]:
    """Returns what `philox_of` returns as two tensors `()`."""
    return _nothing_drawn(device)[1:] if drawn is None else drawn.philox.unbind()


@lru_cache
def _nothing_drawn(device: torch.device) -> tuple[Tensor, ...]:
    zeros = torch.zeros(2, dtype=torch.int64, device=device)
    return zeros, *zeros.unbind()


def generator_of(device: torch.device) -> torch.Generator:
    if device.type == "cpu":
        return torch.default_generator
    torch.cuda.init()
    index = torch.cuda.current_device() if device.index is None else device.index
    return torch.cuda.default_generators[index]


@contextmanager
def drawing_again(device: torch.device, drawn: Drawn | None) -> Iterator[None]:
    """Lets a second run draw the first run's numbers, and then restores the generator."""
    if drawn is None:
        yield
        return
    generator = generator_of(device)
    present = generator.get_state()
    try:
        generator.set_state(drawn.generator_state)
        yield
    finally:
        generator.set_state(present)


def drawing_once(function: Callable[[], T], device: torch.device, draws: bool) -> T:
    """Calls a function; if it raises, resets the generator, so that a fallback draws the same."""
    # The state cannot be read while a CUDA graph is captured.
    if not draws or (device.type == "cuda" and torch.cuda.is_current_stream_capturing()):
        return function()
    generator = generator_of(device)
    present = generator.get_state()
    try:
        return function()
    except Exception:
        generator.set_state(present)
        raise
