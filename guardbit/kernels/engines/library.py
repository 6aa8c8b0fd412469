"""What engines of libraries have in common: functions of their own, packed sequences.

Libraries lay tensors out as `(B, N, H, D)`, packed ones as `(T, H, D)` with the places of the
documents beside them. An engine gets `(B, H, N, D)` like all others; what it hands on are views.

What a library offers differs from release to release, so its functions are called by the names of
their parameters, of those that this release knows.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Mapping
from functools import cached_property, lru_cache
from typing import Any

import torch
from torch import Tensor
from torch._library.custom_ops import CustomOpDef
from torch._ops import OpOverload, OpOverloadPacket

from guardbit.kernels.engines.base import Engine
from guardbit.kernels.spec import AttentionSpec

_IS_ROCM = torch.version.hip is not None


class LibraryEngine(Engine):
    """The kernels of a library, with the arguments its own functions would have called them with.

    Args:
        deterministic: Whether the backward is to add in a fixed order, where that is a choice.
    """

    #: What telemetry calls it.
    label: str
    #: Whether a call with dropout tells where its random numbers came from.
    drops: bool = False

    def __init__(self, deterministic: bool = False) -> None:
        self.deterministic = deterministic

    @cached_property
    def name(self) -> str:
        """The library's name, as telemetry tells it."""
        return self.label

    @property
    def title(self) -> str:
        """What messages call its kernel."""
        return f"the kernel of {self.label}"

    def why_missing(self, is_packed: bool) -> str | None:
        """Why it cannot be called as it is installed, a clause, or None.

        Args:
            is_packed: Whether for packed sequences, which may have functions of their own.
        """
        # There LSE may lie otherwise.
        return f"GuardBit does not know {self.label} for ROCm" if _IS_ROCM else None


def to_library_layout(x: Tensor, spec: AttentionSpec) -> Tensor:
    """Views `(B, H, N, D)` as libraries have it."""
    return x.transpose(1, 2) if spec.documents is None else x.squeeze(0).transpose(0, 1)


def from_library_layout(x: Tensor, spec: AttentionSpec) -> Tensor:
    """Undoes `to_library_layout`."""
    return x.transpose(1, 2) if spec.documents is None else x.transpose(0, 1).unsqueeze(0)


def found(home: str, attribute: str) -> Callable[..., Any] | None:
    """A function of a library, if the library is imported and has it."""
    return getattr(sys.modules.get(home), attribute, None)


@lru_cache(maxsize=64)
def parameters(function: Callable[..., Any]) -> Mapping[str, bool]:
    """The names of a function's or an op's parameters, each with whether it has a default."""
    if isinstance(function, CustomOpDef):
        function = function._opoverload
    if isinstance(function, OpOverloadPacket):
        function = getattr(function, function.overloads()[0])
    if isinstance(function, OpOverload):
        return {x.name: x.has_default_value() for x in function._schema.arguments}
    named = inspect.signature(function).parameters.items()
    several = inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD
    return {
        name: x.default is not inspect.Parameter.empty for name, x in named if x.kind not in several
    }


def call(function: Callable[..., Any] | None, **arguments: Any) -> Any:
    """Calls a library's function with those of some arguments that it knows.

    What it asks for besides is None.
    """
    assert function is not None
    known = parameters(function)
    given = {name: x for name, x in arguments.items() if name in known}
    asked = {name: None for name, has_default in known.items() if not has_default}
    return function(**{**asked, **given})


def nothing_like(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Memory for gradients, whose rows are to be whole."""
    return tuple(torch.empty_like(x, memory_format=torch.contiguous_format) for x in tensors)
