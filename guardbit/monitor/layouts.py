"""Which rows of which parameters make the queries and keys of each attention head."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

Side = Literal["query", "key"]


class LayoutUnavailable(LookupError):
    """It is unknown which weights make a head's queries or keys; the message says why."""


class HeadsExchanged(LayoutUnavailable):
    """Ranks exchange tensors before attention, so that it is unknown which heads a call has."""


class NotOneMatrix(LayoutUnavailable):
    """The matrix that multiplies the input is not one parameter.

    Attributes:
        parameters: Names of the parameters that the matrix is made of.
    """

    def __init__(self, why: str, parameters: Iterable[str]) -> None:
        super().__init__(why)
        self.parameters = tuple(parameters)


@dataclass(frozen=True, slots=True, eq=False)
class HeadRows:
    """The rows of one parameter that project each head's queries, or keys.

    A row is an output feature: the parameter with its input axis moved last and all its other
    axes flattened, `(features, d_model)`.

    Attributes:
        parameter: Name of the parameter.
        shape: Its shape when the rows were found.
        input_axis: The axis that is contracted with the module's input.
        rows: `(heads, d_head)`, int64, ascending in each head, on the parameter's device.
    """

    parameter: str
    shape: tuple[int, ...]
    input_axis: int
    rows: Tensor

    def weights(self, parameters: Mapping[str, Tensor]) -> Tensor:
        """Gathers every head's rows from the current parameters."""
        return self._matrix(parameters)[self.rows].float()

    def weight(self, parameters: Mapping[str, Tensor], head: int) -> Tensor:
        """Gathers the rows of one head: `(d_head, d_model)`, FP32, detached."""
        heads = self.rows.shape[0]
        try:
            head = operator.index(head)
        except TypeError:
            raise TypeError(f"head is {head!r}; it must be a whole number") from None
        if not 0 <= head < heads:
            raise IndexError(f"head must be in 0..{heads - 1}, got {head}")
        return self._matrix(parameters)[self.rows[head]].float()

    def spread(self, factors: Tensor, parameter: Tensor) -> Tensor:
        """Lays one factor a head out along the features of a parameter."""
        is_bias = parameter.dim() < len(self.shape)
        features = [n for axis, n in enumerate(self.shape) if axis != self.input_axis]
        flat = parameter.new_ones(math.prod(features))
        flat[self.rows] = factors.to(flat)[:, None].expand(self.rows.shape)
        return flat if is_bias else flat.view(features).unsqueeze(self.input_axis)

    def _matrix(self, parameters: Mapping[str, Tensor]) -> Tensor:
        if self.parameter not in parameters:
            raise ValueError(
                f"parameters must hold '{self.parameter}', where the heads' rows lie; "
                f"got {listed(parameters)}"
            )
        parameter = parameters[self.parameter].detach()
        if parameter.shape != self.shape:
            # A shard of the parameter has rows of the same numbers that belong to other heads.
            raise LayoutUnavailable(
                f"the heads' rows were found in '{self.parameter}' of shape {self.shape}, "
                f"which now has shape {tuple(parameter.shape)}"
            )
        return parameter.movedim(self.input_axis, -1).flatten(0, -2)


@dataclass(frozen=True, slots=True, eq=False)
class Layout:
    """Where the rows of W_Q and W_K of every head of one attention module lie.

    Attributes:
        query: The query heads' rows.
        key: The key heads' rows, or why they could not be settled. Heads that share a key head
            share rows when the module expands the keys before attention.
        normalises_queries: Whether each head's queries are normalised on their way to attention,
            so that the size of its rows of W_Q does not reach the scores.
        is_latent: Whether the rows of W_Q are applied to a normalised latent vector, and not to
            what the module is given.
        calls_are_alike: Whether all calls of one forward have queries and keys of these rows.
    """

    query: HeadRows
    key: HeadRows | LayoutUnavailable
    normalises_queries: bool = False
    is_latent: bool = False
    calls_are_alike: bool = True

    @property
    def key_rows(self) -> HeadRows:
        """The key heads' rows; raises `LayoutUnavailable` where they could not be settled."""
        if isinstance(self.key, LayoutUnavailable):
            raise self.key
        return self.key


def listed(names: Iterable[str]) -> str:
    return ", ".join(f"'{name}'" for name in names) or "none"
