"""Times ways to run delta's kernel against cuDNN's forward, and checks each against plain torch.

    PYTHONPATH=. python benchmarks/tune_delta.py

All heads, causal, BF16. Candidates differ in tile, warps, depth of the pipeline, registers, overlap
of a tile's products with the exponentials of the tile before, and in how keys come in: by addresses
or by descriptors. Compilation runs in many processes first, each candidate once for a head size.
For each shape prints the fastest with their times, delta and carrier in one launch, over that of
cuDNN's forward in the same run. Last come three short tables: the fastest of each shape, the time
of delta alone and of the carrier on top of it, and for each head size the entry that is the
fastest over all its shapes, to be copied into `guardbit.kernels.tiles` by hand.
"""

from __future__ import annotations

import argparse
import math
import os
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from statistics import geometric_mean
from time import monotonic
from typing import NamedTuple

import torch
import triton
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from benchmarks.common import SHAPES, inputs
from guardbit.kernels import reference, tiles
from guardbit.kernels.device import delta, forward
from guardbit.kernels.spec import AttentionSpec
from guardbit.kernels.tiles import Tile

#: By head size: rows, keys, warps, stages, registers. Each with and without overlap, and with keys
#: by addresses and by descriptors.
SIZES = {
    64: [
        (128, 64, 8, 3, None), (128, 64, 8, 3, 128), (128, 64, 8, 4, 128), (128, 128, 8, 2, None),
        (64, 64, 4, 3, 168), (64, 64, 4, 3, 128), (64, 128, 4, 2, None), (256, 64, 16, 3, None),
    ],
    128: [
        (128, 64, 8, 3, None), (128, 64, 8, 4, None), (128, 64, 8, 2, None),
        (128, 128, 8, 2, None), (64, 64, 4, 2, None), (64, 128, 4, 2, None),
        (256, 64, 16, 2, None), (128, 32, 8, 4, None),
    ],
}  # fmt: skip
CANDIDATES = {
    width: [
        Tile(*size, overlap, use_tma)
        for size in sizes
        for overlap in (False, True)
        for use_tma in (False, True)
    ]
    for width, sizes in SIZES.items()
}

# FP32 sums in two orders, relative to sum |P dP|; what a wrong kernel is off by is not near it.
LARGEST_ERROR = 4e-6


def table(width: int) -> dict[int, Tile]:
    """What the launcher looks up on this device."""
    found = tiles.TILES.setdefault(torch.cuda.get_device_capability(), dict(tiles.FALLBACK))
    return found["delta"]


def call(tensors: list[torch.Tensor], carry: bool):
    """The launch, as a function without arguments that returns delta; L; what is asked for."""
    q, k, v, d_out = tensors
    spec = AttentionSpec(1 / math.sqrt(q.shape[-1]), True)
    out, lse, _ = forward.forward(
        q, k, v, causal=True, scale=spec.scale, stabilizers=["none"] * q.shape[1]
    )
    settings = {"spec": spec, "head_ids": range(q.shape[1])}

    def run() -> torch.Tensor:
        if carry:
            return delta.carry_exact_delta(d_out, q, k, v, out, lse, **settings).delta
        return delta.exact_delta(d_out, q, k, v, lse, **settings)

    return run, lse, spec


def compile_one(job: tuple[int, Tile]) -> str:
    """Compiles a candidate into Triton's cache on disk; returns what went wrong, or nothing."""
    width, tile = job
    table(width)[width] = tile
    try:
        for carry in (True, False):
            call(inputs(1, 16, 16, 256, width), carry)[0]()
        torch.cuda.synchronize()
    except Exception as error:
        return f"{type(error).__name__}: {str(error)[-60:]}"
    return ""


def median(run) -> float:
    """Milliseconds of a call."""
    return triton.testing.do_bench(run, 5, 30, return_mode="median")


class Found(NamedTuple):
    """Times of one shape, in milliseconds.

    Attributes:
        forward: Of cuDNN's forward.
        tiles: Of delta and its carrier, by candidate; wrong ones are left out.
        alone: Of delta without carrier, by candidate, of the fastest.
        usual: The entry that is used now.
    """

    forward: float
    tiles: dict[Tile, float]
    alone: dict[Tile, float]
    usual: Tile


def time_shape(shape: tuple[int, ...], candidates: list[Tile], shown: int) -> Found:
    """Times all candidates at one shape and prints the fastest."""
    tensors = inputs(*shape)
    q, k, v, d_out = tensors
    width = shape[-1]
    run, lse, spec = call(tensors, True)
    run_alone = call(tensors, False)[0]
    # Two heads of one batch are enough for an oracle that keeps whole rows of P.
    some = [0, shape[1] - 1]
    small = [x[:1] for x in (d_out, q, k, v, lse)]
    right = reference.exact_delta(*small, spec=spec, head_ids=some)
    size = d_out[:1, some].float().norm(dim=-1) * v.float().norm(dim=-1).mean()
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        q.requires_grad_()  # so that L is computed, as in training
        forward_time = median(
            lambda: scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        )
        q.requires_grad_(False)
    entries, times = table(width), {}
    before = entries[width]
    for tile in candidates:
        entries[width] = tile
        error = ((run()[:1, some] - right).abs() / size).max().item()
        if error <= LARGEST_ERROR:
            times[tile] = median(run)
        else:
            print(f"WRONG: {shape} {tuple(tile)}: {error:.0e}", flush=True)
    best = sorted(times, key=times.__getitem__)[:shown]
    alone = {}
    for tile in {*best[:2], before}:
        entries[width] = tile
        alone[tile] = median(run_alone)
        times.setdefault(tile, median(run))
    entries[width] = before
    print(f"{shape} cuDNN's forward {forward_time:.3f} ms")
    for tile in best:
        print(f"    {times[tile]:7.3f} ms {times[tile] / forward_time:5.2f}  {tuple(tile)}")
    return Found(forward_time, times, alone, before)


def main() -> None:
    """Compiles, checks and times every candidate."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shown", type=int, default=6, help="candidates printed a shape")
    arguments = parser.parse_args()
    began = monotonic()
    jobs = [(width, tile) for width, chosen in CANDIDATES.items() for tile in chosen]
    # An illegal access spoils its whole process: the likelier ones come last.
    jobs.sort(key=lambda job: job[1].use_tma)
    workers = min(16, os.cpu_count() or 1)
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        failures = dict(zip(jobs, pool.map(compile_one, jobs), strict=True))
    print(f"compiled in {monotonic() - began:.0f} s", flush=True)
    for (width, tile), why in failures.items():
        if why:
            print(f"does not run: {width} {tuple(tile)}: {why}")
    found = {}
    for shape in SHAPES[1:6]:
        running = [tile for tile in CANDIDATES[shape[-1]] if not failures[shape[-1], tile]]
        found[shape] = time_shape(shape, running, arguments.shown)
    print("\nshape: delta alone and with its carrier over cuDNN's forward; the entry now, the best")
    for shape, times in found.items():
        best = min(times.tiles, key=times.tiles.__getitem__)
        cells = [
            f"{times.alone[tile] / times.forward:.2f} {times.tiles[tile] / times.forward:.2f}"
            f" {tuple(tile)}"
            for tile in (times.usual, best)
        ]
        print(f"{shape}: {'; '.join(cells)}")
    print("\nhead size: geometric mean over its shapes of the time over cuDNN's forward")
    for width, chosen in CANDIDATES.items():
        shapes = [times for shape, times in found.items() if shape[-1] == width]
        means = {
            tile: geometric_mean([times.tiles[tile] / times.forward for times in shapes])
            for tile in chosen
            if all(tile in times.tiles for times in shapes)
        }
        for tile in sorted(means, key=means.__getitem__)[:4]:
            print(f"{width}: {means[tile]:.3f} {tuple(tile)}")
    print(f"{monotonic() - began:.0f} s in all")


if __name__ == "__main__":
    main()
