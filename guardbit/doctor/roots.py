"""Where the error of dQ comes from: which rows, keys and columns of V (paper, figures 5, 6, 9)."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from guardbit.doctor.attention import Arithmetic, Chunk, HeadInputs, over_rows

# Scores this near to a row's maximum are maxima too, as `multiple_maxima` counts them.
_TIED = 1e-3
# A key is a sink where the rows that see it give it this much of their attention in the mean: the
# first token of trained models has a half to nearly all.
_SINK = 0.3
# Rows, keys and columns that are named.
_SHOWN = 5


class Part(NamedTuple):
    """A key or a column of V, and what it has of the push."""

    number: int  # position of the key in its sequence, or number of the column
    push: float  # its part of the push, signed; the parts of all add up to the whole
    what: str  # what is known of it, in words, or ""


class Row(NamedTuple):
    """A row, and what it has of the push."""

    sequence: int  # number of the sequence
    position: int  # in the sequence
    push: float  # its part of the push, signed
    delta_error: float  # by how much its delta is too large
    largest: float  # its largest probability
    maxima: int  # how many of its scores are within 0.001 of the largest


class Roots(NamedTuple):
    """Where the push of one sampled step comes from."""

    rows: tuple[Row, ...]  # those with the largest pushes, the largest first
    row_push: Tensor  # FP64 `(S, R)`, of all
    delta_error: Tensor  # FP64 `(S, R)`, by how much delta is too large
    top_share: float  # the part of the sizes of all pushes that one row in a hundred has
    tied: float  # the part of the rows with more than one maximum
    keys: tuple[Part, ...]  # those with the largest parts, the largest first
    key_push: Tensor  # FP64 `(S, M)`, of all
    repeated: float  # the part of the keys that occur more than once in their sequence
    common: float  # what the keys have in common, see `key_common_mode`
    # Those of V with the largest parts of delta's push, the largest first.
    columns: tuple[Part, ...]
    column_push: Tensor  # FP64 `(E,)`, of all


def find_roots(head: HeadInputs, arithmetic: Arithmetic) -> Roots:
    """Takes the push apart by rows, by keys and by columns of V."""
    u = head.along
    along_keys = head.k.double() @ u * head.scale

    def compute(chunk: Chunk) -> dict[str, Tensor]:
        usual, exact, p = chunk.run(arithmetic, chunk.own_out), chunk.exact, chunk.probabilities
        along = chunk.wide("q") @ u
        error = -(usual.d_scores - exact.d_scores) * along[..., None]
        of_delta = (p @ along_keys[..., None])[..., 0] * along
        top = chunk.scores.amax(-1, keepdim=True)
        lost = of_delta[..., None] * chunk.wide("d_out") * (usual.out - exact.out)
        return {
            "row": (error @ along_keys[..., None])[..., 0],
            "key": error.sum(1, keepdim=True) * along_keys[:, None],
            "column": lost.sum((0, 1))[None, None],
            "delta": usual.delta - exact.delta,
            "largest": p.amax(-1),
            "maxima": ((top - chunk.scores <= _TIED) & (top > -torch.inf)).sum(-1),
            "seen": (chunk.added > -torch.inf).expand(p.shape).sum(1, keepdim=True),
            "given": p.sum(1, keepdim=True),
        }

    found = over_rows(head, compute)
    pushes, errors, largest, maxima = (found[x] for x in ("row", "delta", "largest", "maxima"))
    key_push, column_push = found["key"].sum(1), found["column"].sum((0, 1))
    attention = found["given"].sum(1) / found["seen"].sum(1).clamp(min=1)
    copies = _copies(head.k)
    sizes = pushes.abs().flatten().sort(descending=True).values
    few = max(1, round(len(sizes) / 100))
    return Roots(
        tuple(
            Row(
                s, int(head.rows[r]), float(pushes[s, r]), float(errors[s, r]),
                float(largest[s, r]), int(maxima[s, r]),
            )
            for s, r in _largest(pushes)
        ),
        pushes,
        errors,
        float(sizes[:few].sum() / sizes.sum().clamp(min=1e-300)),
        float((maxima > 1).double().mean()),
        tuple(
            Part(m, float(key_push[s, m]), _describe(float(attention[s, m]), int(copies[s, m])))
            for s, m in _largest(key_push)
        ),
        key_push,
        float((copies > 1).double().mean()),
        common_mode(head.k),
        tuple(
            Part(e, float(column_push[e]), _signs(head.v[..., e]))
            for (e,) in _largest(column_push)
        ),
        column_push,
    )  # fmt: skip


def common_mode(k: Tensor) -> float:
    """Returns the norm of the mean key over the root mean square of the keys' norms."""
    wide = k.double()
    means, squares = wide.mean(1).square().sum(), wide.square().sum(-1).mean(1).sum()
    return float((means / squares.clamp(min=1e-300)).sqrt())


def _largest(values: Tensor) -> list[tuple[int, ...]]:
    """Places of the few values that are largest in size."""
    flat = values.abs().flatten().topk(min(_SHOWN, values.numel())).indices
    places = torch.unravel_index(flat, values.shape)
    return list(zip(*(place.tolist() for place in places), strict=True))


def _copies(k: Tensor) -> Tensor:
    """How often each key occurs in its sequence, INT64 `(S, M)`."""
    counts = []
    for keys in k:
        _, which, number = torch.unique(keys, dim=0, return_inverse=True, return_counts=True)
        counts.append(number[which])
    return torch.stack(counts)


def _describe(attention: float, copies: int) -> str:
    words = [f"a sink: the rows give it {attention:.0%} of their attention"] * (attention > _SINK)
    words += [f"the same key occurs {copies} times"] * (copies > 1)
    return "; ".join(words)


def _signs(column: Tensor) -> str:
    negative = float((column < 0).double().mean())
    share, sign = (negative, "negative") if negative >= 0.5 else (1 - negative, "positive")
    return f"{share:.0%} of its values are {sign}"


class RowError(NamedTuple):
    """The error of a row's output, by columns, and that of one column's sum, by keys."""

    sequence: int  # number of the sequence
    position: int  # of the row in it
    d_out: list[float]  # dO, of each column of V
    # O as the kernel has it less the exact one, of each column. The error of delta is the sum of
    # their products.
    out_error: list[float]
    column: int  # the one whose product is largest in size
    first: int  # position of the first key below
    values: list[float]  # that column of V, by key
    weights: list[float]  # exp(S - m), rounded as the kernel rounds it, by key; the largest are 1
    # The error of the sum of their products so far, by key: in FP32, then rounded to the inputs'
    # dtype, less the exact sum (equation 5).
    adding_up: list[float]


def take_apart(head: HeadInputs, arithmetic: Arithmetic, sequence: int, row: int) -> RowError:
    """Takes one row of a head apart."""
    chunk = Chunk(head.take(slice(row, row + 1)))
    out = chunk.forward(arithmetic) if chunk.own_out is None else chunk.own_out
    error = (out - chunk.exact.out)[sequence, 0]
    d_out = chunk.wide("d_out")[sequence, 0]
    column = int((d_out * error).abs().argmax())

    dtype = head.q.dtype
    numerators, _, _ = chunk.softmax
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
