"""Attention and its dQ written out in FP64, with any rounding put in or taken out.

Shapes: rows of one head as in `HeadInputs`; a chunk has the same R rows of all S sequences.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from guardbit.diagnosis.arithmetic import EXACT, Arithmetic
from guardbit.diagnosis.head import HeadInputs
from guardbit.kernels.reference.common import cap_slope, capped

# Bytes of one FP64 matrix of scores; about a dozen of them are held at a time.
_CHUNK_BYTES = 2**24
# Scores of a head that are looked at: a million take a core 1.3 s.
_ENTRIES = 2**23


class Pass(NamedTuple):
    """What a forward and a backward give, FP64.

    Attributes:
        out: `(S, R, E)`.
        delta: `(S, R)`, as the backward used it.
        d_scores: `(S, R, M)`, dS, the gradient of the scores.
        dq: `(S, R, D)`.
    """

    out: Tensor
    delta: Tensor
    d_scores: Tensor
    dq: Tensor


@dataclass
class Chunk:
    """Some rows of a head.

    Attributes:
        head: The head, of these rows alone.
        place: Which of the head's rows.
    """

    head: HeadInputs
    place: slice

    @cached_property
    def products(self) -> Tensor:
        """Scaled Q K^T, FP64 `(S, R, M)`."""
        return self.wide("q") @ self.wide("k").mT * self.head.scale

    @cached_property
    def added(self) -> Tensor:
        """What masks add to the scores, FP64 `(S or 1, R, M)`; -inf hides a key."""
        head = self.head
        keys = torch.arange(head.k.size(1), device=head.k.device)
        hidden = (keys < head.first[:, None]) | (keys >= head.end[:, None])
        added = torch.zeros(hidden.shape, dtype=torch.float64, device=hidden.device)
        added = added.masked_fill_(hidden, -math.inf)[None]
        if head.mask is None:
            return added
        if head.mask.dtype == torch.bool:
            return added.expand(head.mask.shape).masked_fill(~head.mask, -math.inf)
        return added + head.mask.double()

    @cached_property
    def d_probabilities(self) -> Tensor:
        """The gradient of P, dO V^T, FP64 `(S, R, M)`."""
        return self.wide("d_out") @ self.wide("v").mT

    @cached_property
    def natural_size(self) -> Tensor:
        """About the norm of a row of dQ if attention were even, FP64 `(S, R)`."""
        seen = (self.added > -math.inf).double()
        count = seen.sum(-1).clamp(min=1)
        dp = self.d_probabilities
        mean = (dp * seen).sum(-1) / count
        spread = ((dp - mean[..., None]).square() * seen).sum(-1) / count
        keys = self.wide("k").square().sum(-1).mean(-1, keepdim=True)
        return self.head.scale * (spread * keys).sqrt()

    @cached_property
    def scores(self) -> Tensor:
        """What the softmax gets, FP64 `(S, R, M)`."""
        return capped(self.products, self.head.softcap) + self.added

    @cached_property
    def probabilities(self) -> Tensor:
        """P, FP64 `(S, R, M)`; 0 in rows that see no key."""
        numerators, total, _ = self.softmax(self.scores)
        return numerators / total

    @cached_property
    def exact(self) -> Pass:
        """The pass without any rounding."""
        return self.run(EXACT)

    def wide(self, name: str) -> Tensor:
        """A tensor of the head in FP64."""
        return getattr(self.head, name).double()

    def softmax(self, scores: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Returns exp(S - m), its sum with the sink's part, `(S, R, 1)`, and the row maxima m."""
        top = scores.amax(-1, keepdim=True)
        top = top.masked_fill(top == -math.inf, 0.0)
        numerators = (scores - top).exp_()
        total = numerators.sum(-1, keepdim=True)
        if self.head.sink is not None:
            total = total + (self.head.sink.double() - top).exp()
        return numerators, total.masked_fill(total == 0, 1.0), top

    def run(self, arithmetic: Arithmetic, out: Tensor | None = None) -> Pass:
        """Runs forward and backward."""
        dtype = self.head.q.dtype
        _, _, p = self._probabilities(arithmetic)
        if out is None:
            out = self.forward(arithmetic)
        dp = arithmetic.rounded("dP", self.d_probabilities, dtype)
        if arithmetic.delta == "output":
            delta = (self.wide("d_out") * out).sum(-1)
        elif arithmetic.delta == "probabilities":
            delta = (p * dp).sum(-1)
        else:
            delta = torch.zeros_like(p[..., 0])
        delta = arithmetic.rounded("delta", delta, dtype)
        d_scores = arithmetic.rounded("dS", p * (dp - delta[..., None]), dtype)
        return Pass(out, delta, d_scores, self.query_gradient(arithmetic, d_scores, self.wide("k")))

    def forward(self, arithmetic: Arithmetic) -> Tensor:
        """Returns the output, FP64 `(S, R, E)`."""
        dtype = self.head.q.dtype
        numerators, total, _ = self._probabilities(arithmetic)
        sums = arithmetic.rounded("P", numerators, dtype) @ self.wide("v")
        return arithmetic.rounded("O", arithmetic.rounded("PV", sums, dtype) / total, dtype)

    def query_gradient(self, arithmetic: Arithmetic, d_scores: Tensor, k: Tensor) -> Tensor:
        """Returns dQ of a dS, FP64 `(S, R, D)`."""
        if self.head.softcap > 0:
            d_scores = d_scores * cap_slope(self.products, self.head.softcap)
        return arithmetic.rounded("dQ", d_scores @ k * self.head.scale, self.head.q.dtype)

    def _probabilities(self, arithmetic: Arithmetic) -> tuple[Tensor, Tensor, Tensor]:
        """exp(S - m), its sum and P, with S as the arithmetic leaves it."""
        if "S" not in arithmetic.roundings:
            numerators, total, _ = self._exact_softmax
            return numerators, total, self.probabilities
        scores = arithmetic.rounded("S", self.scores, self.head.q.dtype)
        numerators, total, _ = self.softmax(scores)
        return numerators, total, numerators / total

    @cached_property
    def _exact_softmax(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.softmax(self.scores)


def thinned(head: HeadInputs) -> HeadInputs:
    """Returns a head with so many of its rows, evenly spread, that the time stays bounded."""
    sequences, rows = head.q.shape[:2]
    most = max(1, _ENTRIES // (sequences * max(1, head.k.size(1))))
    if rows <= most:
        return head
    return rows_of(head, torch.linspace(0, rows - 1, most, dtype=torch.float32).round().long())


def chunks(head: HeadInputs, chunk_bytes: int = _CHUNK_BYTES) -> Iterator[Chunk]:
    """Cuts the rows of a head, so that memory stays bounded."""
    sequences, rows = head.q.shape[:2]
    size = max(1, chunk_bytes // (8 * max(1, sequences * head.k.size(1))))
    for start in range(0, rows, size):
        place = slice(start, min(start + size, rows))
        yield Chunk(rows_of(head, place), place)


def rows_of(head: HeadInputs, place: slice | Tensor) -> HeadInputs:
    """Returns some rows of a head; of what belongs to keys, all."""
    changed = {
        name: None if getattr(head, name) is None else getattr(head, name)[:, place]
        for name in ("q", "d_out", "mask", "out", "dq", "x")
    }
    changed |= {name: getattr(head, name)[place] for name in ("rows", "first", "end")}
    return replace(head, **changed)
