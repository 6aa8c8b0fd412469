"""Which modules of a model may call attention, and what they are called."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import nn

# Where wrappers of `torch.compile`, of activation checkpointing as FSDP applies it, and of Fabric
# keep the module they wrap: a site goes by the same name with them and without.
_WRAPPERS = ("_orig_mod", "_checkpoint_wrapped_module", "_forward_module")

# The modules of torch.nn that call attention themselves; its others never do.
_ATTENTION_OF_TORCH = (
    nn.MultiheadAttention,
    nn.Transformer,
    nn.TransformerDecoder,
    nn.TransformerDecoderLayer,
    nn.TransformerEncoder,
    nn.TransformerEncoderLayer,
)


def is_of_fabric(module: nn.Module) -> bool:
    """Whether a module is what `Fabric.setup` returns."""
    owner = type(module).__module__
    return type(module).__name__ == "_FabricModule" and owner.endswith("fabric.wrappers")


def candidates_of(model: nn.Module) -> Iterable[tuple[str, nn.Module]]:
    """Names and modules of a model that may call attention, in its order."""
    for name, module in model.named_modules():
        of_torch = type(module).__module__.startswith("torch.nn.modules.")
        if of_torch and not isinstance(module, _ATTENTION_OF_TORCH):
            continue
        if isinstance(module, torch._dynamo.eval_frame.OptimizedModule):
            continue  # a wrapper around the module that matters
        if isinstance(module, torch.jit.ScriptModule):
            continue  # its calls never come back to Python
        if is_of_fabric(module):
            continue  # as above; attributes that it is given go to the module it wraps
        parts = [part for part in name.split(".") if part not in _WRAPPERS]
        yield ".".join(parts) or type(module).__name__, module


def around(name: str, model: nn.Module) -> Iterator[str]:
    """Names of the modules around the one called `name`, innermost first, as in `candidates_of`."""
    while "." in name:
        name = name.rpartition(".")[0]
        yield name
    yield type(getattr(model, "_orig_mod", model)).__name__
