"""Layouts, small integer tensors, the casts of autocast, and the alignment of outputs."""

import functools
import logging
import sys
from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor

from guardbit import private

_log = logging.getLogger("guardbit")

_CAST = (torch.bfloat16, torch.float16, torch.float32)

#: The order of a tensor's dimensions: batch, heads, tokens (N), head size; packed ones lack batch.
Layout = Literal["BHND", "BNHD", "NBHD", "NHD"]

_BYTES = 16
_promised: set[Any] = set()


def as_given(x: Tensor, layout: Layout) -> Tensor:
    if layout in ("BHND", "NBHD"):
        return x if layout == "BHND" else x.permute(2, 0, 1, 3)
    return x.transpose(1, 2) if layout == "BNHD" else x.squeeze(0).transpose(0, 1)


def heads_first(x: Tensor, layout: Layout) -> Tensor:
    if layout in ("BHND", "NBHD"):
        return x if layout == "BHND" else x.permute(1, 2, 0, 3)
    return x.transpose(1, 2) if layout == "BNHD" else x.transpose(0, 1).unsqueeze(0)


def is_autocast(x: Tensor) -> bool:
    """Whether autocast is on for x's device; on meta, which has none, the question is an error."""
    kind = "cuda" if x.is_cuda else x.device.type  # of which PyTorch makes a string each time
    return kind != "meta" and torch.is_autocast_enabled(kind)


def autocast_tensors(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Casts as autocast casts the arguments of `F.scaled_dot_product_attention`."""
    if not is_autocast(q):
        return q, k, v
    dtype = torch.get_autocast_dtype(q.device.type)
    q, k, v = (x.to(dtype) if x.dtype in _CAST else x for x in (q, k, v))
    return q, k, v


# Outside inference mode: a later training step could not save inference tensors.
@functools.lru_cache(maxsize=4096)
@torch.inference_mode(False)
def device_constant(values: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Returns the values as a tensor `(len(values),)` on the device; the host does not wait."""
    # From pageable memory the copy would be synchronous.
    host = torch.tensor(values, dtype=dtype, device="cpu", pin_memory=device.type == "cuda")
    return host.to(device, non_blocking=True)


@functools.lru_cache(maxsize=1024)
def strides_of(
    make: Callable[..., Tensor], shape: tuple[int, ...], strides: tuple[int, ...], *others: Any
) -> tuple[int, ...]:
    """Returns the strides of what a function makes of a tensor, without its memory."""
    x = torch.empty_strided(shape, strides, dtype=torch.int8, device="meta")
    return make(x, *others).stride()


def laid_out_as(x: Tensor, like: Tensor) -> Tensor:
    """Returns x in the memory layout of `like`, which the op's fake kernels promise."""
    if x.stride() == like.stride():
        return x
    if x.stride() == strides_of(torch.empty_like, like.shape, like.stride()):
        return x
    return torch.empty_like(like, dtype=x.dtype).copy_(x)


# --- alignment -----------------------------------------------------------------------------------

# Inductor assumes that an op's outputs are unaligned if one of its inputs may be, and that every
# graph input on the CPU is unaligned (`FallbackKernel.create`). Our ops have such an input: the
# number of the attention module. Without this promise, whatever reads dq, dk and dv loads them one
# number at a time: 0.06 ms a layer of GPT-2 small more (torch.profiler, H200, PyTorch 2.11, 32 x
# 1024 tokens), 1.1 % of a training step.


def aligned(x: Tensor) -> Tensor:
    """Returns the tensor, or a copy if its address is not a multiple of 16 bytes."""
    return x.clone() if x.data_ptr() % _BYTES else x


def promise_aligned_outputs(*ops: Any) -> None:
    """Lets Inductor, if there, load the outputs of some ops 16 bytes at a time."""
    if private.INDUCTOR not in sys.modules or _promised.issuperset(ops):
        return
    _promised.update(ops)
    try:
        lowering, _, _, constraint_tag = private.inductor
        for op in ops:
            if op not in lowering.lowerings:
                constraint = lowering.tag_to_layout_constraint(
                    constraint_tag(op, with_default=True)
                )  # fmt: skip
                lowering.make_fallback(op, layout_constraint=constraint, warn=False)
            lowering.lowerings[op] = _without_inputs_on_the_cpu(lowering.lowerings[op])
    except Exception as error:  # Inductor's internals changed: graphs stay right, and are slower
        _log.debug("Inductor does not take the promise of aligned outputs: %r", error)


def _without_inputs_on_the_cpu(lower: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a lowering that takes CPU inputs for aligned where others are on a GPU."""

    @functools.wraps(lower)
    def lowered(*args: Any, **kwargs: Any) -> Any:
        _, box, graphs, _ = private.inductor
        tensors = [x for x in private.tree_leaves(args) if isinstance(x, box)]
        if not any(map(_is_on_gpu, tensors)):
            return lower(*args, **kwargs)
        unaligned = graphs.graph.unaligned_buffers
        # What the graph computes, and is no input of it, has no name.
        inputs = [getattr(x.data, "data", None) for x in tensors if not _is_on_gpu(x)]
        names = [getattr(buffer, "name", None) for buffer in inputs]
        hidden = [name for name in names if name is not None and name in unaligned]
        for name in hidden:
            unaligned.discard(name)
        try:
            return lower(*args, **kwargs)
        finally:
            unaligned.update(hidden)

    return lowered


def _is_on_gpu(x: Any) -> bool:
    return x.get_device().type != "cpu"
