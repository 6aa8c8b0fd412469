"""Diagnoses one head from its inputs at one sampled step or at several.

Each rounding is taken out in turn, and each remedy tried (paper, section 3.2 and appendix F). W_Q
gets the sum over rows of dQ^T x, x the layer's input; so an error of dQ does harm by its own sum,
E. q = W_Q x stands in for x: E is then the error of dW_Q times W_Q^T. A row's push is what its
error adds to the largest singular value of W_Q in gradient descent: -(error . u)(q . u), u being
the direction in which the head's W_Q is largest.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial, reduce
from operator import add
from typing import Any, Literal, NamedTuple, Self

import torch
from torch import Tensor

from guardbit.doctor.attention import FLASH, Arithmetic, Chunk, HeadInputs, Operation, over_rows
from guardbit.doctor.recognition import Fault, recognize
from guardbit.kernels.heads import shift_keys
from guardbit.kernels.reference import gradient_error
from guardbit.kernels.reference.common import count_tied, float32_products
from guardbit.kernels.reference.passes import SHIFT_MAX, SHIFT_MAX_FP16, SHIFT_MIN
from guardbit.numerics import decode_residual, encode_residual, round_nearest

#: "fault": the kernel does what no sound one does. "rounding": errors of rounding add up in W_Q.
#: "not rounding": dQ is right. "unclear": it is not, but its errors do not add up in these rows.
Cause = Literal["fault", "rounding", "not rounding", "unclear"]

#: Operations that reach dQ only through delta, if delta is rowsum(dO O).
THROUGH_DELTA: tuple[Operation, ...] = ("P", "PV", "O")

# The part of the gradient above which an error is no noise. In the eight sound runs that set it, no
# audit of a head found more than 0.019 of dQ along W_Q's top direction; in the eight since then one
# found 0.15, and all others at most 0.052.
_LARGE = 0.1
# The part of dQ's natural size below which an error is negligible. BF16 makes 1e-3 to 1e-2 of it
# in sound heads and 5e-4 or more in alarmed ones of the study; 1e-7 in most heads that a learning
# rate far too high had ruined. So small an error is a large part of dQ only where the exact one has
# vanished, because one key has all the attention, say.
_VANISHED = 1e-5
# The same for an exact dQ, below which the head is saturated, whatever the cause.
_SATURATED = 1e-4
# Standard deviations above which a push is no chance: 6e-5 of normal deviates have more.
_SURE = 4.0
# beta - 1 of `row_max`, as after a switch.
_FACTOR = 1.0


@dataclass(frozen=True, eq=False)
class Measures:
    """Sums over rows of an error of dQ; two of different samples can be added."""

    error_squares: float  # of the norms of the error
    exact_squares: float  # of the norms of the exact dQ
    # Of the norms of what dQ would be if attention were even, see `Chunk.natural_size`.
    natural_squares: float
    push: float  # of the pushes, with their signs
    push_squares: float  # of the squares of the pushes
    exact_push: float  # of the sizes of what exact rows push
    matrix: Tensor  # FP64 `(D, D)`, E

    @classmethod
    def of(cls, head: HeadInputs, dq: Tensor, exact: Tensor, natural: Tensor) -> Self:
        """Measures a dQ, FP64 `(S, R, D)`."""
        q, along = head.q.double(), head.along
        squares, exact_squares, *moved = gradient_error(dq, exact, along)
        push, exact_push = (-x * (q @ along) for x in moved)
        return cls(
            error_squares=float(squares.sum()),
            exact_squares=float(exact_squares.sum()),
            natural_squares=float(natural.square().sum()),
            push=float(push.sum()),
            push_squares=float(push.square().sum()),
            exact_push=float(exact_push.abs().sum()),
            matrix=((dq - exact).mT @ q).sum(0),
        )

    def __add__(self, other: "Measures") -> "Measures":
        names = [field.name for field in fields(self)]
        return Measures(*(getattr(self, name) + getattr(other, name) for name in names))

    @property
    def relative_error(self) -> float:
        return math.sqrt(_ratio(self.error_squares, self.exact_squares))

    @property
    def error_part(self) -> float:
        """Norm of the error over what that of dQ would be if attention were even."""
        return math.sqrt(self.error_squares / (self.natural_squares or math.inf))

    @property
    def exact_part(self) -> float:
        """The same of the exact dQ."""
        return math.sqrt(self.exact_squares / (self.natural_squares or math.inf))

    @property
    def push_share(self) -> float:
        """The push over what exact rows push, sizes taken; above 0 W_Q grows."""
        return _ratio(self.push, self.exact_push)

    @property
    def significance(self) -> float:
        """The push in standard deviations of a sum of rows with random signs."""
        return _ratio(self.push, math.sqrt(self.push_squares))

    @property
    def summed(self) -> float:
        return float(self.matrix.norm())

    @property
    def is_saturated(self) -> bool:
        return self.exact_part < _SATURATED

    @property
    def is_noise(self) -> bool:
        """Whether dQ is mostly error, and that error is of no size: the exact dQ has vanished."""
        return self.error_part < _VANISHED and self.relative_error >= _LARGE


def measure(head: HeadInputs, arithmetic: Arithmetic) -> dict[str, Measures]:
    """Measures the error of dQ as recorded, "together", "without" a rounding, with a "remedy"."""
    operations: list[Operation] = [*arithmetic.roundings]
    if arithmetic.delta != "probabilities" and "delta" not in operations:
        operations.append("delta")
    ways: dict[str, Callable[[Chunk], Tensor]] = {"together": partial(_dq_of, arithmetic)}
    if head.dq is not None:
        ways["recorded"] = lambda chunk: chunk.wide("dq")
    for name in operations:
        ways[f"without {name}"] = partial(_dq_of, arithmetic.without(name))
    centered = shift_keys(head.k[:, None], ("centered_keys",))[0][:, 0]
    ways |= {
        "remedy none": partial(_dq_of, FLASH),
        "remedy exact_delta": partial(_dq_of, FLASH.without("delta")),
        "remedy centered_keys": lambda chunk: _dq_of(FLASH, Chunk(replace(chunk.head, k=centered))),
        "remedy compensated": _compensated,
        "remedy row_max": _row_max,
    }

    def compute(chunk: Chunk) -> dict[str, Tensor]:
        found = {name: way(chunk) for name, way in ways.items()}
        return {"exact": chunk.exact.dq, "natural": chunk.natural_size, **found}

    found = over_rows(head, compute)
    return {name: Measures.of(head, found[name], found["exact"], found["natural"]) for name in ways}


def _dq_of(arithmetic: Arithmetic, chunk: Chunk) -> Tensor:
    return chunk.run(arithmetic).dq


def _compensated(chunk: Chunk) -> Tensor:
    """DQ of `compensated`: the rounded P is summed, and delta gets what rounding took from O."""
    numerators, total, _ = chunk.softmax
    rounded = FLASH.rounded("P", numerators, chunk.head.q.dtype)
    total = total + rounded.sum(-1, keepdim=True) - numerators.sum(-1, keepdim=True)
    exact = (rounded @ chunk.wide("v") / total).float()
    out = round_nearest(exact, chunk.head.q.dtype)
    kept = decode_residual(out, encode_residual(exact, out)).double()
    return chunk.backward(FLASH, numerators / total, out.double() + kept).dq


def _row_max(chunk: Chunk) -> Tensor:
    """DQ of `row_max`: in rows with several maxima, more than the maximum is subtracted."""
    dtype = chunk.head.q.dtype
    numerators, total, top = chunk.softmax
    most = SHIFT_MAX_FP16 if dtype == torch.float16 else SHIFT_MAX
    tied = count_tied(chunk.scores, top[..., 0])[..., None] > 1
    shift = SHIFT_MIN + (_FACTOR * top.abs()) % (most - SHIFT_MIN)
    factor = torch.where(tied, (-shift).exp(), 1.0)
    sums = FLASH.rounded("P", numerators * factor, dtype) @ chunk.wide("v")
    return chunk.run(FLASH, FLASH.rounded("O", sums / (total * factor), dtype)).dq


class Roots(NamedTuple):
    """What the push of one sampled step comes from."""

    row_push: Tensor  # FP64 `(S, R)`, signed; the parts add up to the whole
    tied: float  # the part of the rows with more than one maximum
    common: float  # see `common_mode`


def find_roots(head: HeadInputs, arithmetic: Arithmetic) -> Roots:
    def compute(chunk: Chunk) -> dict[str, Tensor]:
        return {
            "error": chunk.run(arithmetic, chunk.own_out).dq - chunk.exact.dq,
            "tied": count_tied(chunk.scores, chunk.scores.amax(-1)) > 1,
        }

    found, u = over_rows(head, compute), head.along
    row_push = -(found["error"] @ u) * (head.q.double() @ u)
    return Roots(row_push, float(found["tied"].double().mean()), common_mode(head.k))


def common_mode(k: Tensor) -> float:
    """Returns the norm of the mean key over the root mean square of the keys' norms."""
    wide = k.double()
    means, squares = wide.mean(1).square().sum(), wide.square().sum(-1).mean(1).sum()
    return float((means / squares.clamp(min=1e-300)).sqrt())


@dataclass(frozen=True)
class Diagnosis:
    """The diagnosis of one head."""

    cause: Cause  # see `Cause`
    faults: tuple[Fault, ...]  # where the kernel is worse than FlashAttention-2
    # The operation that moves dQ: the first fault's, else the one without whose rounding least is
    # left of the summed error.
    operation: Operation
    root: Operation  # where that is delta, what makes delta wrong
    error: Measures  # the error of dQ: the kernel's own, if it is known
    together: Measures  # the error with all roundings
    without: Mapping[str, Measures]  # the error without each of the roundings, by operation
    remedies: Mapping[str, Measures]  # what is left with each remedy, by name
    roots: Roots  # rows and keys of the last sample
    samples: int  # their number
    rows: int  # number of rows in all samples

    @property
    def is_saturated(self) -> bool:
        """Whether the exact dQ has vanished, so that what is left of dQ is rounding."""
        return self.error.is_saturated or self.error.is_noise

    @property
    def moved_back(self) -> float:
        """The part of the summed error that is gone without the operation's rounding."""
        return 1 - self.without[self.operation].summed / (self.together.summed or 1.0)


@torch.no_grad()
def diagnose(samples: Sequence[HeadInputs]) -> Diagnosis:
    """Diagnoses a head from all samples together, so that what adds up shows."""
    samples = [sample.thinned() for sample in samples]
    with float32_products():
        found = [recognize(sample) for sample in samples]
        measured = [measure(head, way) for head, (way, _) in zip(samples, found, strict=True)]
        roots = find_roots(samples[-1], found[-1][0])
    sums = {
        name: reduce(add, (each[name] for each in measured))
        for name in measured[0]
        if all(name in each for each in measured)
    }

    def by_name(kind: str) -> dict[str, Measures]:
        parts = {name.partition(" "): measures for name, measures in sums.items()}
        return {name: measures for (first, _, name), measures in parts.items() if first == kind}

    without, error = by_name("without"), sums.get("recorded", sums["together"])
    hidden = THROUGH_DELTA if "delta" in without else ()
    operation = _least_error([name for name in without if name not in hidden], without)
    root = operation
    if operation == "delta" and (earlier := [x for x in THROUGH_DELTA if x in without]):
        root = _least_error(earlier, without)
    faults = {(fault.operation, fault.kind): fault for _, each in found for fault in each}
    if faults:
        operation = root = next(iter(faults.values())).operation
    return Diagnosis(
        "fault" if faults else _cause_of(error),
        tuple(faults.values()),
        operation,
        root,
        error,
        sums["together"],
        without,
        by_name("remedy"),
        roots,
        len(samples),
        sum(sample.q.size(0) * sample.q.size(1) for sample in samples),
    )


def _least_error(names: Iterable[Any], left: Mapping[str, Measures]) -> Operation:
    """Returns the name with the least summed error, of equal ones the first in the alphabet."""
    return min((left[name].summed, name) for name in names)[1]


def _cause_of(error: Measures) -> Cause:
    if error.is_noise:
        return "not rounding"
    if error.is_saturated:
        return "unclear"
    if abs(error.push_share) >= _LARGE and abs(error.significance) >= _SURE:
        return "rounding"
    return "unclear" if error.relative_error >= _LARGE else "not rounding"


def _ratio(part: float, whole: float) -> float:
    """Divides; 0 / 0 is 0."""
    if whole == 0:
        return 0.0 if part == 0 else math.copysign(math.inf, part)
    return part / whole
