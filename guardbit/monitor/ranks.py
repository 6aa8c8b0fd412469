"""What the ranks of a distributed run tell each other; a single process talks to nobody."""

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
    mine = torch.tensor([holds, fingerprint, -fingerprint], device=_device())
    torch.distributed.all_reduce(mine, torch.distributed.ReduceOp.MIN)
    everywhere, smallest, minus_largest = mine.tolist()
    return bool(everywhere) and smallest == -minus_largest


def of_rank_zero(value: T) -> T:
    """Rank 0's value, on all ranks."""
    if world_size() == 1:
        return value
    box = [value]
    torch.distributed.broadcast_object_list(box, device=_device())
    return box[0]


def _device() -> torch.device:
    if torch.distributed.get_backend() == "nccl":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")
