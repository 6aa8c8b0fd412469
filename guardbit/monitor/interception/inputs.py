"""Descriptions of a module's inputs, and made-up inputs that match them.

A description keeps no tensor of the run but short ones of whole numbers, because lengths, grids and
positions decide what the module does with the rest.
"""

from __future__ import annotations

import copyreg
import enum
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from types import BuiltinFunctionType, FunctionType, MappingProxyType, MethodType, ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensor
from torch.nn.parameter import is_lazy
from torch.utils._pytree import TreeSpec, tree_flatten, tree_structure, tree_unflatten

from guardbit.monitor.module_copy import stand_in

#: Most elements of a tensor of whole numbers that is kept.
_MOST_KEPT = 2**14

#: What is handed on as it is.
_AS_THEY_ARE = (
    type(None), bool, int, float, complex, str, bytes, range, slice, type(...), type, FunctionType,
    BuiltinFunctionType, MethodType, ModuleType, nn.Module, torch.dtype, torch.device,
)  # fmt: skip


class TensorSpec(NamedTuple):
    """Describes a tensor among a module's inputs, so that a similar one can be made."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device


class _Values(NamedTuple):
    """A tensor whose values are kept."""

    tensor: Tensor


class _Object(NamedTuple):
    """An object as PyTorch or pickle takes it apart.

    The latter gives a function, arguments, state, items of a list and pairs of a dict.
    """

    parts: Any
    is_mapping: bool = False


class _Itself(NamedTuple):
    """An object that cannot be taken apart, or what stands for an iterator or a file."""

    held: Any


class _Tree(NamedTuple):
    """Containers, and descriptions of what they hold."""

    leaves: list[Any]
    spec: TreeSpec


@dataclass(slots=True)
class ModuleInputs:
    """The inputs of one forward of a module, as `describe` returns them."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]


def describe_inputs(args: tuple[Any, ...], kwargs: dict[str, Any]) -> ModuleInputs:
    """Describes the inputs of one forward; tensors may be a compiler's fake ones."""
    return ModuleInputs(
        tuple(describe(x) for x in args), {name: describe(x) for name, x in kwargs.items()}
    )


def describe(x: Any, within: tuple[int, ...] = ()) -> Any:
    """Describes an input; a tensor that cannot be described becomes None."""
    if isinstance(x, Tensor):
        return _describe_tensor(x)
    if isinstance(x, (*_AS_THEY_ARE, enum.Enum)):
        return x
    if id(x) in within:
        return None
    try:
        leaves, spec = tree_flatten(x)
    except RecursionError:  # it contains itself
        return None
    within = (*within, id(x))
    if len(leaves) != 1 or leaves[0] is not x:
        tree = _Tree([describe(leaf, within) for leaf in leaves], spec)
        return tree if isinstance(x, tuple | list | dict | deque) else _Object(tree)
    try:
        parts = [describe(part, within) for part in _taken_apart(x)]
        return _Object(parts, isinstance(x, Mapping))
    except Exception:
        return _Itself(stand_in(x))


def _taken_apart(x: Any) -> list[Any]:
    if isinstance(x, MappingProxyType):
        return [MappingProxyType, (dict(x),), None, [], []]
    parts = copyreg.dispatch_table.get(type(x), lambda x: x.__reduce_ex__(4))(x)
    function, args, state, items, pairs, *_ = (*parts, None, None, None)
    return [function, args, state, list(items or ()), list(pairs or ())]


def _built(function: Any, args: Any, state: Any, items: Any, pairs: Any) -> Any:
    made = function(*args)
    for item in items:
        made.append(item)
    for key, value in pairs:
        made[key] = value
    if state is not None and hasattr(made, "__setstate__"):
        made.__setstate__(state)
    elif state is not None:
        attributes, slots = state if isinstance(state, tuple) else (state, None)
        if attributes:
            vars(made).update(attributes)
        for name, value in (slots or {}).items():
            object.__setattr__(made, name, value)
    return made


def describe_items(items: tuple[Any, ...]) -> Any:
    """Describes a tuple of things that are described already."""
    return _Tree(list(items), tree_structure(tuple(0 for _ in items)))


def _describe_tensor(x: Tensor) -> TensorSpec | _Values | None:
    if x.is_nested or x.layout is not torch.strided or is_lazy(x):
        return None
    shape = tuple(present_size(n) for n in x.shape)
    is_whole = not (x.is_floating_point() or x.is_complex() or x.dtype == torch.bool)
    is_real = type(x) in (Tensor, nn.Parameter) and not isinstance(x, FakeTensor)
    if is_whole and is_real and x.numel() <= _MOST_KEPT and not torch.compiler.is_compiling():
        return _Values(x.detach().clone())
    return TensorSpec(shape, x.dtype, x.device)


def present_size(n: int | torch.SymInt) -> int:
    """Returns a size as a number; for a symbolic one, its present value."""
    # int() of a symbolic size would fix it, and each length would then be compiled by itself.
    return n if isinstance(n, int) else int(n.node.hint)


def make_up(
    inputs: ModuleInputs, generator: torch.Generator, cut: bool, with_objects: bool
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Makes up inputs that match a description, on the generator's device."""
    everything = (*inputs.args, *inputs.kwargs.values())
    shapes = (x.shape for described in everything for x in _tensors_in(described))
    batch = next((shape[0] for shape in shapes if len(shape) >= 2), None) if cut else None

    def make(x: Any) -> Any:
        return _made(x, batch, generator, with_objects)

    return tuple(map(make, inputs.args)), {name: make(x) for name, x in inputs.kwargs.items()}


def _tensors_in(x: Any) -> Iterator[TensorSpec]:
    if isinstance(x, TensorSpec):
        yield x
    elif isinstance(x, _Tree):
        for leaf in x.leaves:
            yield from _tensors_in(leaf)


def _made(x: Any, batch: int | None, generator: torch.Generator, with_objects: bool) -> Any:
    make = partial(_made, batch=batch, generator=generator, with_objects=with_objects)
    device = generator.device  # the module's; it may have been moved since the inputs were seen
    if isinstance(x, _Values):
        values = x.tensor.to(device)
        return values[:1] if values.dim() >= 2 and len(values) == batch else values.clone()
    if isinstance(x, _Tree):
        return tree_unflatten([make(leaf) for leaf in x.leaves], x.spec)
    if isinstance(x, _Object):
        if not with_objects and not x.is_mapping:
            return None
        return make(x.parts) if isinstance(x.parts, _Tree) else _built(*map(make, x.parts))
    if isinstance(x, _Itself):
        return x.held if with_objects else None
    if not isinstance(x, TensorSpec):
        return x
    shape = (1, *x.shape[1:]) if x.shape and x.shape[0] == batch else x.shape
    if x.dtype.is_complex:
        return torch.randn(shape, generator=generator, dtype=torch.complex64, device=device)
    if x.dtype.is_floating_point:
        return torch.randn(shape, generator=generator, dtype=torch.float32, device=device)
    fill = torch.ones if x.dtype == torch.bool else torch.zeros
    return fill(shape, dtype=x.dtype, device=device)
