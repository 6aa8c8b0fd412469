"""Runs a copy of a module once more, on made-up inputs, to see where its queries come from.

The inputs of the run are described: a description is a deepcopy that keeps no tensor but short ones
of whole numbers, because lengths, grids and positions decide what the module does with the rest.
Made-up inputs are a deepcopy of that.
"""

from __future__ import annotations

import copy
import enum
import sys
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, fields, replace
from functools import partial
from itertools import product
from types import FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.parameter import is_lazy

from guardbit import private
from guardbit.guard import Args, Kwargs, then_undo
from guardbit.kernels.runtime import runtime
from guardbit.monitor.interception.frames import Frame, Place, frame_stack, probe
from guardbit.monitor.interception.watching import in_four_axes
from guardbit.monitor.module_copy import Copier, Copiers, runnable_copy

#: Most elements of a tensor of whole numbers that is kept.
_MOST_KEPT = 2**14

#: What is handed on as it is.
_AS_THEY_ARE = (
    bool, int, float, complex, str, bytes, range, slice, type, FunctionType, MethodType, ModuleType,
    nn.Module, torch.dtype, torch.device, enum.Enum,
)  # fmt: skip

_CONTAINERS = (tuple, list, deque, Mapping)


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """Describes a tensor among a module's inputs, so that a similar one can be made."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    values: Tensor | None  # if they are kept


class JaggedSpec(NamedTuple):
    """Describes a jagged tensor among a module's inputs."""

    packed: TensorSpec
    offsets: Tensor
    axis: int  # of the tokens


#: Whether a module is run in BF16, on what is no data as well, and on one sequence.
Attempt = tuple[bool, bool, bool]

#: In BF16 last: some, as TransformerEngine, ask for it before they call a kernel.
ATTEMPTS: tuple[Attempt, ...] = tuple(product((False, True), (False, True), (True, False)))

#: The inputs of one forward of a module, as `describe` returns them.
ModuleInputs = tuple[Args, Kwargs]


def describe(x: Any) -> Any:
    """Describes inputs, also a compiler's; a tensor that cannot be described becomes None."""

    def copier_of(kind: type) -> Copier | None:
        if issubclass(kind, Tensor):
            return lambda x, _: (
                _describe_jagged(x) if x.layout is torch.jagged else _describe_tensor(x)
            )
        return _itself if issubclass(kind, _AS_THEY_ARE) else None

    with Copiers(copier_of).in_use():
        return copy.deepcopy(x)


def _itself(x: Any, _: object) -> Any:
    return x


def _describe_jagged(x: Any) -> JaggedSpec | None:
    packed = None if torch.compiler.is_compiling() else _describe_tensor(x.values())
    if packed is None or x._lengths is not None:
        return None
    return JaggedSpec(packed, x.offsets().clone(), x._ragged_idx)


def _describe_tensor(x: Tensor) -> TensorSpec | None:
    if x.is_nested or x.layout is not torch.strided or is_lazy(x):
        return None
    shape = tuple(present_size(n) for n in x.shape)
    is_whole = not (x.is_floating_point() or x.is_complex() or x.dtype == torch.bool)
    is_real = type(x) in (Tensor, nn.Parameter) and not isinstance(x, private.fake_tensor)
    is_kept = is_whole and is_real and x.numel() <= _MOST_KEPT
    is_kept = is_kept and not torch.compiler.is_compiling()
    return TensorSpec(shape, x.dtype, x.detach().clone() if is_kept else None)


def present_size(n: int | torch.SymInt) -> int:
    """Returns a size as a number; for a symbolic one, its present value."""
    # int() of a symbolic size would fix it, and each length would then be compiled by itself.
    return n if isinstance(n, int) else int(n.node.hint)


def make_up(
    inputs: ModuleInputs, generator: torch.Generator, cut: bool, with_objects: bool
) -> ModuleInputs:
    """Makes up inputs: with `cut` one sequence, without `with_objects` None for what is no data."""
    args, kwargs = inputs
    batch = _batch_of(inputs) if cut else None

    def copier_of(kind: type) -> Copier | None:
        if issubclass(kind, TensorSpec):
            return lambda x, _: _made(x, batch, generator)
        if issubclass(kind, JaggedSpec):
            return lambda x, _: _made_jagged(x, generator)
        if issubclass(kind, _AS_THEY_ARE):
            return _itself
        return None if with_objects or issubclass(kind, _CONTAINERS) else lambda x, _: None

    # One by one: a tensor that was given twice is made twice.
    with Copiers(copier_of).in_use():
        made = tuple(copy.deepcopy(x) for x in args)
        return made, {name: copy.deepcopy(x) for name, x in kwargs.items()}


def _batch_of(inputs: ModuleInputs) -> int | None:
    args, kwargs = inputs
    for x in (*args, *kwargs.values()):
        try:
            leaves = private.tree_leaves(x)
        except RecursionError:  # it contains itself
            continue
        for leaf in leaves:
            if isinstance(leaf, TensorSpec) and leaf.values is None and len(leaf.shape) >= 2:
                return leaf.shape[0]
    return None


def _made(x: TensorSpec, batch: int | None, generator: torch.Generator) -> Tensor:
    device = generator.device  # the module's; it may have been moved since the inputs were seen
    if x.values is not None:
        values = x.values.to(device)
        return values[:1] if values.dim() >= 2 and len(values) == batch else values.clone()
    shape = (1, *x.shape[1:]) if x.shape and x.shape[0] == batch else x.shape
    if x.dtype.is_floating_point or x.dtype.is_complex:
        dtype = torch.complex64 if x.dtype.is_complex else torch.float32
        return torch.randn(shape, generator=generator, dtype=dtype, device=device)
    fill = torch.ones if x.dtype == torch.bool else torch.zeros
    return fill(shape, dtype=x.dtype, device=device)


def _made_jagged(x: JaggedSpec, generator: torch.Generator) -> Tensor:
    offsets = x.offsets.to(generator.device)
    return torch.nested.nested_tensor_from_jagged(
        _made(x.packed, None, generator), offsets, jagged_dim=x.axis
    )


def rerun(
    number: int,
    module: nn.Module,
    inputs: ModuleInputs,
    attempts: list[Attempt],
    parameters: dict[str, Tensor],
    prepare: Callable[[nn.Module], None],
) -> list[tuple[Tensor, Tensor]]:
    """Runs a copy of a module on made-up inputs; the attempt that shows calls then comes first."""
    device = next(module.parameters()).device
    failure: Exception | None = None
    try:
        for attempt in attempts.copy():
            low, with_objects, cut = attempt
            generator = torch.Generator(device).manual_seed(0)
            args, kwargs = make_up(inputs, generator, cut, with_objects)
            precision = torch.autocast(device.type, torch.bfloat16) if low else nullcontext()
            # A failure after the attention call does not matter: later code may not bear made-up
            # inputs.
            with runnable_copy(module, parameters, torch.float32) as stand_in, precision:
                prepare(stand_in)
                try:
                    _run_probed(number, module, partial(stand_in.forward, *args, **kwargs))
                except Exception as error:
                    failure = failure or error
            if probe.calls:
                attempts.sort(key=lambda other: other != attempt)
                calls, probe.calls = probe.calls, []
                return [(_here(query), _here(key)) for query, key in calls]
        raise failure or RuntimeError("the module did not call attention when it was run again")
    finally:
        del failure  # it and this frame would keep each other, and the tensors of all its frames


def _here(x: Tensor) -> Tensor:
    return in_four_axes(x.to_local() if isinstance(x, DTensor) else x)


def _run_probed(number: int, module: nn.Module, forward: Callable[[], Any]) -> None:
    """Collects the calls of a site, and keeps them from looking like calls of the model."""
    num_frames = len(frame_stack)
    state = runtime.site(number)
    before = replace(state, launches=state.launches.copy(), settings=state.settings.copy())

    def run() -> None:
        probe.site = number
        probe.calls.clear()
        frame_stack.append(Frame(module, (), {}))
        runtime.apart(Place(number).site, sys._getframe(), torch.enable_grad()(forward))

    def undo() -> None:
        probe.site = None
        for each in fields(state):
            setattr(state, each.name, getattr(before, each.name))
        del frame_stack[num_frames:]

    then_undo(run, undo)  # a probe that stayed would take the model's own calls for its own
