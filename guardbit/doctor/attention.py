"""Attention and its dQ in FP64, with any rounding added or removed.

`guardbit doctor` compares engines with it, and `guardbit diagnose` takes heads apart with it.
Shapes: S sequences of one head, or query heads that share a key head; R query rows; M keys.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Literal, NamedTuple, Self

import torch
from torch import Tensor

from guardbit.kernels.mask import Visible, additive_mask, in_documents, visible_range
from guardbit.kernels.reference.common import cap_slope, capped
from guardbit.kernels.spec import AttentionSpec
from guardbit.numerics import round_nearest

# Bytes of one FP64 matrix of scores; about a dozen of them are held at a time.
_CHUNK_BYTES = 2**24
# Most scores of a head that are examined: a million take a core 1.3 s.
_ENTRIES = 2**23

#: What can be rounded, in the order of the computation. P is that of the forward's product with V,
#: PV that product before it is divided by the sum of P.
Operation = Literal["S", "P", "PV", "O", "delta", "dP", "dS", "dQ"]

#: To the format of the inputs; what is not rounded stays as it is.
Rounding = Literal["nearest", "truncated"]

#: Where delta comes from: rowsum(dO O) of the returned O, rowsum(P dP), or nowhere: it is 0.
DeltaSource = Literal["output", "probabilities", "dropped"]

#: How scores of a repeated token change: not at all, with the distance of two places, or otherwise.
Positions = Literal["none", "rotated", "learned"]
# Change between neighbours that counts, and that along diagonals, as a part of the one across.
# Ten small models in BF16: without positions at most .0005, others .03 and more; rotated at most
# .01, learned .99 and more.
_CHANGE, _ALONG = 0.005, 0.25


@dataclass(frozen=True)
class Arithmetic:
    """How one kernel rounds: which operations do, and where delta is taken from."""

    roundings: Mapping[Operation, Rounding] = field(default_factory=dict)
    delta: DeltaSource = "output"

    def with_rounding(self, operation: Operation, rounding: Rounding | None) -> Self:
        """Returns this arithmetic with one operation rounded otherwise; None for not at all."""
        roundings = {name: how for name, how in self.roundings.items() if name != operation}
        if rounding is not None:
            roundings[operation] = rounding
        return replace(self, roundings=roundings)

    def without(self, operation: Operation) -> Self:
        """Returns this arithmetic with one operation in full precision, or with exact delta."""
        source = "probabilities" if operation == "delta" else self.delta
        return replace(self.with_rounding(operation, None), delta=source)

    def rounded(self, operation: Operation, x: Tensor, dtype: torch.dtype) -> Tensor:
        """Returns FP64 numbers as this operation leaves them, FP64."""
        how = self.roundings.get(operation)
        if how is None:
            return x
        return (round_nearest if how == "nearest" else truncate)(x, dtype).double()


#: FlashAttention-2's (paper, Algorithms 1 and 2), on which all engines agree.
FLASH = Arithmetic({"P": "nearest", "O": "nearest", "dS": "nearest", "dQ": "nearest"})

#: No rounding at all, but with the delta of kernels.
EXACT = Arithmetic()


def truncate(x: Tensor, dtype: torch.dtype) -> Tensor:
    nearest = round_nearest(x, dtype)
    # One less in the bits, which hold sign and magnitude, is one step towards zero.
    too_large = (nearest.to(x.dtype).abs() > x.abs()).to(torch.int16)
    return (nearest.view(torch.int16) - too_large).view(dtype)


@dataclass(frozen=True, eq=False)
class HeadInputs:
    """One head of one attention call, and what the kernel in use made of it."""

    q: Tensor  # `(S, R, D)`, BF16 or FP16, as the kernel got it
    k: Tensor  # `(S or 1, M, D)`
    v: Tensor  # `(S or 1, M, E)`
    d_out: Tensor  # `(S, R, E)`, gradient of the output
    rows: Tensor  # INT64 `(R,)`, positions of the rows in their sequences
    first: Tensor  # INT32 `(R,)`, the first key that a row may see
    end: Tensor  # INT32 `(R,)`, the end of these keys, itself not included
    # `(S or 1, R, M)`, boolean, True where a key is seen, or floating, added to the scores; None
    # for none.
    mask: Tensor | None
    scale: float  # factor of Q K^T
    softcap: float = 0.0  # as in `AttentionSpec`; 0 for none
    sink: Tensor | None = None  # FP32 `()`, the head's sink; None for none
    # `(S, R, E)`, the output of the kernel in use; None if it is not known.
    out: Tensor | None = None
    # `(S, R, D)`, the gradient of q by the kernel in use; None if it is not known.
    dq: Tensor | None = None
    # FP32 `(D,)`, u, the unit vector along which the head's W_Q is largest: its first left singular
    # vector; None if it is not known.
    direction: Tensor | None = None

    def __post_init__(self) -> None:
        if self.q.dtype not in (torch.bfloat16, torch.float16):
            raise ValueError(f"q is {self.q.dtype}; it must be BF16 or FP16 to be diagnosed")
        tensors = [self.q, self.k, self.v, self.d_out, self.out, self.dq]
        if not all(x is None or bool(x.isfinite().all()) for x in tensors):
            raise ValueError(
                "the inputs, the output or dQ of the head hold NaN or infinity: use an earlier"
                " snapshot to see what made them so"
            )

    @property
    def tensors(self) -> dict[str, Tensor]:
        return {name: value for name, value in vars(self).items() if isinstance(value, Tensor)}

    def on_host(self) -> Self:
        return replace(self, **{name: value.cpu() for name, value in self.tensors.items()})

    def take(self, index: slice | Tensor) -> Self:
        by_row = ("q", "d_out", "mask", "out", "dq")
        changed = {name: x[:, index] for name, x in self.tensors.items() if name in by_row}
        changed |= {name: getattr(self, name)[index] for name in ("rows", "first", "end")}
        return replace(self, **changed)

    def of_keys(self, seen: slice) -> Self:
        """Returns the head with some of its keys; its rows see no others."""
        return replace(
            self,
            k=self.k[:, seen],
            v=self.v[:, seen],
            first=self.first - seen.start,
            end=self.end - seen.start,
            mask=None if self.mask is None else self.mask[..., seen],
        )

    def thinned(self) -> Self:
        """Returns as many rows, evenly spread, as bound the time of a diagnosis."""
        sequences, rows = self.q.shape[:2]
        most = max(1, _ENTRIES // (sequences * max(1, self.k.size(1))))
        return self if rows <= most else self.take(spread(rows, most))

    @property
    def along(self) -> Tensor:
        """u, FP64; if unknown, the direction in which queries are largest."""
        if self.direction is not None and bool(self.direction.any()):
            return self.direction.double()
        wide = self.q.flatten(0, 1).double()
        return torch.linalg.eigh(wide.mT @ wide).eigenvectors[:, -1]

    @property
    def nbytes(self) -> int:
        return sum(value.nbytes for value in self.tensors.values())


def head_of_call(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    d_out: Tensor,
    spec: AttentionSpec,
    head: int,
    *,
    sequences: Sequence[int] | None = None,
    rows: Tensor | None = None,
    out: Tensor | None = None,
    dq: Tensor | None = None,
    direction: Tensor | None = None,
) -> HeadInputs:
    """Takes one head out of an attention call, with copies of its tensors."""
    if spec.dropout_p > 0:
        raise ValueError("a call with dropout cannot be diagnosed: what was dropped is not known")
    if spec.has_functions:
        raise ValueError("a call with a mask or scores by a function cannot be diagnosed")
    shape = (len(q), q.size(1), q.size(2), k.size(2))
    device, kv_head = q.device, head * k.size(1) // q.size(1)
    chosen = range(len(q)) if sequences is None else sequences
    batch = torch.tensor(chosen, dtype=torch.int64, device=device)
    present = torch.arange(q.size(2), device=device) if rows is None else rows.to(device)
    visible = visible_range(spec, shape, device)
    mask = None
    if spec.mask is not None:
        whole = spec.mask.expand(shape)[:, head]
        which = batch[:1] if whole.stride(0) == 0 else batch
        mask = whole[which[:, None], present]
    of_queries, of_keys = spec.starts

    def rows_of(x: Tensor) -> Tensor:
        return in_documents(x[batch, head], of_queries)[:, present]

    return HeadInputs(
        rows_of(q),
        in_documents(k[batch, kv_head], of_keys),
        in_documents(v[batch, kv_head], of_keys),
        rows_of(d_out),
        present,
        visible.first[present],
        visible.end[present],
        mask,
        spec.scale,
        spec.softcap,
        None if spec.sinks is None else spec.sinks[head].float(),
        None if out is None else rows_of(out),
        None if dq is None else rows_of(dq),
        direction,
    )


class Pass(NamedTuple):
    """What a forward and a backward give, FP64."""

    out: Tensor  # `(S, R, E)`
    delta: Tensor  # `(S, R)`, as the backward used it
    d_scores: Tensor  # `(S, R, M)`, dS, the gradient of the scores
    dq: Tensor  # `(S, R, D)`


@dataclass
class Chunk:
    """Some rows of a head; each quantity is computed in FP64 once."""

    head: HeadInputs

    def wide(self, name: str) -> Tensor:
        return getattr(self.head, name).double()

    @property
    def own_out(self) -> Tensor | None:
        return None if self.head.out is None else self.wide("out")

    @cached_property
    def products(self) -> Tensor:
        """Scaled Q K^T, FP64 `(S, R, M)`."""
        return self.wide("q") @ self.wide("k").mT * self.head.scale

    @cached_property
    def slope(self) -> Tensor | float:
        return cap_slope(self.products, self.head.softcap) if self.head.softcap > 0 else 1.0

    @cached_property
    def added(self) -> Tensor:
        """What masks add to the scores, FP64 `(S or 1, R, M)`; -inf hides a key."""
        head = self.head
        keys = torch.arange(head.k.size(1), device=head.k.device)
        rows = torch.arange(len(head.first), device=keys.device)
        added = additive_mask(Visible(head.first, head.end), rows, keys).double()[None]
        if head.mask is None:
            return added
        if head.mask.dtype == torch.bool:
            return added.expand(head.mask.shape).masked_fill(~head.mask, -math.inf)
        return added + head.mask.double()

    @cached_property
    def scores(self) -> Tensor:
        """What the softmax gets, FP64 `(S, R, M)`."""
        return capped(self.products, self.head.softcap) + self.added

    @cached_property
    def softmax(self) -> tuple[Tensor, Tensor, Tensor]:
        """exp(S - m), its sum with the sink's part, `(S, R, 1)`, and the row maxima m."""
        return self._softmax(self.scores)

    @cached_property
    def probabilities(self) -> Tensor:
        """P, FP64 `(S, R, M)`; 0 in rows that see no key."""
        numerators, total, _ = self.softmax
        return numerators / total

    @cached_property
    def d_probabilities(self) -> Tensor:
        """The gradient of P, dO V^T, FP64 `(S, R, M)`."""
        return self.wide("d_out") @ self.wide("v").mT

    @cached_property
    def exact(self) -> Pass:
        return self.run(EXACT.without("delta"))

    @cached_property
    def natural_size(self) -> Tensor:
        """About the norm of a row of dQ if attention were even, FP64 `(S, R)`."""
        seen = (self.added > -math.inf).double()
        count = seen.sum(-1).clamp(min=1)
        dp = self.d_probabilities
        mean = (dp * seen).sum(-1) / count
        variance = ((dp - mean[..., None]).square() * seen).sum(-1) / count
        keys = self.wide("k").square().sum(-1).mean(-1, keepdim=True)
        return self.head.scale * (variance * keys).sqrt()

    def run(self, arithmetic: Arithmetic, out: Tensor | None = None) -> Pass:
        """Runs forward and backward; the backward takes another O if one is given."""
        numerators, total = self._rounded_softmax(arithmetic)
        out = self.forward(arithmetic) if out is None else out
        return self.backward(arithmetic, numerators / total, out)

    def backward(self, arithmetic: Arithmetic, p: Tensor, out: Tensor) -> Pass:
        dtype = self.head.q.dtype
        dp = arithmetic.rounded("dP", self.d_probabilities, dtype)
        if arithmetic.delta == "output":
            delta = (self.wide("d_out") * out).sum(-1)
        elif arithmetic.delta == "probabilities":
            delta = (p * dp).sum(-1)
        else:
            delta = torch.zeros_like(p[..., 0])
        delta = arithmetic.rounded("delta", delta, dtype)
        d_scores = arithmetic.rounded("dS", p * (dp - delta[..., None]), dtype)
        dq = d_scores * self.slope @ self.wide("k") * self.head.scale
        return Pass(out, delta, d_scores, arithmetic.rounded("dQ", dq, dtype))

    def forward(self, arithmetic: Arithmetic) -> Tensor:
        """Returns the output, FP64 `(S, R, E)`."""
        dtype = self.head.q.dtype
        numerators, total = self._rounded_softmax(arithmetic)
        sums = arithmetic.rounded("P", numerators, dtype) @ self.wide("v")
        return arithmetic.rounded("O", arithmetic.rounded("PV", sums, dtype) / total, dtype)

    def _rounded_softmax(self, arithmetic: Arithmetic) -> tuple[Tensor, Tensor]:
        """exp(S - m) and its sum, with S as the arithmetic leaves it."""
        if "S" not in arithmetic.roundings:
            return self.softmax[:2]
        return self._softmax(arithmetic.rounded("S", self.scores, self.head.q.dtype))[:2]

    def _softmax(self, scores: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        top = scores.amax(-1, keepdim=True)
        top = top.masked_fill(top == -math.inf, 0.0)
        numerators = (scores - top).exp_()
        total = numerators.sum(-1, keepdim=True)
        if self.head.sink is not None:
            total = total + (self.head.sink.double() - top).exp()
        return numerators, total.masked_fill(total == 0, 1.0), top


def spread(count: int, most: int, device: torch.device | str = "cpu") -> Tensor:
    """Returns `most` of `count` positions, evenly spread, or all, INT64."""
    positions = torch.linspace(0, count - 1, min(count, most), dtype=torch.float32, device=device)
    return positions.round().long()


def chunks(head: HeadInputs, chunk_bytes: int = _CHUNK_BYTES) -> Iterator[Chunk]:
    """Cuts the rows of a head into chunks, so that memory stays bounded."""
    sequences, rows = head.q.shape[:2]
    size = max(1, chunk_bytes // (8 * max(1, sequences * head.k.size(1))))
    for start in range(0, rows, size):
        yield Chunk(head.take(slice(start, start + size)))


def over_rows(head: HeadInputs, compute: Callable[[Chunk], dict[str, Tensor]]) -> dict[str, Tensor]:
    """Computes something of all rows, chunk by chunk, and joins it along the second axis."""
    parts = [compute(chunk) for chunk in chunks(head)]
    return {name: torch.cat([part[name] for part in parts], 1) for name in parts[0]}


def positions_in(q: Tensor, k: Tensor) -> Positions:
    """Returns how `(B, H, N, D)` of a token that fills all N places hold its place."""
    q, k = q.double(), k.double().repeat_interleave(q.size(1) // k.size(1), 1)
    scores = q @ k.transpose(-1, -2)
    size = q.norm() * k.norm() / q[..., 0].numel()  # of a score of two parallel vectors
    along = (scores[..., 1:, 1:] - scores[..., :-1, :-1]).square().mean().sqrt()
    across = (scores[..., 1:, :-1] - scores[..., :-1, 1:]).square().mean().sqrt()
    if max(along, across) <= _CHANGE * size:
        return "none"
    return "rotated" if along < _ALONG * across else "learned"
