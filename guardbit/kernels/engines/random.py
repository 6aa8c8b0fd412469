"""The random numbers of PyTorch's kernels: where they came from, and how to draw them again."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache

import torch
from torch import Tensor

from guardbit.kernels.engines.base import Drawn

_STATE_BYTES = {"cpu": torch.default_generator.get_state().numel(), "cuda": 16}


def state_bytes(device: torch.device) -> int:
    """Size of the state of a device's default generator; shapes in a compiled graph need it."""
    return _STATE_BYTES.get(device.type, 0)


def keep(drawn: Drawn | None, seed: Tensor, offset: Tensor) -> None:
    """Keeps what a CUDA kernel returned, where a call draws.

    Flash returns both in the first tensor. The efficient kernel returns them, and its backward
    reads them, on the host, but under CUDA graph capture on the device.
    """
    if drawn is None:
        return
    pair = seed.view(torch.int64) if seed.numel() == 2 else torch.stack((seed, offset))
    if pair.is_cuda:
        drawn.philox.copy_(pair)
    else:
        drawn.generator_state.copy_(pair.view(torch.uint8))


def philox_of(drawn: Drawn | None, device: torch.device) -> Tensor:
    """Seed and offset on the device, INT64 `(2,)`; zeros where nothing was dropped."""
    return _nothing_drawn(device) if drawn is None else drawn.philox


@lru_cache
def _nothing_drawn(device: torch.device) -> Tensor:
    return torch.zeros(2, dtype=torch.int64, device=device)


def is_capturing() -> bool:
    """Whether the current stream is being captured in a CUDA graph."""
    return torch.cuda.is_current_stream_capturing()


def generator_of(device: torch.device) -> torch.Generator:
    """The device's default generator."""
    if device.type == "cpu":
        return torch.default_generator
    torch.cuda.init()
    index = torch.cuda.current_device() if device.index is None else device.index
    return torch.cuda.default_generators[index]


@contextmanager
def drawing_again(device: torch.device, drawn: Drawn | None) -> Iterator[None]:
    """Lets a re-run draw what the first run drew, and leaves the generator as it was."""
    if drawn is None:
        yield
        return
    generator = generator_of(device)
    present = generator.get_state()
    generator.set_state(drawn.generator_state)
    try:
        yield
    finally:
        generator.set_state(present)
