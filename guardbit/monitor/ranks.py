"""What the ranks of a distributed run exchange; a single process exchanges nothing."""

from __future__ import annotations

import zlib
from typing import TypeVar

import torch
import torch.distributed

T = TypeVar("T")


def world_size() -> int:
    """Number of ranks, 1 without `torch.distributed`."""
    distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
    return torch.distributed.get_world_size() if distributed else 1


def rank() -> int:
    """This process's rank, 0 without `torch.distributed`."""
    return torch.distributed.get_rank() if world_size() > 1 else 0


def all_agree(holds: bool, about: object) -> bool:
    """Whether something holds on every rank, and about the same thing.

    Args:
        holds: Whether it holds here.
        about: What it is about; compared by its `repr`.
    """
    if world_size() == 1:
        return holds
    fingerprint = zlib.crc32(repr(about).encode())
    mine = torch.tensor([holds, fingerprint, -fingerprint], device=device())
    torch.distributed.all_reduce(mine, torch.distributed.ReduceOp.MIN)
    everywhere, smallest, minus_largest = mine.tolist()
    return bool(everywhere) and smallest == -minus_largest


def extremes(*values: float) -> list[tuple[float, float]]:
    """Returns the smallest and the largest of each value over all ranks."""
    if world_size() == 1:
        return [(value, value) for value in values]
    both = torch.tensor(
        [values, [-value for value in values]], dtype=torch.float64, device=device()
    )
    torch.distributed.all_reduce(both, torch.distributed.ReduceOp.MIN)
    return [(low, -minus_high) for low, minus_high in zip(*both.tolist(), strict=True)]


def of_each_part(value: T, part: object) -> list[T]:
    """Returns one value for each part of a model, on all ranks.

    Of the ranks with the same part the lowest one's counts; rank 0's value comes first.

    Args:
        value: This rank's value.
        part: This rank's part; compared by its `repr`.
    """
    if world_size() == 1:
        return [value]
    mine = torch.tensor([zlib.crc32(repr(part).encode())], device=device())
    of_ranks = torch.empty(world_size(), dtype=mine.dtype, device=mine.device)
    torch.distributed.all_gather_into_tensor(of_ranks, mine)
    parts = of_ranks.tolist()
    values = []
    for speaker in [parts.index(one) for one in dict.fromkeys(parts)]:
        box = [value]
        torch.distributed.broadcast_object_list(box, src=speaker, device=device())
        values.append(box[0])
    return values


def device() -> torch.device:
    """Returns the device of tensors that ranks exchange."""
    if torch.distributed.get_backend() == "nccl":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")
