"""Finds modules that look like attention and never reach the functions GuardBit replaces."""

import inspect
import re
from collections.abc import Mapping
from functools import lru_cache

from torch import nn

from guardbit.kernels.engines import hub_kernel_is_loaded

# Hugging Face's names of attention that GuardBit may not see. It sees "eager" in
# models that get it from the interface. Kernels of the hub have the name of their repository, with
# a slash; GuardBit sees FlashAttention's once they are loaded.
_UNSEEN_IMPLEMENTATIONS = re.compile(r"eager|.*/")

_ATTENTION = re.compile("attention|attn|mha|mhsa|^multi_?head$", re.IGNORECASE)

# As the last word only: "mla" is in "NormLayer", and an `MLAHead` may be anything.
_WORDS = re.compile(r"[A-Z]+(?![a-z])|[A-Z][a-z]+|[a-z]+")
_KINDS_OF_ATTENTION = frozenset({"gqa", "mqa", "mla", "msa", "sdpa"})

# The last word of a module's name in its parent: `self_attn`, but not `attn_norm`.
_SLOTS = frozenset({"attn", "attention", "mha"}) | _KINDS_OF_ATTENTION

# What a module without parameters is that is called by attention and another word.
_PARTS = frozenset({
    "mask", "bias", "norm", "pool", "output", "config", "scale", "dropout", "cache",
    "rotary", "softmax",
})  # fmt: skip


class UnseenAttentionError(ValueError):
    """The model calls no attention that GuardBit sees, so nothing can be watched."""


def looks_like_attention(module: nn.Module, name: str = "") -> bool:
    """Whether a module is called attention, and has a weight matrix, its own or below it."""
    kind = type(module).__name__
    words = [word.lower() for word in _WORDS.findall(kind)]
    if _ATTENTION.search(kind) or not _KINDS_OF_ATTENTION.isdisjoint(words[-1:]):
        is_bare = next(module.parameters(), None) is None
        return has_matrix(module) or (is_bare and _PARTS.isdisjoint(words[-1:]))
    last = name.rpartition(".")[2].rpartition("_")[2].lower()
    return last in _SLOTS and any(has_matrix(part) for part in module.children())


def has_matrix(module: nn.Module) -> bool:
    return any(parameter.dim() >= 2 for parameter in module.parameters())


def unseen_implementation(module: nn.Module) -> str | None:
    """Returns Hugging Face's name of a module's attention that GuardBit does not see, or None."""
    implementation = _implementation(module)
    if implementation is None or not _UNSEEN_IMPLEMENTATIONS.match(implementation):
        return None
    if implementation == "eager" and any(_is_eager_seen(type(x)) for x in module.modules()):
        return None
    return None if "/" in implementation and hub_kernel_is_loaded() else implementation


@lru_cache(maxsize=1024)
def _is_eager_seen(kind: type[nn.Module]) -> bool:
    """Whether modules of a type get attention from Hugging Face's interface."""
    forward = inspect.unwrap(getattr(kind, "forward", lambda: None))
    return "get_interface" in getattr(getattr(forward, "__code__", None), "co_names", ())


def refuse_unseen(candidates: Mapping[str, nn.Module]) -> None:
    """Refuses a Hugging Face model none of whose attention calls a replaced function."""
    unseen: dict[nn.Module, str] = {}
    for module in candidates.values():
        if _implementation(module) is not None:
            name = unseen_implementation(module)
            if name is None:
                return
            unseen[module] = name
    inside = {part for module in unseen for part in module.modules()}
    holds_one = [
        module for module in candidates.values() if not inside.isdisjoint(module.modules())
    ]
    if unseen and len(holds_one) == len(candidates):
        module, implementation = next(iter(unseen.items()))
        if not any(looks_like_attention(part) for part in inside):
            raise UnseenAttentionError(
                f"{type(module).__name__} has no module that looks like attention, so there are no"
                " heads to watch"
            )
        written_out = ": the model writes it out, so delta is not rounded: nothing to correct"
        raise UnseenAttentionError(
            f"{type(module).__name__} computes attention with"
            f" attn_implementation='{implementation}', which GuardBit does not see"
            f"{written_out * (implementation == 'eager')}. It sees 'sdpa', and observe's calls"
        )


def _implementation(module: nn.Module) -> str | None:
    implementation = getattr(getattr(module, "config", None), "_attn_implementation", None)
    of_transformers = type(module).__module__.startswith("transformers.")
    return implementation if of_transformers and isinstance(implementation, str) else None
