"""How a kernel rounds: which of the operations of attention keep FP32, and which do not."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Literal

import torch
from torch import Tensor

from guardbit.numerics import round_nearest

#: What can be rounded, in the order of the computation. P is that of the forward's product with V,
#: PV that product before it is divided by the sum of P.
Operation = Literal["S", "P", "PV", "O", "delta", "dP", "dS", "dQ"]
OPERATIONS: tuple[Operation, ...] = ("S", "P", "PV", "O", "delta", "dP", "dS", "dQ")

#: To the format of the inputs; what is not rounded stays as it is.
Rounding = Literal["nearest", "truncated"]

#: Where delta comes from: rowsum(dO O) of the returned O, rowsum(P dP), or nowhere: it is 0.
DeltaSource = Literal["output", "probabilities", "dropped"]


@dataclass(frozen=True)
class Arithmetic:
    """How the operations of one kernel round.

    Attributes:
        roundings: Of the operations that round.
        delta: Where delta is taken from.
    """

    roundings: Mapping[Operation, Rounding] = field(default_factory=dict)
    delta: DeltaSource = "output"

    def __post_init__(self) -> None:
        object.__setattr__(self, "roundings", MappingProxyType(dict(self.roundings)))

    def with_rounding(self, operation: Operation, rounding: Rounding | None) -> Arithmetic:
        """Returns this arithmetic with one operation rounded otherwise; None for not at all."""
        roundings = {name: how for name, how in self.roundings.items() if name != operation}
        if rounding is not None:
            roundings[operation] = rounding
        return replace(self, roundings=roundings)

    def without(self, operation: Operation) -> Arithmetic:
        """Returns this arithmetic with one operation in full precision, or with exact delta."""
        if operation == "delta":
            return replace(self.with_rounding("delta", None), delta="probabilities")
        return self.with_rounding(operation, None)

    def rounded(self, operation: Operation, x: Tensor, dtype: torch.dtype) -> Tensor:
        """Returns FP64 numbers as this operation leaves them, FP64."""
        how = self.roundings.get(operation)
        if how is None:
            return x
        return (round_nearest if how == "nearest" else truncate)(x, dtype).double()


#: FlashAttention-2's (paper, Algorithms 1 and 2), on which all engines agree.
FLASH = Arithmetic({"P": "nearest", "O": "nearest", "dS": "nearest", "dQ": "nearest"})

#: No rounding at all.
EXACT = Arithmetic()


def truncate(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Rounds towards zero."""
    nearest = round_nearest(x, dtype)
    # One less in the bits, which hold sign and magnitude, is one step towards zero.
    too_large = (nearest.to(x.dtype).abs() > x.abs()).to(torch.int16)
    return (nearest.view(torch.int16) - too_large).view(dtype)
