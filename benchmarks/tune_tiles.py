"""Finds the entries of `guardbit.kernels.tiles`: times candidates, kernel by kernel.

    PYTHONPATH=. python benchmarks/tune_tiles.py 64 128

Prints times, fastest first, and the largest relative difference from the present entry's result;
candidates that do not run are named last. Copy the winners by hand. Compilation runs in many
processes first, so that the timing process finds it done.
"""

from __future__ import annotations

import math
import os
import sys
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from operator import itemgetter

import torch
import triton

from benchmarks.common import inputs
from guardbit.kernels import tiles
from guardbit.kernels.device import backward, forward
from guardbit.kernels.tiles import Kernel, Tile

#: B, H, N by head dimension: GPT-2 small, longer contexts, and wider heads.
SHAPES = {64: [(32, 12, 1024), (8, 16, 4096)], 128: [(32, 16, 1024), (4, 16, 8192)]}
OTHER_SHAPE = [(8, 16, 2048)]

#: Rows, keys, warps and, to let more programs share a multiprocessor, registers.
SIZES: dict[Kernel, list[tuple[int, int, int, int | None]]] = {
    "query_gradients": [
        (64, 64, 4, None), (64, 64, 4, 128), (128, 64, 8, None), (128, 64, 8, 128),
        (128, 64, 4, None), (64, 128, 4, None), (128, 128, 8, None),
    ],
    "key_gradients": [
        (64, 64, 4, None), (64, 64, 4, 168), (32, 64, 4, None), (32, 64, 4, 168),
        (64, 64, 8, None), (64, 128, 8, None), (32, 128, 8, None), (128, 128, 8, None),
    ],
}  # fmt: skip
NARROW = [(64, 32, 4, None), (64, 32, 8, None), (128, 32, 8, None)]
SIZES["forward"] = [*SIZES["query_gradients"], *NARROW]
CANDIDATES = {
    kernel: [Tile(*size[:3], stages, size[3]) for size in sizes for stages in (2, 3)]
    for kernel, sizes in SIZES.items()
}

#: What runs with a pass's entries; an entry must serve them all.
STABILIZERS: dict[Kernel, list[str]] = {
    "forward": ["none", "compensated", "row_max"],
    "query_gradients": ["none", "compensated"],
    "key_gradients": ["none"],
}


def entries(kernel: Kernel) -> dict[int, Tile]:
    """What the launchers look up on this device, by padded head dimension."""
    table = tiles.TILES.setdefault(torch.cuda.get_device_capability(), dict(tiles.FALLBACK))
    return table[kernel]


def call(kernel: Kernel, tensors: list[torch.Tensor], name: str):
    """The forward, or the backward after it, as a function without arguments."""
    q, k, v, d_out = tensors
    options = {
        "causal": True, "scale": 1 / math.sqrt(q.shape[-1]), "stabilizers": [name] * q.shape[1],
    }  # fmt: skip
    if kernel == "forward":
        return lambda: forward.forward(q, k, v, **options)
    result = forward.forward(q, k, v, **options)
    return lambda: backward.backward(d_out, q, k, v, *result, **options)


def compile_one(job: tuple[Kernel, int, Tile, str]) -> str:
    """Compiles a candidate into Triton's cache on disk; returns what went wrong, or nothing."""
    kernel, width, tile, name = job
    entries(kernel)[width] = tile
    try:
        # As many rows as any tile divides and strides as at the shapes timed: one specialisation.
        call(kernel, inputs(1, 16, 16, 256, width), name)()
        torch.cuda.synchronize()
    except Exception as error:
        return f"{type(error).__name__}: {str(error)[-80:]}"
    return ""


def time_all(
    kernel: Kernel, tensors: list[torch.Tensor], name: str, candidates: list[Tile]
) -> None:
    """Prints the fastest candidates for one shape."""
    table, width = entries(kernel), tensors[0].shape[-1]
    before, rows = table[width], []
    expected = [x.clone() for x in call(kernel, tensors, name)() if x is not None]
    for tile in candidates:
        table[width] = tile
        run = call(kernel, tensors, name)
        error = max(
            ((x.double() - y.double()).norm() / y.double().norm()).item()
            for x, y in zip([x for x in run() if x is not None][:3], expected[:3], strict=False)
        )
        rows.append((triton.testing.do_bench(run, 5, 20, return_mode="median"), tile, error))
    table[width] = before
    print(f"D={width} {tuple(tensors[0].shape[:3])} {kernel} {name} (is {tuple(before)})")
    for time, tile, error in sorted(rows, key=itemgetter(0))[:6]:
        print(f"    {time:7.3f} ms  {tuple(tile)}  {error:.1e}", flush=True)


def main(widths: list[int]) -> None:
    """Times every candidate for these head dimensions."""
    jobs = [
        (kernel, width, tile, name)
        for width in widths
        for kernel, candidates in CANDIDATES.items()
        for tile in candidates
        for name in STABILIZERS[kernel]
    ]
    with ProcessPoolExecutor(os.cpu_count(), mp_context=get_context("spawn")) as pool:
        failures = dict(zip(jobs, pool.map(compile_one, jobs), strict=True))
    for width in widths:
        for batch, heads, rows in SHAPES.get(width, OTHER_SHAPE):
            tensors = inputs(batch, heads, heads, rows, width)
            for kernel, names in STABILIZERS.items():
                for name in names:
                    running = [
                        tile
                        for tile in CANDIDATES[kernel]
                        if not failures[kernel, width, tile, name]
                    ]
                    time_all(kernel, tensors, name, running)
    for (kernel, width, tile, name), why in failures.items():
        if why:
            print(f"does not run: {kernel} {width} {tuple(tile)} {name}: {why}")


if __name__ == "__main__":
    main([int(width) for width in sys.argv[1:]] or [64, 128])
