"""Whether a module holds a part of its heads only, because several ranks share them."""

from __future__ import annotations

from torch import nn
from torch.distributed.tensor import DTensor

#: Why nothing is known of single heads where tensor parallelism shares them out.
SHARDED = (
    "tensor parallelism spreads its heads over several ranks, each of which sees its own as heads"
    " 0, 1, ...; GuardBit cannot number them yet"
)


def why_sharded(module: nn.Module) -> str | None:
    """Why the heads of a module that is running are not all here, or None.

    FSDP gathers the parameters of a module while it runs: what is sharded then, ranks share out.
    """
    for part in _gathered(module):
        for parameter in part.parameters(recurse=False):
            if isinstance(parameter, DTensor) and any(p.is_shard() for p in parameter.placements):
                return SHARDED
    return None


def _gathered(module: nn.Module) -> list[nn.Module]:
    """A module and what is below it, without what FSDP gathers on its own, when that runs."""
    parts = [module]
    for child in module.children():
        if not hasattr(child, "_get_fsdp_state"):
            parts += _gathered(child)
    return parts
