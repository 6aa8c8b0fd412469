"""Shared by the launchers: memory layout, small device arrays, arguments of calls."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from functools import cache, lru_cache
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from guardbit.kernels import tiles
from guardbit.kernels.device.primitives import ADDITIVE, BOOLEAN, NO_MASK
from guardbit.kernels.mask import causal_shift, dense_mask, visible_range
from guardbit.kernels.spec import AttentionSpec
from guardbit.kernels.tensors import device_constant as device_constant
from guardbit.kernels.tiles import Kernel, Tile

# A scale of 0 would make NaN of the -inf of a masked score; the smallest normal number does not.
_SMALLEST_SCALE = 2.0**-126


def size_of_scale(scale: float) -> float:
    return max(abs(scale), _SMALLEST_SCALE)


@cache
def padded_width(head_dim: int) -> int:
    """Returns the power of two, at least 16, that kernels pad the head dimension to."""
    return max(16, triton.next_power_of_2(head_dim))


def rows_adjacent(x: Tensor) -> Tensor:
    """Returns x, or a copy, whose last dimension is contiguous."""
    return x if x.stride(-1) == 1 else x.contiguous()


def strides(*tensors: Tensor) -> tuple[tuple[int, ...], ...]:
    """Returns the strides of batch, head and row of each tensor."""
    return tuple(x.stride()[:3] for x in tensors)


def empty_like_rows(x: Tensor) -> Tensor:
    """Returns an empty tensor of x's shape and memory order, with a contiguous last dimension."""
    empty = torch.empty_like(x)
    return empty if empty.stride(-1) == 1 else empty.new_empty(x.shape)


def can_use_tma(x: Tensor) -> bool:
    """Whether TMA takes x `(B, H, M, D)`: not empty, address and strides multiples of 16 bytes."""
    unit = 16 // x.element_size()
    return (
        x.numel() > 0
        and x.data_ptr() % 16 == 0
        and x.stride(3) == 1
        and all(stride > 0 and stride % unit == 0 for stride in x.stride()[:3])
    )


def described(x: Tensor | None, example: TensorDescriptor) -> TensorDescriptor:
    """Returns a descriptor like that of a tensor laid out as x, without Triton's checks: 4 us."""
    made = object.__new__(TensorDescriptor)
    vars(made).update(vars(example), base=x)
    return made


def _kind(x: Any) -> Hashable:
    """Returns what Triton looks at of a tensor, or of the descriptor of one."""
    if isinstance(x, TensorDescriptor):
        return x.base.dtype, *x.block_shape
    return x.dtype, x.data_ptr() % 16


@lru_cache(maxsize=1024, typed=True)
def _compiled(*_: Hashable) -> list[Any]:
    """Returns a list, empty at first, of what Triton compiled for these: all it may do anew for."""
    return []


def run(
    kernel: Any,
    programs: int,
    tensors: tuple[Any, ...],
    strides: tuple[tuple[int, ...], ...],
    numbers: tuple[Any, ...],
    **constants: Any,
) -> Callable[[tuple[Any, ...]], None]:
    """Launches a kernel; returns what launches it with other tensors that are laid out alike."""
    # Triton's look at every argument takes longer than the rest, and so would the kernel's hash.
    known = _compiled(
        id(kernel), tensors[0].device, strides, *numbers, *constants.values(), *map(_kind, tensors)
    )

    def launch(tensors: tuple[Any, ...]) -> None:
        with torch.cuda.device_of(tensors[0]):
            if known:
                known[0][programs, 1, 1](*tensors, *known[1])
                return
            arguments = *strides, *numbers
            compiled = kernel[(programs,)](*tensors, *arguments, **constants)
        # The interpreter returns none, and on ROCm Triton looks at more.
        if compiled is not None and torch.version.hip is None:
            names = kernel.arg_names[len(tensors) + len(arguments) :]
            known[:] = compiled, (*arguments, *(constants[x] for x in names))

    launch(tensors)
    return launch


def tile_of(x: Tensor, width: int, kernel: Kernel) -> Tile:
    capability = tiles.capability(x.device) if x.is_cuda else None
    return tiles.tile(capability, width, kernel)


class Prepared(NamedTuple):
    """What kernels of any call need besides their tensors."""

    # What kernels load besides: the dense mask; the first key that each query sees and where its
    # keys end, INT32 (2, N); the sinks, FP32 (H,).
    loaded: tuple[Tensor, Tensor, Tensor]
    mask_strides: tuple[int, ...]  # its four strides, 0 where it broadcasts
    shift: int  # see `causal_shift`
    inner_scale: float  # factor of q k before the soft cap's tanh
    scale: float  # factor of the scores after it
    tile: Tile  # how a program works
    constants: dict[str, Any]  # Compile-time arguments and options


def prepare(spec: AttentionSpec, q: Tensor, v: Tensor, kernel: Kernel, unused: Tensor) -> Prepared:
    """Prepares a launch; `unused` is handed to kernels for what it does not ask for."""
    batch, num_heads, seqlen_q, head_dim = q.shape
    seqlen_k, value_dim = v.shape[2:]
    shape = (batch, num_heads, seqlen_q, seqlen_k)
    mask, mask_strides, kind = unused, (0, 0, 0, 0), NO_MASK.value
    if spec.mask is not None:
        mask = dense_mask(spec.mask, shape)
        mask_strides, kind = mask.stride(), ADDITIVE.value
        if mask.dtype == torch.bool:
            mask, kind = mask.view(torch.uint8), BOOLEAN.value
    ranges = unused
    if spec.is_ranged:
        ranges = torch.stack(visible_range(spec, shape, q.device))
    width, value_width = padded_width(head_dim), padded_width(value_dim)
    tile = tile_of(q, max(width, value_width), kernel)
    if kind != NO_MASK.value or spec.softcap > 0 or (kernel == "shadow" and spec.is_ranged):
        tile = tile.for_mask
    return Prepared(
        (mask, ranges, unused if spec.sinks is None else spec.sinks.float().contiguous()),
        mask_strides,
        causal_shift(spec.causal, seqlen_q, seqlen_k),
        spec.scale / spec.softcap if spec.softcap > 0 else 1.0,
        spec.softcap if spec.softcap > 0 else spec.scale,
        tile,
        {
            "CAUSAL": spec.causal is not False and not spec.is_ranged,
            "RANGED": spec.is_ranged,
            "SOFTCAP": spec.softcap > 0,
            "SINKS": spec.sinks is not None,
            "MASK": kind,
            "HEAD_DIM": head_dim,
            "WIDTH": width,
            "VALUE_DIM": value_dim,
            "VALUE_WIDTH": value_width,
            **tile.constants,
        },
    )
