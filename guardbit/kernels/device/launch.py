"""Shared by the launchers: memory layout, small device arrays, arguments of calls."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from functools import cache, lru_cache
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from guardbit.kernels import tiles
from guardbit.kernels.device.primitives import ADDITIVE, BOOLEAN, NO_MASK
from guardbit.kernels.mask import causal_shift, dense_mask, visible_range
from guardbit.kernels.spec import AttentionSpec, Causal
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


class Layout(NamedTuple):
    """All that a launch depends on of a tensor, its device apart."""

    dtype: torch.dtype
    shape: torch.Size
    strides: tuple[int, ...]
    misaligned: int  # its address modulo 16


def layout(x: Tensor) -> tuple[Any, ...]:
    """Returns a `Layout` as a plain tuple, which takes the host half the time to make."""
    return x.dtype, x.shape, x.stride(), x.data_ptr() % 16


def can_use_tma(x: Layout) -> bool:
    """Whether TMA takes x `(B, H, M, D)`: not empty, address and strides multiples of 16 bytes."""
    *strides, last = x.strides
    unit = 16 // x.dtype.itemsize
    is_aligned = x.misaligned == 0 and all(n > 0 and n % unit == 0 for n in strides)
    return is_aligned and last == 1 and x.shape.numel() > 0


def descriptor(x: Layout, block: Sequence[int]) -> TensorDescriptor:
    """Returns a TMA descriptor, checked by Triton, as an example for `described`."""
    base = torch.empty_strided(x.shape, x.strides, dtype=x.dtype, device="meta")
    return TensorDescriptor(base, [*x.shape], [*x.strides], [*block])


def described(x: Tensor, example: TensorDescriptor) -> TensorDescriptor:
    """Returns x's descriptor, like the example of its layout: Triton's checks take 4 us."""
    made = object.__new__(TensorDescriptor)
    vars(made).update(vars(example), base=x)
    return made


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
) -> None:
    kinds = ((x.dtype, x.data_ptr() % 16) for x in tensors)
    # Triton's look at every argument takes longer than the rest, and so would the kernel's hash.
    known = _compiled(id(kernel), tensors[0].device, strides, *numbers, *constants.values(), *kinds)
    start(kernel, Plan(programs, (*strides, *numbers), constants, known), tensors)


class Plan(NamedTuple):
    """All of a launch but its tensors: the same for all that are laid out alike."""

    programs: int
    strides_and_numbers: tuple[Any, ...]
    constants: dict[str, Any]  # Compile-time arguments and options
    known: list[Any]  # see `_compiled`


def start(kernel: Any, plan: Plan, tensors: tuple[Any, ...]) -> None:
    device = tensors[0].get_device()  # -1 on the CPU
    if device >= 0 and device != torch.cuda.current_device():
        with torch.cuda.device(device):
            return start(kernel, plan, tensors)
    arguments = *tensors, *plan.strides_and_numbers
    if plan.known:
        compiled, *constants = plan.known
        compiled[plan.programs, 1, 1](*arguments, *constants)
        return
    compiled = kernel[(plan.programs,)](*arguments, **plan.constants)
    # The interpreter returns none, and on ROCm Triton looks at more.
    if compiled is not None and torch.version.hip is None:
        rest = kernel.arg_names[len(arguments) :]
        plan.known[:] = compiled, *(plan.constants[name] for name in rest)


def tile_of(device: torch.device, width: int, kernel: Kernel) -> Tile:
    capability = tiles.capability(device) if device.type == "cuda" else None
    return tiles.tile(capability, width, kernel)


class Asked(NamedTuple):
    """What a spec asks of a kernel, its tensors apart."""

    scale: float
    causal: Causal
    softcap: float
    is_ranged: bool
    mask: Layout | None  # of the dense mask
    sinks: Layout | None


def load(
    spec: AttentionSpec, q: Tensor, v: Tensor, unused: Tensor
) -> tuple[tuple[Tensor, Tensor, Tensor], Asked]:
    """Returns what kernels load besides, `unused` for what is not asked for, and the rest.

    They load the dense mask; the first key that each query sees and where its keys end, INT32
    (2, N); the sinks, FP32 (H,).
    """
    mask = ranges = sinks = unused
    shape = (*q.shape[:3], v.size(2))
    if spec.mask is not None:
        mask = dense_mask(spec.mask, shape)
        mask = mask.view(torch.uint8) if mask.dtype == torch.bool else mask
    if spec.is_ranged:
        ranges = torch.stack(visible_range(spec, shape, q.device))
    if spec.sinks is not None:
        sinks = spec.sinks.float().contiguous()
    asked = Asked(
        float(spec.scale),
        spec.causal,
        float(spec.softcap),
        ranges is not unused,
        None if mask is unused else Layout(*layout(mask)),
        None if sinks is unused else Layout(*layout(sinks)),
    )
    return (mask, ranges, sinks), asked


class Prepared(NamedTuple):
    """What kernels of any call need besides tensors."""

    mask_strides: tuple[int, ...]  # the dense mask's four strides, 0 where it broadcasts
    shift: int  # see `causal_shift`
    inner_scale: float  # factor of q k before the soft cap's tanh
    scale: float  # factor of the scores after it
    tile: Tile  # how a program works
    constants: dict[str, Any]  # Compile-time arguments and options


def prepare(
    asked: Asked, q_shape: torch.Size, v_shape: torch.Size, device: torch.device, kernel: Kernel
) -> Prepared:
    head_dim, (seqlen_k, value_dim) = q_shape[3], v_shape[2:]
    mask_strides, kind = (0, 0, 0, 0), NO_MASK.value
    if asked.mask is not None:
        mask_strides = asked.mask.strides
        kind = BOOLEAN.value if asked.mask.dtype == torch.uint8 else ADDITIVE.value
    width, value_width = padded_width(head_dim), padded_width(value_dim)
    tile = tile_of(device, max(width, value_width), kernel)
    is_capped = asked.softcap > 0
    if asked.mask is not None or is_capped or (kernel == "shadow" and asked.is_ranged):
        tile = tile.for_mask
    return Prepared(
        mask_strides,
        causal_shift(asked.causal, q_shape[2], seqlen_k),
        asked.scale / asked.softcap if is_capped else 1.0,
        asked.softcap if is_capped else asked.scale,
        tile,
        {
            "CAUSAL": asked.causal is not False and not asked.is_ranged,
            "RANGED": asked.is_ranged,
            "SOFTCAP": is_capped,
            "SINKS": asked.sinks is not None,
            "MASK": kind,
            "HEAD_DIM": head_dim,
            "WIDTH": width,
            "VALUE_DIM": value_dim,
            "VALUE_WIDTH": value_width,
            **tile.constants,
        },
    )
