"""Weights that ranks share: this rank's part of them, and their heads' Gram matrices.

Where FSDP2 shards a weight, ranks exchange Gram matrices, which are far smaller; each head's is
computed by one rank. Only the heads whose rows lie on several ranks are gathered first.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.distributed
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor, Placement, Shard
from torch.distributed.tensor.placement_types import _StridedShard
from torch.utils._python_dispatch import TorchDispatchMode

from guardbit.guard import within
from guardbit.monitor.layouts import HeadRows, HeadsExchanged, LayoutUnavailable

T = TypeVar("T")


class HeadShards:
    """A rank's part of each head's rows, FP32.

    If the input axis is sharded, a rank has some columns of all heads, and the ranks' Gram matrices
    add up to those of the whole rows. Otherwise it has some rows, and computes the heads whose
    first row is here.
    """

    def __init__(self, rows: HeadRows, axis: int, group: ProcessGroup) -> None:
        self._rows = rows
        self._group = group
        self._device = rows.rows.device
        own = group.rank()
        size = -(-rows.shape[axis] // group.size())
        self._is_whole_rows = axis != rows.input_axis
        if not self._is_whole_rows:
            self._counted = torch.arange(len(rows.rows), device=self._device)
            return
        others = (n for i, n in enumerate(rows.shape) if i not in (axis, rows.input_axis))
        size *= math.prod(others)
        holder = rows.rows // size
        self._is_here = holder == own
        self._local = rows.rows - own * size
        is_split = (holder != holder[:, :1]).any(dim=1)
        self._split = is_split.nonzero()[:, 0]
        self._whole = (self._is_here[:, 0] & ~is_split).nonzero()[:, 0]
        self._own_split = self._is_here[self._split, 0].nonzero()[:, 0]
        self._counted = torch.cat([self._whole, self._split[self._own_split]])

    def gram_matrices(self, shard: Tensor, of: Callable[[Tensor], Tensor]) -> Tensor:
        """Returns the Gram matrices of all heads; all ranks of the group call it together."""
        own = of(self._counted_rows(shard.movedim(self._rows.input_axis, -1).flatten(0, -2)))
        grams = own.new_zeros(len(self._rows.rows), *own.shape[1:])
        grams.index_copy_(0, self._counted, own)
        torch.distributed.all_reduce(grams, group=self._group)
        return grams

    def _counted_rows(self, matrix: Tensor) -> Tensor:
        if not self._is_whole_rows:
            return matrix[self._rows.rows].float()
        whole = matrix[self._local[self._whole]].float()
        if not len(self._split):
            return whole
        is_here = self._is_here[self._split]
        split = matrix.new_zeros(*is_here.shape, matrix.size(1), dtype=torch.float32)
        split[is_here] = matrix[self._local[self._split][is_here]].float()
        torch.distributed.all_reduce(split, group=self._group)
        return torch.cat([whole, split[self._own_split]])


def shards_of(rows: HeadRows, parameter: DTensor, is_shared: bool) -> HeadShards | None:
    """Returns how the ranks share heads' rows, or None if the weight is read as a whole."""
    mesh, placements = parameter.device_mesh, list(parameter.placements)
    shape, of_heads = list(parameter.shape), None
    if is_shared:
        of_heads = _axis(placements.pop())
        if of_heads is not None and shape[of_heads] % mesh.size(-1) == 0:
            shape[of_heads] //= mesh.size(-1)
    if tuple(shape) != rows.shape:
        raise rows.other_shape(f"which now is a part of {tuple(parameter.shape)}")
    sharded = [(dim, at) for dim, at in enumerate(placements) if not at.is_replicate()]
    if len(sharded) != 1:
        return None
    dim, at = sharded[0]
    axis = _axis(at)
    first = min(i for i in range(len(rows.shape)) if i != rows.input_axis)
    if axis not in (first, rows.input_axis):
        return None
    # FSDP shards the part that tensor parallelism has left on this rank; other orders are unknown.
    if is_shared and (axis == of_heads) != isinstance(at, _StridedShard):
        return None
    return HeadShards(rows, axis, mesh.get_group(dim))


def _axis(placement: Placement) -> int | None:
    return placement.dim if isinstance(placement, Shard | _StridedShard) else None


def whole_of(parameter: Tensor) -> Tensor:
    """Returns a parameter, detached; all ranks must ask for one that is sharded."""
    parameter = parameter.detach()
    return parameter.full_tensor() if isinstance(parameter, DTensor) else parameter


def part_of(parameter: Tensor) -> Tensor:
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


def as_part_of(parameter: Tensor, part: Tensor) -> Tensor:
    """Returns the DTensor whose local part is what `part_of` returns of a parameter."""
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


def by_itself(function: Callable[..., T]) -> Callable[..., T]:
    """Returns the function without exchanges with other ranks."""

    def alone(*args: Any) -> T:
        # Were the mode to stay, it would refuse the exchange of gradients.
        return within(_WithoutExchange(), lambda: function(*args))

    return alone
