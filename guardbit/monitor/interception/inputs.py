"""Descriptions of a module's inputs, and made-up inputs that match a description."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy


class TensorSpec(NamedTuple):
    """Describes a tensor among a module's inputs, so that a similar one can be made."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device


@dataclass(slots=True)
class ModuleInputs:
    """The inputs of one forward of a module, tensors replaced by `TensorSpec`."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]


def describe_inputs(args: tuple[Any, ...], kwargs: dict[str, Any]) -> ModuleInputs:
    """Describes the inputs of one forward; tensors may be a compiler's fake ones."""
    return ModuleInputs(
        tuple(describe(x) for x in args), {name: describe(x) for name, x in kwargs.items()}
    )


def describe(x: Any, around: tuple[int, ...] = ()) -> Any:
    """Replaces tensors by their descriptions and drops what cannot be made up (caches).

    Args:
        x: The input.
        around: Ids of the containers around it, which may contain themselves.
    """
    if isinstance(x, Tensor):
        return _describe_tensor(x)
    if isinstance(x, tuple | list) and id(x) not in around:
        return tuple(describe(item, (*around, id(x))) for item in x)
    return x if isinstance(x, bool | int | float | str) else None


def _describe_tensor(x: Tensor) -> TensorSpec | None:
    if x.is_nested or x.layout is not torch.strided or is_lazy(x):
        return None
    return TensorSpec(tuple(present_size(n) for n in x.shape), x.dtype, x.device)


def present_size(n: int | torch.SymInt) -> int:
    """Returns a size as a number; for a symbolic one, its present value."""
    # int() of a symbolic size would fix it, and each length would then be compiled by itself.
    return n if isinstance(n, int) else int(n.node.hint)


def make_up(
    inputs: ModuleInputs, generator: torch.Generator, cut: bool
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Makes up inputs that match a description, on the generator's device.

    Real and complex numbers are single precision. With `cut` the first axis, usually the batch, has
    one entry.
    """
    batch = _batch_size(inputs) if cut else None
    make = functools.partial(_make, batch=batch, generator=generator)
    args = tuple(make(x) for x in inputs.args)
    return args, {name: make(x) for name, x in inputs.kwargs.items()}


def _batch_size(inputs: ModuleInputs) -> int | None:
    for x in (*inputs.args, *inputs.kwargs.values()):
        if isinstance(x, TensorSpec) and len(x.shape) >= 2:
            return x.shape[0]
    return None


def _make(x: Any, batch: int | None, generator: torch.Generator) -> Any:
    if isinstance(x, TensorSpec):
        device = generator.device  # the module's; it may have been moved since the inputs were seen
        shape = (1, *x.shape[1:]) if x.shape and x.shape[0] == batch else x.shape
        if x.dtype.is_complex:
            return torch.randn(shape, generator=generator, dtype=torch.complex64, device=device)
        if x.dtype.is_floating_point:
            return torch.randn(shape, generator=generator, device=device)
        fill = torch.ones if x.dtype == torch.bool else torch.zeros
        return fill(shape, dtype=x.dtype, device=device)
    if isinstance(x, tuple):
        return tuple(_make(item, batch, generator) for item in x)
    return x
