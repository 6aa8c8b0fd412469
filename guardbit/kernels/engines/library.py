"""What the engines of libraries share: how their functions are called, and packed sequences.

Libraries lay tensors out as `(B, N, H, D)`, and packed sequences as `(T, H, D)` with the bounds of
the documents. An engine gets `(B, H, N, D)`, as all engines do, and hands on views.

The parameters of a library's functions differ between releases. So they are called by keyword, with
the keywords that the installed release has.
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
from torch.nn.attention import SDPBackend

from guardbit.kernels.engines.base import Engine
from guardbit.kernels.spec import AttentionSpec

#: The parameters by which a call chooses how its work is spread, where its library has them.
SCHEDULING = ("num_splits", "pack_gqa", "sm_margin")

_IS_ROCM = torch.version.hip is not None


class LibraryEngine(Engine):
    """The kernels of a library, called with the arguments that its own functions would pass."""

    #: PyTorch has no name for it.
    backend = SDPBackend.OVERRIDEABLE
    #: Its name in telemetry.
    label: str
    #: The module that `guardbit doctor` imports for it; "" where no name is known.
    home: str = ""
    #: Whether a call with dropout returns where its random numbers came from.
    drops: bool = False

    def __init__(self, deterministic: bool = False, scheduling: tuple[int, ...] = ()) -> None:
        self.deterministic = deterministic
        self.scheduling = scheduling
        named = zip(SCHEDULING, scheduling, strict=False)
        self.scheduled = {
            name: bool(x) if name == "pack_gqa" else x for name, x in named if x != -1
        }

    @cached_property
    def name(self) -> str:
        """The library's name, as telemetry has it."""
        return self.label

    @property
    def title(self) -> str:
        """What messages call its kernel."""
        return f"the kernel of {self.label}"

    def why_missing(self, is_packed: bool) -> str | None:
        """Returns why the installed release cannot be called, a clause, or None."""
        # On ROCm, LSE may have another layout.
        return f"GuardBit does not know {self.label} for ROCm" if _IS_ROCM else None


def to_library_layout(x: Tensor, spec: AttentionSpec) -> Tensor:
    """Returns a view of `(B, H, N, D)` in the layout of libraries."""
    return x.transpose(1, 2) if spec.documents is None else x.squeeze(0).transpose(0, 1)


def from_library_layout(x: Tensor, spec: AttentionSpec) -> Tensor:
    """Undoes `to_library_layout`."""
    return x.transpose(1, 2) if spec.documents is None else x.transpose(0, 1).unsqueeze(0)


def found(home: str, attribute: str) -> Callable[..., Any] | None:
    """Returns a function of a library, or None if the library is not imported or lacks it."""
    return getattr(sys.modules.get(home), attribute, None)


@lru_cache(maxsize=64)
def parameters(function: Callable[..., Any]) -> Mapping[str, bool]:
    """Returns a function's or an op's parameters, and for each whether it has a default."""
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
    """Calls a library's function with the arguments that it has parameters for."""
    assert function is not None
    known = parameters(function)
    given = {name: x for name, x in arguments.items() if name in known}
    asked = {name: None for name, has_default in known.items() if not has_default}
    return function(**{**asked, **given})


def nothing_like(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Returns empty, contiguous tensors for gradients."""
    return tuple(torch.empty_like(x, memory_format=torch.contiguous_format) for x in tensors)
