"""Finds the entries of `guardbit.kernels.tiles`: times candidates, kernel by kernel.

    PYTHONPATH=. python benchmarks/tune_tiles.py 64 128 --kernels delta

Prints times, fastest first, and the largest relative difference from the present entry's result;
then for each kernel and head size the entries that are the fastest over all shapes, and the
candidates that do not run. Copy the winners by hand. Compilation runs in many processes first, so
that the timing process finds it done.
"""

from __future__ import annotations

import argparse
import math
import os
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from operator import itemgetter
from statistics import geometric_mean

import torch
import triton
from torch import Tensor

from benchmarks.common import SHAPES, Shape, inputs
from guardbit.kernels import tiles
from guardbit.kernels.device import backward, delta, forward
from guardbit.kernels.spec import AttentionSpec
from guardbit.kernels.tiles import Kernel, Tile

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
#: Of delta with stages, then registers; each with and without overlap and TMA, which comes last: an
#: illegal access spoils its whole process.
DELTA_SIZES: list[tuple[int, int, int, int, int | None]] = [
    (128, 64, 8, 2, None), (128, 64, 8, 3, None), (128, 64, 8, 4, None), (128, 64, 8, 3, 128),
    (128, 64, 8, 4, 128), (128, 128, 8, 2, None), (128, 32, 8, 4, None), (64, 64, 4, 2, None),
    (64, 64, 4, 3, 128), (64, 64, 4, 3, 168), (64, 128, 4, 2, None), (256, 64, 16, 2, None),
    (256, 64, 16, 3, None),
]  # fmt: skip
CANDIDATES["delta"] = [
    Tile(*size, overlap, use_tma)
    for use_tma in (False, True)
    for overlap in (False, True)
    for size in DELTA_SIZES
]

#: What runs with a kernel's entries: stabilizers, and delta alone and in O'.
USES: dict[Kernel, list[str]] = {
    "forward": ["none", "compensated", "row_max"],
    "query_gradients": ["none", "compensated"],
    "key_gradients": ["none"],
    "delta": ["alone", "carried"],
}
Job = tuple[Kernel, int, Tile, str]


def entries(kernel: Kernel) -> dict[int, Tile]:
    """What the launchers look up on this device, by padded head dimension."""
    table = tiles.TILES.setdefault(torch.cuda.get_device_capability(), dict(tiles.FALLBACK))
    return table[kernel]


def call(kernel: Kernel, tensors: list[Tensor], use: str) -> Callable[[], Iterable[Tensor | None]]:
    """The kernel, with the forward before it done, as a function without arguments."""
    q, k, v, d_out = tensors
    heads = range(q.shape[1])
    spec = AttentionSpec(1 / math.sqrt(q.shape[-1]), True)
    stabilizers = ["none" if kernel == "delta" else use] * len(heads)
    options = {"causal": True, "scale": spec.scale, "stabilizers": stabilizers}
    if kernel == "forward":
        return lambda: forward.forward(q, k, v, **options)
    result = forward.forward(q, k, v, **options)
    if kernel != "delta":
        return lambda: backward.backward(d_out, q, k, v, *result, **options)
    out, lse, _ = result
    delta._plans.clear()  # plans hold the tile
    if use == "alone":
        return lambda: (delta.exact_delta(d_out, q, k, v, lse, spec=spec, head_ids=heads),)
    return lambda: delta.carry_exact_delta(d_out, q, k, v, out, lse, spec=spec, head_ids=heads)


def compile_one(job: Job) -> str:
    """Compiles a candidate into Triton's cache on disk; returns what went wrong, or nothing."""
    kernel, width, tile, use = job
    entries(kernel)[width] = tile
    try:
        # As many rows as any tile divides and strides as at the shapes timed: one specialisation.
        call(kernel, inputs(1, 16, 16, 256, width), use)()
        torch.cuda.synchronize()
    except Exception as error:
        return f"{type(error).__name__}: {str(error)[-80:]}"
    return ""


def time_all(kernel: Kernel, shape: Shape, use: str, candidates: list[Tile]) -> dict[Tile, float]:
    """Prints the fastest candidates for one shape; returns all times over the present entry's."""
    tensors, table, width = inputs(*shape), entries(kernel), shape[-1]
    before, rows = table[width], []
    expected = [x.clone() for x in call(kernel, tensors, use)() if x is not None]
    for tile in dict.fromkeys([before, *candidates]):
        table[width] = tile
        run = call(kernel, tensors, use)
        error = max(
            ((x.double() - y.double()).norm() / y.double().norm()).item()
            for x, y in zip([x for x in run() if x is not None][:3], expected[:3], strict=False)
        )
        rows.append((triton.testing.do_bench(run, 5, 20, return_mode="median"), tile, error))
    table[width] = before
    print(f"{shape} {kernel} {use} (is {tuple(before)})")
    for time, tile, error in sorted(rows, key=itemgetter(0))[:6]:
        print(f"    {time:7.3f} ms  {tuple(tile)}  {error:.1e}", flush=True)
    return {tile: time / rows[0][0] for time, tile, _ in rows}


def main() -> None:
    """Times every candidate for the head sizes and kernels of the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("widths", type=int, nargs="*", default=[64, 128])
    parser.add_argument("--kernels", choices=list(USES), nargs="+", default=list(USES))
    options = parser.parse_args()
    jobs: list[Job] = [
        (kernel, width, tile, use)
        for kernel in options.kernels
        for tile in CANDIDATES[kernel]
        for width in options.widths
        for use in USES[kernel]
    ]
    workers = min(16, os.cpu_count() or 1)
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        failures = dict(zip(jobs, pool.map(compile_one, jobs), strict=True))
    for kernel in options.kernels:
        for width in options.widths:
            running = [
                tile
                for tile in CANDIDATES[kernel]
                if not any(failures[kernel, width, tile, use] for use in USES[kernel])
            ]
            shapes = [shape for shape in SHAPES[1:6] if shape[-1] == width]
            found = [
                time_all(kernel, shape, use, running)
                for shape in shapes or [(8, 16, 16, 2048, width)]
                for use in USES[kernel]
            ]
            means = {tile: geometric_mean(times[tile] for times in found) for tile in found[0]}
            print(f"{kernel}, head size {width}: time over the present entry's, all shapes")
            for tile in sorted(means, key=means.__getitem__)[:4]:
                print(f"    {means[tile]:.3f}  {tuple(tile)}", flush=True)
    for (kernel, width, tile, use), why in failures.items():
        if why:
            print(f"does not run: {kernel} {width} {tuple(tile)} {use}: {why}")


if __name__ == "__main__":
    main()
