"""What benchmarks share: inputs, a clock, the machine that times hold for, and files of rows."""

from __future__ import annotations

import csv
import itertools
import subprocess
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
import triton
from torch import Tensor

Shape = tuple[int, int, int, int, int]

#: B, H, H_kv, N, D: a small batch; the four that all changes are measured at; grouped; long.
SHAPES: list[Shape] = [
    (8, 12, 12, 512, 64),
    (32, 12, 12, 1024, 64),
    (8, 16, 16, 4096, 64),
    (32, 16, 16, 1024, 128),
    (4, 16, 16, 8192, 128),
    (4, 32, 8, 4096, 128),
    (2, 16, 16, 16384, 128),
]


def inputs(batch: int, heads: int, kv_heads: int, rows: int, width: int) -> list[Tensor]:
    """q, k, v and d_out, BF16 (B, H, N, D) with heads adjacent in memory, as models have them."""
    generator = torch.Generator("cuda").manual_seed(0)
    return [
        torch.randn(batch, rows, count, width, generator=generator, device="cuda")
        .bfloat16()
        .transpose(1, 2)
        for count in (heads, kv_heads, kv_heads, heads)
    ]


def timed(step: Callable[[int], None], numbers: Iterable[int], device: torch.device) -> list[float]:
    """Runs steps one after the other; milliseconds of each, by the clock of the device."""
    marks: list[Any] = []

    def mark() -> None:
        cuda = device.type == "cuda"
        marks.append(torch.cuda.Event(enable_timing=True) if cuda else time.perf_counter())
        if cuda:
            marks[-1].record()

    for number in numbers:
        mark()
        step(number)
    mark()
    if device.type == "cpu":
        return [1000 * (b - a) for a, b in itertools.pairwise(marks)]
    torch.cuda.synchronize(device)
    return [a.elapsed_time(b) for a, b in itertools.pairwise(marks)]


def machine(device: str = "cuda") -> dict[str, str]:
    """What the times hold for."""
    versions = {
        "cuda": str(torch.version.cuda or ""), "torch": torch.__version__,
        "triton": triton.__version__,
    }  # fmt: skip
    if device == "cpu":
        return {"gpu": "", "driver": "", **versions}
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader", "--id=0"]
    driver = subprocess.run(query, capture_output=True, text=True, check=True).stdout.strip()
    return {"gpu": torch.cuda.get_device_name(), "driver": driver, **versions}


def write(path: str, rows: Sequence[Mapping[str, Any]], mode: str = "w") -> None:
    """Writes rows to a CSV file; with mode "a" adds them to it."""
    with open(path, mode, newline="") as file:
        writer = csv.DictWriter(file, rows[0], lineterminator="\n", restval="")
        if file.tell() == 0:
            writer.writeheader()
        writer.writerows(rows)
