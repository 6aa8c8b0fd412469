"""One row taken apart: where the error of its delta comes from (paper, figures 5 and 6)."""

from __future__ import annotations

from typing import NamedTuple

import torch

from guardbit.diagnosis.arithmetic import Arithmetic
from guardbit.diagnosis.attention import Chunk, rows_of
from guardbit.diagnosis.head import HeadInputs


class RowError(NamedTuple):
    """The error of a row's output, by columns, and that of one column's sum, by keys.

    Attributes:
        sequence: Number of the sequence.
        position: Of the row in it.
        d_out: dO, of each column of V.
        out_error: O as the kernel has it less the exact one, of each column. The error of delta is
            the sum of their products.
        column: The one whose product is largest in size.
        first: Position of the first key below.
        values: That column of V, by key.
        weights: exp(S - m), rounded as the kernel rounds it, by key; the largest are 1.
        adding_up: The error of the sum of their products so far, by key: in FP32, then rounded to
            the inputs' dtype, less the exact sum (equation 5).
    """

    sequence: int
    position: int
    d_out: list[float]
    out_error: list[float]
    column: int
    first: int
    values: list[float]
    weights: list[float]
    adding_up: list[float]


def take_apart(head: HeadInputs, arithmetic: Arithmetic, sequence: int, row: int) -> RowError:
    """Takes one row of a head apart."""
    chunk = Chunk(rows_of(head, slice(row, row + 1)), slice(row, row + 1))
    out = chunk.forward(arithmetic) if head.out is None else chunk.wide("out")
    error = (out - chunk.exact.out)[sequence, 0]
    d_out = chunk.wide("d_out")[sequence, 0]
    column = int((d_out * error).abs().argmax())

    dtype = head.q.dtype
    numerators, _, _ = chunk.softmax(chunk.scores)
    seen = (chunk.added > -torch.inf).expand(numerators.shape)[sequence, 0]
    weights = arithmetic.rounded("P", numerators[sequence, 0][seen], dtype)
    values = head.v[sequence, seen, column].double()
    terms = weights * values
    so_far = terms.float().cumsum(0).to(dtype).double()
    return RowError(
        sequence,
        int(head.rows[row]),
        d_out.tolist(),
        error.tolist(),
        column,
        int(seen.nonzero()[0]) if bool(seen.any()) else 0,
        values.tolist(),
        weights.tolist(),
        (so_far - terms.cumsum(0)).tolist(),
    )
