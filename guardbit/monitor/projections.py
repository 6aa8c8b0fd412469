"""The matrices that a module multiplies by, and where its heads' rows lie in them.

Under LoRA (arXiv 2106.09685) queries are W x + scale B A x; with weight norm (arXiv 1602.07868) W
is a gain times a direction. No single parameter then multiplies the input, but the submodule that
holds these parameters is affine, and its outputs on the unit vectors are its matrix. So the matrix
is measured. To compute it from the parameters would take a rule for every kind of adapter.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import torch
import torch.distributed
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard

from guardbit import private
from guardbit.guard import within
from guardbit.monitor import ranks
from guardbit.monitor.interception.rerunning import runnable_copy
from guardbit.monitor.layouts import (
    HeadRows,
    HeadsExchanged,
    Layout,
    LayoutUnavailable,
    NotOneMatrix,
    find_latent_layout,
    find_layout,
)

T = TypeVar("T")

#: Largest relative difference between an affine submodule and its matrix and bias. The submodule
#: runs in FP64, but may cast to FP32 inside.
_AFFINE_TOLERANCE = 1e-4

#: q and k of an attention call.
_Call = tuple[Tensor, Tensor]

#: Runs a copy of the module with the given parameters; the second argument may change the copy.
#: Returns the attention calls of one forward.
Rerun = Callable[[dict[str, Tensor], Callable[[nn.Module], None]], list[_Call]]


@dataclass
class Weights:
    """The matrices that a module multiplies by: its parameters, or its submodules' matrices."""

    module: nn.Module
    is_shared: bool  # whether ranks share its heads
    widths: dict[str, int] = field(default_factory=dict)  # of submodules that are one matrix each
    num_calls: int = 0  # how often the module called attention when it was run last

    def __post_init__(self) -> None:
        self._biases = {name: self._measured(name)[1] for name in self.widths}

    def of(self, name: str) -> Tensor:
        if name in self.widths:
            return self._measured(name)[0]
        return self._here(self.module.get_parameter(name))

    def leaves(self) -> dict[str, Tensor]:
        """Returns copies of all current matrices in FP32 by name, detached."""
        below = tuple(f"{name}." for name in self.widths)
        parameters = {
            name: self._here(p).to(torch.float32, copy=True)
            for name, p in self.module.named_parameters()
            if not name.startswith(below)
        }
        return parameters | {name: self._measured(name)[0] for name in self.widths}

    def run(self, rerun: Rerun, leaves: Mapping[str, Tensor]) -> list[_Call]:
        def multiply_by_others(copy: nn.Module) -> None:
            for name, bias in self._biases.items():
                vars(copy.get_submodule(name))["forward"] = _multiply_by(leaves[name], bias)

        parameters = {name: leaf for name, leaf in leaves.items() if name not in self.widths}
        calls = rerun(self._as_used(parameters), multiply_by_others)
        self.num_calls = len(calls)
        return calls

    def with_matrix(self, name: str, rerun: Rerun) -> "Weights":
        """Returns the same with a submodule as one matrix."""
        plain, widths = Weights(self.module, self.is_shared), []

        def note(_: nn.Module, args: Any, more: Any) -> None:
            if more or len(args) > 1:  # such as which of its matrices is meant
                raise LayoutUnavailable(f"'{name}' is called with more than its input")
            widths.append(args[0].shape[-1])

        def listen(copy: nn.Module) -> None:
            copy.get_submodule(name).register_forward_pre_hook(note, with_kwargs=True)

        rerun(plain._as_used(plain.leaves()), listen)
        return Weights(self.module, self.is_shared, {**self.widths, name: widths[-1]})

    def plain(self, name: str) -> list[nn.Parameter]:
        """Returns a parameter of that name as it is trained, and the bias that belongs to it."""
        try:
            found = self.module.get_parameter(name)
        except AttributeError:  # the module has changed since
            found = None
        if name in self.widths or found is None:
            raise LayoutUnavailable(f"'{name}' is made of several parameters")
        if isinstance(found, DTensor) or self.is_shared:
            raise LayoutUnavailable(f"'{name}' is shared by several ranks")
        # PyTorch's names: weight and bias of a Linear, in_proj_weight and in_proj_bias.
        owner, _, own = name.rpartition(".")
        bias = getattr(self.module.get_submodule(owner), f"{own.removesuffix('weight')}bias", None)
        has_bias = own.endswith("weight")
        return [found, bias] if has_bias and isinstance(bias, nn.Parameter) else [found]

    def _as_used(self, parameters: dict[str, Tensor]) -> dict[str, Tensor]:
        """Turns replacements of parameters into what the module multiplies by."""
        if not self.is_shared:
            return parameters
        own = dict(self.module.named_parameters())
        return {name: _as_part_of(own[name], tensor) for name, tensor in parameters.items()}

    def _here(self, parameter: Tensor) -> Tensor:
        """Returns what is here of a parameter; all ranks must ask for one that is sharded."""
        parameter = parameter.detach()
        if not isinstance(parameter, DTensor):
            return parameter
        return _part(parameter) if self.is_shared else _whole(parameter)

    def _measured(self, name: str) -> tuple[Tensor, Tensor]:
        """Matrix and bias of a submodule, run on zero, the unit vectors and, as a check, noise."""
        width = self.widths[name]
        submodule = self.module.get_submodule(name)
        tensors = {
            f"{name}.{key}": self._here(p).to(torch.float64, copy=True)
            for key, p in submodule.named_parameters()
        }
        used = {
            key.removeprefix(f"{name}."): tensor for key, tensor in self._as_used(tensors).items()
        }
        device = next(submodule.parameters()).device
        options = {"dtype": torch.float64, "device": device}
        noise = torch.randn(4, width, generator=torch.Generator(device).manual_seed(0), **options)
        unit = torch.eye(width, **options)

        def run() -> Tensor:
            with runnable_copy(submodule, used, torch.float64) as stand_in, torch.no_grad():
                for part in stand_in.modules():
                    part.training = False  # without dropout
                # As tokens of one sequence, so that a submodule that mixes tokens is found out.
                return stand_in(torch.cat([torch.zeros_like(unit[:1]), unit, noise])[None])[0]

        out = (_by_itself(run) if self.is_shared else run)()
        bias, columns, answers = out.split((1, width, len(noise)))
        columns = columns - bias
        distance = (answers - (noise @ columns + bias)).norm() / answers.norm()
        if not distance <= _AFFINE_TOLERANCE:
            raise LayoutUnavailable(
                f"'{name}' is not affine: on noise it differs from what it does to unit vectors by"
                f" {distance:.1e} (relative), at most {_AFFINE_TOLERANCE:.0e} is allowed"
            )
        return columns.T.float(), bias[0].float()


def _multiply_by(weight: Tensor, bias: Tensor) -> Callable[..., Tensor]:
    return lambda x, *_, **__: F.linear(x, weight, bias)


def settle(module: nn.Module, rerun: Rerun, is_shared: bool) -> tuple[Layout, Weights]:
    """Finds the rows of W_Q and W_K in a module's parameters, or in its submodules' matrices."""
    if is_shared or ranks.world_size() > 1:
        rerun = _by_itself(rerun)
    plain = Weights(module, is_shared)
    leaves = plain.leaves()  # once, as some ranks may make several calls, and others one
    layout, weights = _settle(plain, rerun, leaves)
    number = weights.num_calls
    if number > 1:
        several = f"{type(module).__name__} calls attention {number} times in one forward, with"
        have_same_queries, have_same_keys = _are_alike(plain, rerun, leaves)
        if not have_same_queries:
            raise LayoutUnavailable(f"{several} queries of different weights")
        if isinstance(layout.key, HeadRows) and not have_same_keys:
            key = LayoutUnavailable(f"{several} keys of different weights")
            layout = replace(layout, key=key, calls_are_alike=False)
    return layout, weights


def _are_alike(weights: Weights, rerun: Rerun, leaves: dict[str, Tensor]) -> list[bool]:
    """Whether q of all calls, and k, depend on the same rows of the same matrices."""
    matrices = {n: x.requires_grad_() for n, x in leaves.items() if x.dim() > 1}
    with torch.enable_grad():
        calls = weights.run(rerun, leaves)

    def sources(x: Tensor) -> dict[str, list[bool]]:
        if not x.requires_grad:
            return {}
        gradients = torch.autograd.grad(
            x.float().square().sum(), list(matrices.values()), retain_graph=True, allow_unused=True
        )
        found = zip(matrices, gradients, strict=True)
        return {name: (g.flatten(1) != 0).any(1).tolist() for name, g in found if g is not None}

    found = ([sources(x) for x in of_calls] for of_calls in zip(*calls, strict=True))
    return [bool(first) and all(other == first for other in others) for first, *others in found]


def _settle(weights: Weights, rerun: Rerun, leaves: dict[str, Tensor]) -> tuple[Layout, Weights]:
    def project(leaves: dict[str, Tensor]) -> _Call:
        return weights.run(rerun, leaves)[0]

    def with_one_matrix_more(
        owners: Iterable[str], size: int | None = None
    ) -> tuple[Layout, Weights] | None:
        for name in owners:
            try:
                more = weights.with_matrix(name, rerun)
                matrices = more.leaves()
                if size in (None, matrices[name].numel()):
                    return _settle(more, rerun, matrices)
            except Exception:
                continue  # not affine, or not to be run by itself: the first reason stands
        return None

    try:
        layout = find_layout(project, leaves)
    except NotOneMatrix as unavailable:
        settled = with_one_matrix_more(_owners(unavailable.parameters))
        if settled is not None:
            return settled
        layout = find_latent_layout(project, leaves, unavailable)
    for rows in (layout.query, layout.key):
        settled = None
        if isinstance(rows, HeadRows):
            around = _around(rows.parameter, leaves)
            settled = with_one_matrix_more(around, leaves[rows.parameter].numel())
        elif isinstance(rows, NotOneMatrix):
            settled = with_one_matrix_more(_owners(rows.parameters))
        if settled is not None:
            return settled
    return layout, weights


def _around(parameter: str, names: Iterable[str]) -> Iterator[str]:
    """Yields the submodules around a matrix, innermost first, that add parameters, used or not."""
    known, owner = {parameter, f"{parameter.rpartition('.')[0]}.bias"}, parameter
    while owner := owner.rpartition(".")[0]:
        within = {name for name in names if name.startswith(f"{owner}.")}
        if within - known:
            yield owner
        known |= within


def _owners(parameters: tuple[str, ...]) -> Iterator[str]:
    """Yields the names of the submodules that hold all these parameters, innermost first."""
    paths = [name.split(".")[:-1] for name in parameters]
    shared = [parts[0] for parts in zip(*paths, strict=False) if len(set(parts)) == 1]
    for depth in range(len(shared), 0, -1):
        yield ".".join(shared[:depth])


def why_sharded(modules: Sequence[nn.Module]) -> str | None:
    parameters = list(modules[0].parameters())
    names = {cls.__name__ for module in modules for cls in type(module).__mro__}
    matrices = [p for p in parameters if p.dim() > 1 and type(p).__name__ != "FlatParameter"]
    are_flat = "FullyShardedDataParallel" in names and not matrices
    if are_flat or any(p.numel() == 0 for p in parameters):
        return (
            "its parameters are empty or flat between forwards, as FSDP1 and ZeRO-3 shard them;"
            " they can be read under FSDP2 (fully_shard) or ZeRO stage 2"
        )
    return None


def why_quantised(module: nn.Module) -> str | None:
    for name, p in module.named_parameters():
        if hasattr(p, "quant_state") or not (p.is_floating_point() or p.is_complex()):
            kind = str(p.dtype).removeprefix("torch.")
            return (
                f"the base weight '{name}' is quantised (kept as {kind}); W_Q can be read where the"
                " base model is not, as in LoRA"
            )
    return None


def _whole(parameter: DTensor) -> Tensor:
    mesh, own = parameter.device_mesh, parameter.to_local()
    is_even = mesh.ndim == 1 and len(parameter) % mesh.size() == 0
    if not is_even or parameter.placements[0] != Shard(0) or type(own) is not Tensor:
        return parameter.full_tensor()
    # As `full_tensor`, which takes five times as long on the host.
    whole = own.new_empty(parameter.shape)
    everywhere: Any = torch.distributed  # the latter is deprecated from 2.13 on
    gather = getattr(everywhere, "all_gather_single", None) or everywhere.all_gather_into_tensor
    gather(whole, own.contiguous(), mesh.get_group())
    return whole


def _part(parameter: DTensor) -> Tensor:
    """Returns this rank's part of a parameter under tensor parallelism."""
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


class _WithoutExchange(private.dispatch_mode):
    """Refuses what ranks must do together: each runs its copy of the module by itself."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # the operations on its local parts come here in turn
        if "c10d" in func.namespace:
            raise HeadsExchanged("ranks exchange tensors before it calls attention")
        return func(*args, **(kwargs or {}))


def _by_itself(function: Callable[..., T]) -> Callable[..., T]:
    def alone(*args: Any) -> T:
        return within(_WithoutExchange(), lambda: function(*args))

    return alone
