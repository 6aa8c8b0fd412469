"""Tile sizes, warps and pipeline depth of each kernel, by device and head dimension.

The entries are measured (see benchmarks/attention.py), never tuned in a user's first step. A device
that is not listed gets `FALLBACK`, which fits 99 KiB of shared memory, the least of any GPU since
Ampere (CUDA C++ Programming Guide, table of technical specifications per compute capability).
"""

from __future__ import annotations

from typing import Literal, NamedTuple

Pass = Literal["forward", "query_gradients", "key_gradients"]
PASSES: tuple[Pass, ...] = ("forward", "query_gradients", "key_gradients")


class Tile(NamedTuple):
    """How one program of a kernel works.

    Attributes:
        rows: Queries a tile; divides ROW_PADDING.
        keys: Keys a tile.
        warps: Warps of 32 threads.
        stages: Tiles in flight: the depth of the software pipeline.
    """

    rows: int
    keys: int
    warps: int
    stages: int


#: Row statistics are padded to a multiple of this, so that kernels read them without bounds.
ROW_PADDING = 128

#: By compute capability, then pass, then padded head dimension.
TILES: dict[tuple[int, int], dict[Pass, dict[int, Tile]]] = {
    (8, 0): {
        "forward": {
            16: Tile(64, 64, 4, 3),
            32: Tile(64, 64, 4, 3),
            64: Tile(64, 64, 4, 3),
            128: Tile(128, 64, 8, 3),
            256: Tile(64, 32, 8, 2),
        },
        "query_gradients": {
            16: Tile(128, 32, 4, 3),
            32: Tile(128, 32, 4, 3),
            64: Tile(64, 32, 4, 3),
            128: Tile(64, 64, 8, 2),
            256: Tile(64, 32, 8, 1),
        },
        "key_gradients": {
            16: Tile(32, 64, 4, 3),
            32: Tile(32, 64, 4, 3),
            64: Tile(32, 64, 4, 2),
            128: Tile(32, 64, 8, 2),
            256: Tile(32, 32, 8, 1),
        },
    },
    (9, 0): {
        "forward": {
            16: Tile(64, 64, 4, 3),
            32: Tile(64, 64, 4, 3),
            64: Tile(64, 64, 4, 3),
            128: Tile(128, 128, 8, 3),
            256: Tile(128, 64, 8, 2),
        },
        "query_gradients": {
            16: Tile(64, 64, 4, 3),
            32: Tile(64, 64, 4, 3),
            64: Tile(64, 64, 4, 3),
            128: Tile(128, 128, 8, 2),
            256: Tile(128, 32, 8, 3),
        },
        "key_gradients": {
            16: Tile(64, 64, 4, 3),
            32: Tile(64, 64, 4, 3),
            64: Tile(64, 64, 4, 3),
            128: Tile(32, 64, 4, 3),
            256: Tile(32, 64, 8, 3),
        },
    },
}

FALLBACK: dict[Pass, dict[int, Tile]] = {
    "forward": {
        16: Tile(64, 64, 4, 2),
        32: Tile(64, 64, 4, 2),
        64: Tile(64, 64, 4, 2),
        128: Tile(64, 32, 4, 2),
        256: Tile(32, 32, 4, 1),
    },
    "query_gradients": {
        16: Tile(64, 32, 4, 2),
        32: Tile(64, 32, 4, 2),
        64: Tile(64, 32, 4, 2),
        128: Tile(32, 32, 4, 2),
        256: Tile(32, 32, 8, 1),
    },
    "key_gradients": {
        16: Tile(32, 64, 4, 2),
        32: Tile(32, 64, 4, 2),
        64: Tile(32, 64, 4, 2),
        128: Tile(32, 32, 4, 2),
        256: Tile(32, 32, 8, 1),
    },
}


def tile(capability: tuple[int, int] | None, width: int, kernel: Pass) -> Tile:
    """Looks up how a kernel works on a device.

    Args:
        capability: Compute capability, (major, minor); None for no GPU.
        width: Padded head dimension: 16, 32, 64, 128 or 256.
        kernel: One of `PASSES`.

    Returns:
        The device's entry, or that of `FALLBACK`.
    """
    return TILES.get(capability or (0, 0), FALLBACK)[kernel][width]
