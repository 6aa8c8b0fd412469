"""Where the error of dQ comes from: which rows, keys and columns of V (paper, figures 6 and 9)."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from guardbit.diagnosis.arithmetic import Arithmetic
from guardbit.diagnosis.attention import chunks
from guardbit.diagnosis.direction import top_direction
from guardbit.diagnosis.head import HeadInputs

# Scores this near to a row's maximum are maxima too, as `multiple_maxima` counts them.
_TIED = 1e-3
# A key is a sink where the rows that see it give it this much of their attention in the mean: the
# first token of trained models has a half to nearly all.
_SINK = 0.3


class Part(NamedTuple):
    """A key or a column of V, and what it has of the push.

    Attributes:
        number: Position of the key in its sequence, or number of the column.
        push: Its part of the push, signed; the parts of all add up to the whole.
        what: What is known of it, in words, or "".
    """

    number: int
    push: float
    what: str


class Row(NamedTuple):
    """A row, and what it has of the push.

    Attributes:
        sequence: Number of the sequence.
        position: In the sequence.
        push: Its part of the push, signed.
        delta_error: By how much its delta is too large.
        largest: Its largest probability.
        maxima: How many of its scores are within 0.001 of the largest.
    """

    sequence: int
    position: int
    push: float
    delta_error: float
    largest: float
    maxima: int


class Roots(NamedTuple):
    """Where the push of one sampled step comes from.

    Attributes:
        rows: Those with the largest pushes, the largest first.
        row_push: FP64 `(S, R)`, of all.
        delta_error: FP64 `(S, R)`, by how much delta is too large.
        top_share: The part of the sizes of all pushes that one row in a hundred has.
        positive: The part of the rows whose delta is too large, of those where it is wrong.
        tied: The part of the rows with more than one maximum.
        keys: Those with the largest parts, the largest first.
        key_push: FP64 `(S, M)`, of all.
        repeated: The part of the keys that occur more than once in their sequence.
        common: What the keys have in common, see `key_common_mode`.
        columns: Those of V with the largest parts of delta's push, the largest first.
        column_push: FP64 `(E,)`, of all.
    """

    rows: tuple[Row, ...]
    row_push: Tensor
    delta_error: Tensor
    top_share: float
    positive: float
    tied: float
    keys: tuple[Part, ...]
    key_push: Tensor
    repeated: float
    common: float
    columns: tuple[Part, ...]
    column_push: Tensor


def find_roots(head: HeadInputs, arithmetic: Arithmetic, most: int = 5) -> Roots:
    """Takes the push apart by rows, by keys and by columns of V."""
    u = top_direction(head)
    along_keys = head.k.double() @ u * head.scale
    row_push, errors, largest, maxima = [], [], [], []
    key_push, seen, given = (torch.zeros_like(along_keys) for _ in range(3))
    column_push = head.v.new_zeros(head.v.size(-1), dtype=torch.float64)
    for chunk in chunks(head):
        own = None if head.out is None else chunk.wide("out")
        usual = chunk.run(arithmetic, own)
        p, along = chunk.probabilities, chunk.wide("q") @ u
        error = -(usual.d_scores - chunk.exact.d_scores) * along[..., None]
        key_push += error.sum(1) * along_keys
        row_push.append((error @ along_keys[..., None])[..., 0])
        errors.append(usual.delta - chunk.exact.delta)
        of_delta = (p @ along_keys[..., None])[..., 0] * along
        lost = chunk.wide("d_out") * (usual.out - chunk.exact.out)
        column_push += (of_delta[..., None] * lost).sum((0, 1))
        seen += (chunk.added > -torch.inf).expand(p.shape).sum(1)
        given += p.sum(1)
        largest.append(p.amax(-1))
        top = chunk.scores.amax(-1, keepdim=True)
        maxima.append(((top - chunk.scores <= _TIED) & (top > -torch.inf)).sum(-1))
    pushes, delta_error, heights, counts = (
        torch.cat(x, 1) for x in (row_push, errors, largest, maxima)
    )
    copies = _copies(head.k)
    sizes = pushes.abs().flatten().sort(descending=True).values
    few = max(1, round(len(sizes) / 100))
    wrong = delta_error != 0
    return Roots(
        tuple(
            Row(
                s, int(head.rows[r]), float(pushes[s, r]), float(delta_error[s, r]),
                float(heights[s, r]), int(counts[s, r]),
            )
            for s, r in _largest(pushes, most)
        ),
        pushes,
        delta_error,
        float(sizes[:few].sum() / sizes.sum().clamp(min=1e-300)),
        float((delta_error > 0).sum() / wrong.sum().clamp(min=1)),
        float((counts > 1).double().mean()),
        tuple(
            Part(m, float(key_push[s, m]),
                 _describe(float(given[s, m] / seen[s, m].clamp(min=1)), int(copies[s, m])))
            for s, m in _largest(key_push, most)
        ),
        key_push,
        float((copies > 1).double().mean()),
        common_mode(head.k),
        tuple(
            Part(e, float(column_push[e]), _signs(head.v[..., e]))
            for (e,) in _largest(column_push, most)
        ),
        column_push,
    )  # fmt: skip


def common_mode(k: Tensor) -> float:
    """Returns the norm of the mean key over the root mean square of the keys' norms."""
    wide = k.double()
    means, squares = wide.mean(1).square().sum(), wide.square().sum(-1).mean(1).sum()
    return float((means / squares.clamp(min=1e-300)).sqrt())


def _largest(values: Tensor, most: int) -> list[tuple[int, ...]]:
    """Places of the values that are largest in size."""
    flat = values.abs().flatten().topk(min(most, values.numel())).indices
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
