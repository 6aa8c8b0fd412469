"""Finds the entries of `guardbit.kernels.tiles`: times candidates, kernel by kernel.

    PYTHONPATH=. python benchmarks/tune_tiles.py 64 128

Candidates that are wrong or do not fit are dropped. Prints a table, fastest first; copy the winners
by hand. Compilation runs in many processes first, so that the timing process finds it done.
"""

from __future__ import annotations

import math
import os
import sys
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import torch
import triton

from guardbit.kernels import backward, forward, tiles
from guardbit.kernels.tiles import Pass, Tile

#: B, H, N by head dimension: GPT-2 small, longer contexts, and wider heads.
SHAPES = {64: [(32, 12, 1024), (8, 16, 4096)], 128: [(32, 16, 1024), (4, 16, 8192)]}
OTHER_SHAPE = [(8, 16, 2048)]

CANDIDATES: dict[Pass, list[Tile]] = {
    "forward": [
        Tile(rows, keys, warps, stages)
        for rows, keys, warps in [
            (128, 128, 8), (128, 64, 8), (128, 128, 4), (128, 64, 4), (64, 64, 4), (64, 128, 4),
            (64, 32, 4), (128, 32, 8), (64, 64, 8),
        ]
        for stages in (1, 2, 3, 4)
    ],
    "query_gradients": [
        Tile(rows, keys, warps, stages)
        for rows, keys, warps in [
            (128, 128, 8), (128, 64, 8), (64, 128, 4), (64, 64, 4), (128, 64, 4), (128, 32, 8),
            (64, 32, 4), (64, 64, 8),
        ]
        for stages in (1, 2, 3)
    ],
    "key_gradients": [
        Tile(rows, keys, warps, stages)
        for rows, keys, warps in [
            (128, 128, 8), (64, 128, 8), (64, 64, 4), (128, 64, 4), (64, 128, 4), (32, 128, 8),
            (32, 128, 4), (32, 64, 4), (64, 64, 8), (32, 64, 8),
        ]
        for stages in (1, 2, 3)
    ],
}  # fmt: skip


def inputs(batch: int, heads: int, rows: int, width: int) -> list[torch.Tensor]:
    """q, k, v and d_out, (B, H, N, D) with heads adjacent in memory, as models have them."""
    generator = torch.Generator("cuda").manual_seed(0)
    shape = (batch, rows, heads, width)
    return [
        torch.randn(shape, generator=generator, device="cuda").bfloat16().transpose(1, 2)
        for _ in range(4)
    ]


def install(kernel: Pass, width: int, tile: Tile) -> None:
    """Makes the launchers use a candidate."""
    tiles.TILES[torch.cuda.get_device_capability()][kernel][width] = tile


def call(kernel: Pass, tensors: list[torch.Tensor], name: str):
    """The forward, or the backward after it, as a function without arguments."""
    q, k, v, d_out = tensors
    options = {
        "causal": True, "scale": 1 / math.sqrt(q.shape[-1]), "stabilizers": [name] * q.shape[1],
    }  # fmt: skip
    if kernel == "forward":
        return lambda: forward.forward(q, k, v, **options)
    result = forward.forward(q, k, v, **options)
    return lambda: backward.backward(d_out, q, k, v, *result, **options)


def compile_one(job: tuple[Pass, int, Tile, str]) -> str:
    """Compiles a candidate into Triton's cache on disk; returns what went wrong, or nothing."""
    kernel, width, tile, name = job
    table = tiles.TILES[torch.cuda.get_device_capability()][kernel]
    before = table[width]
    install(kernel, width, tile)
    try:
        # As many rows as any tile divides and strides as at the shapes timed: one specialisation.
        call(kernel, inputs(1, 16, 256, width), name)()
        torch.cuda.synchronize()
    except Exception as error:
        return f"{type(error).__name__}: {str(error)[-80:]}"
    finally:
        table[width] = before
    return ""


def main(widths: list[int], names: list[str]) -> None:
    """Times every candidate for these head dimensions; the forward with each stabilizer."""
    jobs = [
        (kernel, width, tile, name)
        for width in widths
        for kernel in tiles.PASSES
        for tile in CANDIDATES[kernel]
        for name in (names if kernel == "forward" else names[:1])
    ]
    with ProcessPoolExecutor(os.cpu_count(), mp_context=get_context("spawn")) as pool:
        failures = dict(zip(jobs, pool.map(compile_one, jobs), strict=True))
    for width in widths:
        for shape in SHAPES.get(width, OTHER_SHAPE):
            tensors = inputs(*shape, width)
            expected: dict[Pass, list[torch.Tensor]] = {}
            for kernel in tiles.PASSES:
                table = tiles.TILES[torch.cuda.get_device_capability()][kernel]
                before = table[width]
                for name in names if kernel == "forward" else names[:1]:
                    rows = []
                    for tile in CANDIDATES[kernel]:
                        if failures[kernel, width, tile, name]:
                            continue
                        install(kernel, width, tile)
                        run = call(kernel, tensors, name)
                        got = [x for x in run() if x is not None]
                        reference = expected.setdefault(kernel, [x.clone() for x in got])
                        error = max(
                            ((x - y).norm() / y.norm()).item()
                            for x, y in zip(got[:3], reference[:3], strict=False)
                        )
                        time = triton.testing.do_bench(run, 5, 20, return_mode="median")
                        rows.append((time, tuple(tile), f"{error:.1e}"))
                    if not rows:
                        continue
                    rows.sort()
                    table[width] = Tile(*rows[0][1])
                    print(f"D={width} {shape} {kernel} {name} (was {tuple(before)})")
                    for time, tile, error in rows[:6]:
                        print(f"    {time:7.3f} ms  {tile}  {error}", flush=True)
    dropped = [f"{job[0]} {job[1]} {tuple(job[2])}: {why}" for job, why in failures.items() if why]
    print(f"{len(dropped)} candidates do not run", *sorted(set(d[-60:] for d in dropped))[:4])


if __name__ == "__main__":
    main([int(width) for width in sys.argv[1:]] or [64, 128], ["none", "compensated"])
