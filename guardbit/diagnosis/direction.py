"""How large an error of dQ is, and whether it adds up: over rows, sequences and steps.

W_Q gets the sum over rows of dQ^T x, x the layer's input; so an error of dQ does harm by its own
sum, E. Where x is not known, q = W_Q x stands in for it: E is then the error of dW_Q times W_Q^T.
"""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from guardbit.diagnosis.head import HeadInputs


@dataclass(frozen=True, eq=False)
class Measures:
    """Sums over rows of an error of dQ; two of different rows can be added.

    u is the direction of the head in which its W_Q is largest. A row's push is what its error adds
    to that singular value in gradient descent, -(error . u)(q . u); see `w_q_push`.

    Attributes:
        error_squares: Of the norms of the error.
        exact_squares: Of the norms of the exact dQ.
        push: Of the pushes, with their signs.
        push_squares: Of the squares of the pushes.
        exact_push: Of the sizes of what exact rows push.
        exact_drift: Of the same with their signs.
        matrix: FP64 `(D, C)`, E.
        parts: Of the norms of E of single sequences: those of E if they were all alike.
        along: FP64 `(D,)`, u. Of two steps, the first one's.
    """

    error_squares: float
    exact_squares: float
    push: float
    push_squares: float
    exact_push: float
    exact_drift: float
    matrix: Tensor
    parts: float
    along: Tensor

    def __add__(self, other: Measures) -> Measures:
        sums: dict[str, Any] = {
            field.name: getattr(self, field.name) + getattr(other, field.name)
            for field in fields(self)
            if field.name != "along"
        }
        return Measures(**sums, along=self.along)

    @property
    def relative_error(self) -> float:
        """Norm of the error over that of the exact dQ."""
        return math.sqrt(_ratio(self.error_squares, self.exact_squares))

    @property
    def push_share(self) -> float:
        """The push over what exact rows push, sizes taken; above 0 W_Q grows."""
        return _ratio(self.push, self.exact_push)

    @property
    def drift_share(self) -> float:
        """The same of the exact gradient: above 0 it lets W_Q grow by itself."""
        return _ratio(self.exact_drift, self.exact_push)

    @property
    def significance(self) -> float:
        """The push in standard deviations of a sum of rows with random signs."""
        return _ratio(self.push, math.sqrt(self.push_squares))

    @property
    def summed(self) -> float:
        """Norm of E."""
        return float(self.matrix.norm())

    @property
    def coherence(self) -> float:
        """Norm of E over the sum of those of single sequences: 1 where all are alike."""
        return _ratio(self.summed, self.parts)

    @property
    def rank_one(self) -> float:
        """The part of E, in squares, that its largest singular value has."""
        values = torch.linalg.svdvals(self.matrix)
        return _ratio(float(values[0].square()), float(values.square().sum()))

    @property
    def angle(self) -> float:
        """Between E's largest direction in the head's space and u, 0 to 90 degrees."""
        left = torch.linalg.svd(self.matrix, full_matrices=False)[0][:, 0]
        return math.degrees(math.acos(min(1.0, abs(float(left @ self.along)))))


def top_direction(head: HeadInputs) -> Tensor:
    """Returns u, FP64 `(D,)`; where it is not known, the direction in which queries are largest."""
    if head.direction is not None and bool(head.direction.any()):
        return head.direction.double()
    wide = head.q.flatten(0, 1).double()
    return torch.linalg.eigh(wide.mT @ wide).eigenvectors[:, -1]


class Measuring:
    """Adds up an error of dQ, chunk of rows by chunk of rows."""

    def __init__(self, head: HeadInputs) -> None:
        self._along = top_direction(head)
        self._sums: defaultdict[str, float] = defaultdict(float)
        inputs = head.q if head.x is None else head.x
        size = len(head.q), head.q.size(-1), inputs.size(-1)
        self._matrices = torch.zeros(size, dtype=torch.float64, device=head.q.device)

    def add(self, rows: HeadInputs, dq: Tensor, exact: Tensor) -> None:
        """Takes some rows."""
        error, q = dq - exact, rows.q.double()
        q_along = q @ self._along
        push = -(error @ self._along) * q_along
        exact_push = -(exact @ self._along) * q_along
        sums = {
            "error_squares": error.square(),
            "exact_squares": exact.square(),
            "push": push,
            "push_squares": push.square(),
            "exact_push": exact_push.abs(),
            "exact_drift": exact_push,
        }
        for name, values in sums.items():
            self._sums[name] += float(values.sum())
        self._matrices += error.mT @ (q if rows.x is None else rows.x.double())

    def done(self) -> Measures:
        """Returns what all rows gave."""
        parts = float(self._matrices.flatten(1).norm(dim=1).sum())
        return Measures(**self._sums, matrix=self._matrices.sum(0), parts=parts, along=self._along)


def _ratio(part: float, whole: float) -> float:
    """0 / 0 is 0: no error of nothing."""
    if whole == 0:
        return 0.0 if part == 0 else math.copysign(math.inf, part)
    return part / whole
