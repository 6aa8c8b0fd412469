"""A run of two processes, with gloo on the CPU."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist


def on_two(folder: Path, run: Callable[[int], Any]) -> Any:
    """Runs a function on two ranks, each a fork of this process; returns what rank 0 returns.

    The second one ends without a word; what it raises is its own.
    """
    folder.mkdir(parents=True, exist_ok=True)
    child = os.fork()
    rank = int(child == 0)
    try:
        dist.init_process_group(
            "gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=2
        )
        found = run(rank)
    except BaseException:
        if rank == 0:
            os.kill(child, signal.SIGKILL)  # it would wait for this one
            os.waitpid(child, 0)
        raise
    finally:
        if rank:
            os._exit(0)
    os.waitpid(child, 0)
    return found


def average(parameters: Any) -> None:
    """Averages gradients over the ranks, as DDP does."""
    for parameter in parameters:
        dist.all_reduce(parameter.grad)
        parameter.grad /= torch.distributed.get_world_size()
