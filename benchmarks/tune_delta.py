"""Times ways to run delta's kernel against cuDNN's forward, and checks each against plain torch.

    PYTHONPATH=. python benchmarks/tune_delta.py

For each shape (causal, BF16, all heads, delta and its carrier in one launch) prints the fastest
candidates with their time over that of cuDNN's forward in the same run; copy the winners into
`guardbit.kernels.tiles` by hand. Compilation runs in many processes first. With --delta-only no
carrier is written.
"""

from __future__ import annotations

import argparse
import math
import os
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from operator import itemgetter

import torch
import triton
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from guardbit.kernels import delta, forward, reference, tiles
from guardbit.kernels.spec import AttentionSpec
from guardbit.kernels.tiles import Tile

#: B, H, H_kv, N, D.
SHAPES = [
    (32, 12, 12, 1024, 64),
    (8, 16, 16, 4096, 64),
    (32, 16, 16, 1024, 128),
    (4, 16, 16, 8192, 128),
    (4, 32, 8, 4096, 128),
]

#: Rows, keys, warps, stages, registers, overlap.
CANDIDATES = [
    Tile(*sizes, overlap)
    for sizes in [
        (128, 64, 8, 2, None), (128, 64, 8, 3, None), (128, 64, 8, 4, None), (128, 64, 8, 3, 128),
        (128, 32, 8, 3, None), (128, 32, 8, 4, None), (64, 64, 4, 2, None), (64, 64, 4, 3, None),
        (64, 64, 4, 3, 168), (128, 128, 8, 2, None), (64, 128, 4, 2, None), (128, 64, 4, 3, None),
    ]
    for overlap in (False, True)
]  # fmt: skip

# FP32 sums in two orders, relative to sum |P dP|; what a wrong kernel is off by is not near it.
LARGEST_ERROR = 4e-6


def inputs(shape: tuple[int, ...]) -> list[torch.Tensor]:
    """d_out, q, k, v with heads adjacent in memory, as models have them."""
    batch, heads, kv_heads, rows, width = shape
    generator = torch.Generator("cuda").manual_seed(0)
    return [
        torch.randn((batch, rows, count, width), generator=generator, device="cuda")
        .bfloat16()
        .transpose(1, 2)
        for count in (heads, heads, kv_heads, kv_heads)
    ]


def table(width: int) -> dict[int, Tile]:
    """What the launcher looks up on this device."""
    found = tiles.TILES.setdefault(torch.cuda.get_device_capability(), dict(tiles.FALLBACK))
    return found["delta"]


def call(tensors: list[torch.Tensor], carry: bool):
    """The launch, as a function without arguments that returns delta; L; what is asked for."""
    d_out, q, k, v = tensors
    spec = AttentionSpec(1 / math.sqrt(q.shape[-1]), True)
    out, lse, _ = forward.forward(
        q, k, v, causal=True, scale=spec.scale, stabilizers=["none"] * q.shape[1]
    )
    settings = {"spec": spec, "heads": range(q.shape[1])}

    def run() -> torch.Tensor:
        if carry:
            return delta.carry_exact_delta(d_out, q, k, v, out, lse, **settings).delta
        return delta.exact_delta(d_out, q, k, v, lse, **settings)

    return run, lse, spec


def compile_one(job: tuple[int, Tile, bool]) -> str:
    """Compiles a candidate into Triton's cache on disk; returns what went wrong, or nothing."""
    width, tile, carry = job
    table(width)[width] = tile
    try:
        call(inputs((1, 16, 16, 256, width)), carry)[0]()
        torch.cuda.synchronize()
    except Exception as error:
        return f"{type(error).__name__}: {str(error)[-60:]}"
    return ""


def median(run) -> float:
    """Milliseconds of a call."""
    return triton.testing.do_bench(run, 10, 40, return_mode="median")


def time_shape(shape: tuple[int, ...], candidates: list[Tile], carry: bool, shown: int) -> None:
    """Prints the fastest candidates for one shape."""
    tensors = inputs(shape)
    d_out, q, k, v = tensors
    width = shape[-1]
    run, lse, spec = call(tensors, carry)
    # Two heads of one batch are enough for an oracle that keeps whole rows of P.
    some = [0, shape[1] - 1]
    small = [x[:1] for x in (*tensors, lse)]
    right = reference.exact_delta(*small, spec=spec, heads=some)
    size = d_out[:1, some].float().norm(dim=-1) * v.float().norm(dim=-1).mean()
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        q.requires_grad_()  # so that L is computed, as in training
        forward_time = median(
            lambda: scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        )
        q.requires_grad_(False)
    entries, rows = table(width), []
    before = entries[width]
    for tile in candidates:
        entries[width] = tile
        error = ((run()[:1, some] - right).abs() / size).max().item()
        rows.append((median(run), tile, error))
    entries[width] = before
    print(f"{shape} cuDNN's forward {forward_time:.3f} ms (is {tuple(before)})")
    for time, tile, error in sorted(rows, key=itemgetter(0))[:shown]:
        wrong = "" if error <= LARGEST_ERROR else "  WRONG"
        print(
            f"    {time:7.3f} ms {time / forward_time:5.2f}  {tuple(tile)}  {error:.0e}{wrong}",
            flush=True,
        )


def main() -> None:
    """Compiles, checks and times every candidate."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--delta-only", action="store_true", help="write no carrier")
    parser.add_argument("--shown", type=int, default=6, help="candidates printed a shape")
    arguments = parser.parse_args()
    carry = not arguments.delta_only
    jobs = sorted({(shape[-1], tile, carry) for shape in SHAPES for tile in CANDIDATES}, key=repr)
    workers = min(16, os.cpu_count() or 1)
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        failures = dict(zip(jobs, pool.map(compile_one, jobs), strict=True))
    for shape in SHAPES:
        running = [tile for tile in CANDIDATES if not failures[shape[-1], tile, carry]]
        time_shape(shape, running, carry, arguments.shown)
    for (width, tile, _), why in failures.items():
        if why:
            print(f"does not run: {width} {tuple(tile)}: {why}")


if __name__ == "__main__":
    main()
