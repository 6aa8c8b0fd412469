"""Projections made of several parameters, measured as the one matrix that they are.

Under LoRA (arXiv 2106.09685) queries are W x + scale B A x; with weight norm (arXiv 1602.07868) W
is a gain times a direction. No single parameter then multiplies the input, but the submodule that
holds these parameters is affine, and its outputs on the unit vectors are its matrix. So the matrix
is measured. To compute it from the parameters would take a rule for every kind of adapter.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard
from torch.utils._python_dispatch import TorchDispatchMode

from guardbit.guard import within
from guardbit.monitor import ranks
from guardbit.monitor.layout_search import find_latent_layout, find_layout
from guardbit.monitor.layouts import (
    HeadRows,
    HeadsExchanged,
    Layout,
    LayoutUnavailable,
    NotOneMatrix,
)
from guardbit.monitor.module_copy import runnable_copy
from guardbit.monitor.shards import HeadShards, shards_of

#: Largest relative difference between an affine submodule and its matrix and bias. The submodule
#: runs in FP64, but may cast to FP32 inside.
_AFFINE_TOLERANCE = 1e-4

#: Runs a copy of the module with the given parameters; the second argument may change the copy.
#: Returns q and k of an attention call.
Rerun = Callable[[dict[str, Tensor], Callable[[nn.Module], None]], tuple[Tensor, Tensor]]

#: The same of all calls that the module makes in one forward.
RerunAll = Callable[[dict[str, Tensor], Callable[[nn.Module], None]], list[tuple[Tensor, Tensor]]]


class _Affine(NamedTuple):
    weight: Tensor
    bias: Tensor


class Weights:
    """The matrices that a module multiplies by: its parameters, or its submodules' matrices."""

    def __init__(
        self, module: nn.Module, widths: Mapping[str, int], is_shared: bool = False
    ) -> None:
        self._module = module
        self._widths = dict(widths)
        self._is_shared = is_shared
        self._shards: dict[HeadRows, HeadShards | None] = {}
        self._biases = {name: self._measured(name).bias for name in widths}

    def of(self, name: str) -> dict[str, Tensor]:
        """Returns a current matrix by name, detached; empty if there is none."""
        if name in self._widths:
            return {name: self._measured(name).weight}
        found = dict(self._module.named_parameters()).get(name)
        return {} if found is None else {name: self._here(found)}

    def grams_of_shards(self, rows: HeadRows, of: Callable[[Tensor], Tensor]) -> Tensor | None:
        """Returns the heads' Gram matrices of a current matrix, from the ranks' shards of it."""
        found = dict(self._module.named_parameters()).get(rows.parameter)
        if rows.parameter in self._widths or not isinstance(found, DTensor):
            return None
        if rows not in self._shards:
            self._shards[rows] = shards_of(rows, found, self._is_shared)
        shards = self._shards[rows]
        return None if shards is None else shards.gram_matrices(found.to_local().detach(), of)

    def leaves(self) -> dict[str, Tensor]:
        """Returns copies of all current matrices in FP32 by name, detached."""
        below = tuple(f"{name}." for name in self._widths)
        parameters = {
            name: self._here(p).to(torch.float32, copy=True)
            for name, p in self._module.named_parameters()
            if not name.startswith(below)
        }
        return parameters | {name: self._measured(name).weight for name in self._widths}

    def put_into(self, module: nn.Module, matrices: Mapping[str, Tensor]) -> None:
        """Makes a copy's submodules multiply by the given matrices instead of their own."""
        for name, bias in self._biases.items():
            forward = _multiply_by(matrices[name], bias)
            vars(module.get_submodule(name))["forward"] = forward

    def plain(self, name: str) -> list[nn.Parameter]:
        """Returns a parameter of that name as it is trained, and the bias that belongs to it."""
        parameters = dict(self._module.named_parameters())
        if name in self._widths or name not in parameters:
            raise LayoutUnavailable(f"'{name}' is made of several parameters")
        found = parameters[name]
        if isinstance(found, DTensor) or self._is_shared:
            raise LayoutUnavailable(f"'{name}' is shared by several ranks")
        # PyTorch's names: weight and bias of a Linear, in_proj_weight and in_proj_bias.
        bias = parameters.get(f"{name.removesuffix('weight')}bias")
        return [found] if bias is None or not name.endswith("weight") else [found, bias]

    def as_used(self, parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Turns replacements of parameters into what the module multiplies by."""
        if not self._is_shared:
            return dict(parameters)
        own = dict(self._module.named_parameters())
        return {name: _as_part_of(own[name], tensor) for name, tensor in parameters.items()}

    def _here(self, parameter: Tensor) -> Tensor:
        return _part(parameter) if self._is_shared else _whole(parameter)

    def _measured(self, name: str) -> _Affine:
        """Runs a submodule on zero, the unit vectors and, to check that it is affine, noise."""
        width = self._widths[name]
        submodule = self._module.get_submodule(name)
        tensors = {
            key: self._here(p).to(torch.float64, copy=True)
            for key, p in submodule.named_parameters()
        }
        tensors = {
            key.removeprefix(f"{name}."): tensor
            for key, tensor in self.as_used({f"{name}.{k}": t for k, t in tensors.items()}).items()
        }
        device = next(submodule.parameters()).device
        options = {"dtype": torch.float64, "device": device}
        noise = torch.randn(4, width, generator=torch.Generator(device).manual_seed(0), **options)
        unit = torch.eye(width, **options)
        alone = _WithoutExchange() if self._is_shared else nullcontext()

        def run() -> Tensor:
            with runnable_copy(submodule, tensors, torch.float64) as stand_in, torch.no_grad():
                for part in stand_in.modules():
                    part.training = False  # without dropout
                # As tokens of one sequence, so that a submodule that mixes tokens is found out.
                return stand_in(torch.cat([torch.zeros_like(unit[:1]), unit, noise])[None])[0]

        out = within(alone, run)
        bias, columns, answers = out.split((1, width, len(noise)))
        columns = columns - bias
        distance = (answers - (noise @ columns + bias)).norm() / answers.norm()
        if not distance <= _AFFINE_TOLERANCE:
            raise LayoutUnavailable(
                f"'{name}' is not affine: on noise it differs from what it does to unit vectors by"
                f" {distance:.1e} (relative), at most {_AFFINE_TOLERANCE:.0e} is allowed"
            )
        return _Affine(columns.T.float(), bias[0].float())


def settle(module: nn.Module, rerun: RerunAll, is_shared: bool = False) -> tuple[Layout, Weights]:
    """Finds the rows of W_Q and W_K in a module's parameters, or in its submodules' matrices."""
    if is_shared or ranks.world_size() > 1:
        rerun = _by_itself(rerun)
    num_calls = 1

    def first_call(
        parameters: dict[str, Tensor], prepare: Callable[[nn.Module], None]
    ) -> tuple[Tensor, Tensor]:
        nonlocal num_calls
        calls = rerun(parameters, prepare)
        num_calls = len(calls)
        return calls[0]

    layout, weights = _settle(module, first_call, {}, is_shared)
    if num_calls > 1:
        several = f"{type(module).__name__} calls attention {num_calls} times in one forward, with"
        (queries, keys), *others = _sources_of_calls(module, rerun, is_shared)
        if not queries or any(other != queries for other, _ in others):
            raise LayoutUnavailable(f"{several} queries of different weights")
        if isinstance(layout.key, HeadRows) and (
            not keys or any(other != keys for _, other in others)
        ):
            key = LayoutUnavailable(f"{several} keys of different weights")
            layout = replace(layout, key=key, calls_are_alike=False)
    return layout, weights


#: The matrices that a tensor depends on -> which of their rows.
_Sources = dict[str, list[bool]]


def _sources_of_calls(
    module: nn.Module, rerun: RerunAll, is_shared: bool
) -> list[tuple[_Sources, _Sources]]:
    """Returns where q and k of each call come from, by the gradients of the matrices."""
    weights = Weights(module, {}, is_shared)
    leaves = {n: x.requires_grad_() for n, x in weights.leaves().items() if x.dim() > 1}
    with torch.enable_grad():
        calls = rerun(weights.as_used(leaves), lambda _: None)

    def sources(x: Tensor) -> _Sources:
        if not x.requires_grad:
            return {}
        gradients = torch.autograd.grad(
            x.float().square().sum(), list(leaves.values()), retain_graph=True, allow_unused=True
        )
        found = zip(leaves, gradients, strict=True)
        return {name: (g.flatten(1) != 0).any(1).tolist() for name, g in found if g is not None}

    return [(sources(q), sources(k)) for q, k in calls]


def _by_itself(rerun: RerunAll) -> RerunAll:
    def alone(
        parameters: dict[str, Tensor], prepare: Callable[[nn.Module], None]
    ) -> list[tuple[Tensor, Tensor]]:
        # Were the mode to stay, it would refuse the exchange of gradients.
        return within(_WithoutExchange(), lambda: rerun(parameters, prepare))

    return alone


def _settle(
    module: nn.Module, rerun: Rerun, widths: dict[str, int], is_shared: bool
) -> tuple[Layout, Weights]:
    weights = Weights(module, widths, is_shared)

    def project(leaves: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        parameters = {name: leaf for name, leaf in leaves.items() if name not in widths}
        return rerun(weights.as_used(parameters), lambda copy: weights.put_into(copy, leaves))

    def with_one_matrix_more(parameters: tuple[str, ...]) -> tuple[Layout, Weights] | None:
        for name in _owners(parameters):
            try:
                width = _width(Weights(module, {}, is_shared), name, rerun)
                return _settle(module, rerun, widths | {name: width}, is_shared)
            except Exception:
                continue  # not affine, or not to be run by itself: the first reason stands
        return None

    try:
        layout = find_layout(project, weights.leaves())
    except NotOneMatrix as unavailable:
        settled = with_one_matrix_more(unavailable.parameters)
        if settled is not None:
            return settled
        layout = find_latent_layout(project, weights.leaves(), unavailable)
    if isinstance(layout.key, NotOneMatrix):
        return with_one_matrix_more(layout.key.parameters) or (layout, weights)
    return layout, weights


def _owners(parameters: tuple[str, ...]) -> Iterator[str]:
    """Yields the names of the submodules that hold all these parameters, innermost first."""
    paths = [name.split(".")[:-1] for name in parameters]
    shared = [parts[0] for parts in zip(*paths, strict=False) if len(set(parts)) == 1]
    for depth in range(len(shared), 0, -1):
        yield ".".join(shared[:depth])


def _width(plain: Weights, name: str, rerun: Rerun) -> int:
    """Returns how many features the submodule takes when the module runs."""
    widths = []

    def listen(copy: nn.Module) -> None:
        copy.get_submodule(name).register_forward_pre_hook(
            lambda _, args: widths.append(args[0].shape[-1])
        )

    rerun(plain.as_used(plain.leaves()), listen)
    return widths[-1]


def why_sharded(modules: Sequence[nn.Module]) -> str | None:
    """Returns why a module's weights are absent between forwards, or None."""
    parameters = list(modules[0].parameters())
    if any(hasattr(p, "ds_id") and p.numel() == 0 for p in parameters):
        return (
            "its parameters are sharded by DeepSpeed ZeRO-3, which gathers them for a forward only;"
            " they can be read under ZeRO stage 2 or FSDP2 (fully_shard)"
        )
    names = {cls.__name__ for module in modules for cls in type(module).__mro__}
    if "FullyShardedDataParallel" in names and not any(_is_matrix(p) for p in parameters):
        return (
            "its parameters are sharded by FSDP1 (FullyShardedDataParallel), which flattens them;"
            " they can be read under FSDP2 (fully_shard)"
        )
    if any(p.numel() == 0 for p in parameters):
        return "its parameters are empty between forwards, as where they are sharded"
    return None


def why_quantised(module: nn.Module) -> str | None:
    """Returns why a module's weights are no plain numbers, or None."""
    for name, p in module.named_parameters():
        if hasattr(p, "quant_state") or not (p.is_floating_point() or p.is_complex()):
            kind = str(p.dtype).removeprefix("torch.")
            return (
                f"the base weight '{name}' is quantised (kept as {kind}); W_Q can be read where the"
                " base model is not, as in LoRA"
            )
    return None


def _is_matrix(parameter: Tensor) -> bool:
    return parameter.dim() >= 2 and type(parameter).__name__ != "FlatParameter"


def _whole(parameter: Tensor) -> Tensor:
    """Returns a parameter, detached; all ranks must ask for one that is sharded."""
    parameter = parameter.detach()
    return parameter.full_tensor() if isinstance(parameter, DTensor) else parameter


def _part(parameter: Tensor) -> Tensor:
    """Returns this rank's part of a parameter under tensor parallelism, detached."""
    parameter = parameter.detach()
    if not isinstance(parameter, DTensor):
        return parameter
    mesh, shared = parameter.device_mesh, parameter.placements[-1]  # FSDP's meshes come before
    if mesh.ndim == 1:
        return parameter.to_local()
    whole = parameter.full_tensor()
    if not isinstance(shared, Shard):
        return whole
    return whole.chunk(mesh.size(-1), shared.dim)[mesh.get_local_rank(mesh.ndim - 1)]


def _as_part_of(parameter: Tensor, part: Tensor) -> Tensor:
    """Returns the DTensor whose local part is what `_part` returns of a parameter."""
    if not isinstance(parameter, DTensor):
        return part
    mesh = parameter.device_mesh
    if mesh.ndim > 1:
        if not mesh.mesh_dim_names:
            raise LayoutUnavailable("its weights lie on a mesh whose dimensions have no names")
        mesh = mesh[mesh.mesh_dim_names[-1]]
    return DTensor.from_local(part, mesh, parameter.placements[-1:], run_check=False)


class _WithoutExchange(TorchDispatchMode):
    """Refuses operations that ranks must do together.

    Each rank runs a copy of the module by itself, so one might wait for another for ever.
    """

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # the operations on its local parts come here in turn
        if "c10d" in func.namespace:
            raise HeadsExchanged("ranks exchange tensors before it calls attention")
        return func(*args, **(kwargs or {}))


def _multiply_by(weight: Tensor, bias: Tensor) -> Callable[..., Tensor]:
    return lambda x, *_, **__: F.linear(x, weight, bias)
