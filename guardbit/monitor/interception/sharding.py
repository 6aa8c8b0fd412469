"""Which heads of a module are on this rank under tensor parallelism.

Ranks share heads in equal blocks, in the order of the mesh. With n ranks of H heads each, local
head h of rank i is head i * H + h of all n * H.
"""

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

_RING = (
    "context parallelism spreads its tokens over several ranks, so that no rank has whole rows of"
    " its scores; of its sites only the norms of the weights are watched"
)
_SPREAD = "tensor parallelism spreads its weights over several ranks"
_OTHERWISE = f"{_SPREAD}, and its tensors in another way than by equal parts of batch and heads"
_UNCLEAR = (
    f"{_SPREAD}, and their shapes do not tell which of the heads are here; GuardBit numbers heads"
    " that are shared out in equal blocks over one dimension of the mesh"
)


class Share(NamedTuple):
    """The part of the heads that is on this rank: its place among so many parts, from 0."""

    place: int
    parts: int


#: Meshes, their dimensions and the placements by which ranks spread a module's weights.
Spread = frozenset[tuple[DeviceMesh, int, Placement]]

#: All heads.
WHOLE = Share(0, 1)


def share_of(module: nn.Module, heads: tuple[int, int, int]) -> Share | str:
    """Returns which heads of a running module are on this rank, or why that is unknown."""
    spread = _spread(module)
    if parts_of(module) <= 1:
        return WHOLE
    shards = [(p, at.dim) for p, _, at in spread if isinstance(at, Shard)]
    places = {(p.device_mesh, dim) for p, dim, _ in spread}
    num_heads, num_key_heads, head_dim = heads
    if len(places) != 1 or len(shards) != len(spread) or not num_heads:
        return _UNCLEAR
    # Weights are (features out, features in): the output projection is sharded along the second.
    along = [(p, axis) for p, axis in shards if axis == 1] or shards
    queries, fused = num_heads * head_dim, (num_heads + 2 * num_key_heads) * head_dim
    of_part = {p.to_local().size(axis) for p, axis in along}
    of_all = {p.size(axis) for p, axis in along}
    is_fused = fused in of_part - of_all and queries not in of_part
    if queries in of_all or not (queries in of_part or is_fused):
        return _UNCLEAR
    parameter, dim, _ = spread[0]
    return _share_along(parameter, dim)


def parts_of(module: nn.Module) -> int:
    """Returns over how many ranks tensor parallelism spreads a running module's weights, or 0."""
    return max((p.device_mesh.size(dim) for p, dim, _ in _spread(module)), default=0)


def spread_of(module: nn.Module) -> Spread:
    """Returns how ranks spread a module's weights: all of them, if it is not running."""
    return frozenset((p.device_mesh, dim, placement) for p, dim, placement in _spread(module))


def share_of_tensors(tensors: Sequence[Tensor], heads_axis: int) -> Share | str:
    """Returns which heads of some `DTensor`s are on this rank, or why that is unknown."""
    first = tensors[0]
    if not isinstance(first, DTensor):
        return _OTHERWISE
    if any(isinstance(at, Shard) and at.dim == 3 - heads_axis for at in first.placements):
        return _RING
    layout = first.device_mesh, first.placements
    are_alike = all(
        isinstance(x, DTensor) and (x.device_mesh, x.placements) == layout for x in tensors
    )
    dims = [dim for dim, p in enumerate(first.placements) if p == Shard(heads_axis)]
    known = {Shard(heads_axis), Shard(0), Replicate()}
    if not are_alike or len(dims) != 1 or not known.issuperset(first.placements):
        return _OTHERWISE
    for dim, at in enumerate(first.placements):
        size = first.device_mesh.size(dim)
        if isinstance(at, Shard) and any(x.size(at.dim) % size for x in tensors):
            return _OTHERWISE
    return _share_along(first, dims[0])


def _share_along(tensor: DTensor, dim: int) -> Share:
    return Share(tensor.device_mesh.get_local_rank(dim), tensor.device_mesh.size(dim))


def _spread(module: nn.Module) -> list[tuple[DTensor, int, Placement]]:
    """The parameters that ranks share, each with the mesh dimension and the placement."""
    return [
        (parameter, dim, placement)
        for part in _gathered(module)
        for parameter in part.parameters(recurse=False)
        if isinstance(parameter, DTensor)
        for dim, placement in enumerate(parameter.placements)
        if not placement.is_replicate()
    ]


def _gathered(module: nn.Module) -> list[nn.Module]:
    """A module and its submodules, except those that FSDP gathers separately when they run."""
    parts = [module]
    for child in module.children():
        if not hasattr(child, "_get_fsdp_state"):
            parts += _gathered(child)
    return parts
