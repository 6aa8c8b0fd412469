"""The random numbers of PyTorch's kernels: where they come from, and how to redraw them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import TypeVar

import torch
from torch import Tensor

from guardbit.kernels.engines.base import Drawn

T = TypeVar("T")

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
    """Returns seed and offset on the device, INT64 `(2,)`; zeros if nothing was dropped."""
    return _nothing_drawn(device) if drawn is None else drawn.philox


@lru_cache
def _nothing_drawn(device: torch.device) -> Tensor:
    return torch.zeros(2, dtype=torch.int64, device=device)


def is_capturing() -> bool:
    """Whether the current stream is being captured in a CUDA graph."""
    return torch.cuda.is_current_stream_capturing()


def generator_of(device: torch.device) -> torch.Generator:
    """Returns the device's default generator."""
    if device.type == "cpu":
        return torch.default_generator
    torch.cuda.init()
    index = torch.cuda.current_device() if device.index is None else device.index
    return torch.cuda.default_generators[index]


@contextmanager
def drawing_again(device: torch.device, drawn: Drawn | None) -> Iterator[None]:
    """Makes a second run redraw the first run's numbers, and restores the generator after it."""
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
    """Calls a function; if it raises, whatever is tried instead draws the same numbers."""
    # The state cannot be read while a CUDA graph is captured.
    if not draws or (device.type == "cuda" and is_capturing()):
        return function()
    generator = generator_of(device)
    present = generator.get_state()
    try:
        return function()
    except Exception:
        generator.set_state(present)
        raise
