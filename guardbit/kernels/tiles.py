"""Tile sizes, warps and pipeline depth of each kernel, by device and head dimension.

For sm_90, `benchmarks/tune_tiles.py` chose forward and gradients for head sizes 64 and 128, the
fastest on an H200, and the forward for 256. The other entries were chosen to need little local
memory. A device that is not listed gets `FALLBACK`, which fits 99 KiB of shared memory, the least
of any GPU since Ampere.
"""

from functools import cache
from typing import Any, Literal, NamedTuple, Self

import torch

Kernel = Literal["forward", "query_gradients", "key_gradients", "shadow", "audit", "delta"]


class Tile(NamedTuple):
    block_m: int  # queries a tile
    block_n: int  # keys a tile
    num_warps: int  # warps of 32 threads
    num_stages: int  # tiles in flight: the depth of the software pipeline
    max_registers: int | None = None  # most registers a thread may use; None for no limit
    # For delta only: whether a tile's second product runs while its exponentials are computed,
    # which takes registers.
    overlap: bool = False
    # For delta only: whether Hopper's copy engine loads keys and values, from descriptors of their
    # tensors. That saves registers and address arithmetic.
    use_tma: bool = False

    @property
    def options(self) -> dict[str, int | None]:
        return {
            "num_warps": self.num_warps,
            "num_stages": self.num_stages,
            "maxnreg": self.max_registers,
            "enable_fp_fusion": True,  # said, so that all versions of Triton fuse the same sums
        }

    @property
    def constants(self) -> dict[str, int | None]:
        return {"BLOCK_M": self.block_m, "BLOCK_N": self.block_n, **self.options}

    @property
    def for_dropout(self) -> Self:
        """The same without a register limit: drawing the dropout mask needs more."""
        return self._replace(max_registers=None)

    @property
    def for_mask(self) -> Self:
        """The same with one tile fewer in flight, no overlap and no TMA, for a dense mask."""
        return self._replace(
            max_registers=None, num_stages=max(1, self.num_stages - 1), overlap=False, use_tma=False
        )


def _by_width(*tiles: tuple[Any, ...]) -> dict[int, Tile]:
    """Returns the tiles of a kernel for head dimensions padded to 16, 32, 64, 128 and 256."""
    return {width: Tile(*tile) for width, tile in zip((16, 32, 64, 128, 256), tiles, strict=True)}


FALLBACK: dict[Kernel, dict[int, Tile]] = {
    "forward": _by_width(
        (64, 64, 8, 2), (64, 64, 4, 2), (64, 64, 8, 2), (64, 32, 8, 2), (32, 16, 8, 1)
    ),
    "query_gradients": _by_width(
        (64, 32, 4, 2), (64, 32, 4, 2), (64, 32, 4, 2), (32, 32, 4, 2), (32, 32, 8, 1)
    ),
    "key_gradients": _by_width(
        (64, 64, 8, 2), (64, 64, 8, 2), (64, 32, 8, 2), (32, 32, 4, 2), (32, 32, 8, 1)
    ),
    "shadow": _by_width(
        (64, 64, 4, 2), (64, 64, 4, 2), (64, 32, 4, 2), (32, 64, 8, 2), (32, 32, 8, 1)
    ),
    "audit": _by_width(
        (64, 32, 4, 2), (64, 32, 8, 2), (32, 32, 4, 2), (32, 32, 4, 1), (16, 32, 8, 1)
    ),
    "delta": _by_width(
        (64, 64, 4, 2), (64, 64, 4, 2), (64, 64, 4, 2), (64, 32, 8, 2), (32, 64, 8, 1)
    ),
}

#: By compute capability, then pass, then padded head dimension.
TILES: dict[tuple[int, int], dict[Kernel, dict[int, Tile]]] = {
    (9, 0): {
        "forward": _by_width(
            (64, 64, 4, 3), (64, 64, 4, 3), (64, 64, 4, 3, 128), (64, 64, 4, 3), (64, 32, 4, 2)
        ),
        "query_gradients": _by_width(
            (64, 64, 4, 3), (64, 64, 4, 3), (128, 64, 4, 3), (128, 64, 8, 3), (64, 32, 8, 3)
        ),
        "key_gradients": _by_width(
            (64, 64, 4, 3), (64, 64, 4, 3), (64, 64, 4, 3), (32, 64, 4, 3), (32, 64, 8, 3)
        ),
        "shadow": _by_width(
            (64, 64, 4, 3, 128),
            (64, 64, 4, 3, 128),
            (64, 64, 4, 3, 168),
            (128, 64, 8, 3),
            (128, 64, 8, 2),
        ),
        "audit": _by_width(
            (64, 32, 4, 2), (64, 32, 4, 2), (64, 32, 4, 2), (32, 32, 4, 1), (16, 32, 8, 1)
        ),
        "delta": _by_width(
            (128, 64, 8, 3),
            (128, 64, 8, 3),
            Tile(64, 64, 4, 3, 168, use_tma=True),
            Tile(128, 64, 8, 4, None, True, use_tma=True),
            (64, 64, 8, 2),
        ),
    },
}

# Blackwell's data centre GPUs, untuned: the fallback, but for entries that would spill there.
TILES[10, 0] = {
    **FALLBACK,
    "forward": {**FALLBACK["forward"], 64: Tile(64, 64, 4, 2), 256: Tile(64, 16, 8, 2)},
}


@cache
def capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device)


def tile(capability: tuple[int, int] | None, width: int, kernel: Kernel) -> Tile:
    return TILES.get(capability or (0, 0), FALLBACK)[kernel][width]
