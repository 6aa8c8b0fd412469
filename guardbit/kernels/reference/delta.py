"""Exact delta from a kernel's forward results, and the O' that carries it to its backward."""

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from guardbit.kernels.mask import in_documents, key_spans, mask_tile, visible_range
from guardbit.kernels.reference.common import Tile, capped, float32_products, modified
from guardbit.kernels.spec import AttentionSpec
from guardbit.numerics import decode_residual, round_nearest

#: How many nonzero numbers a row of O' has. Each adds the format's bits, 8 in BF16, 11 in FP16.
TERMS = 3

#: A row keeps its O where its terms would miss delta by more than MISS |delta|, which no row does
#: that FP16 and BF16 have room for, and by more than SMALLEST_MISS times the largest |dO|.
MISS = 2.0**-8
#: A whole step of FP16's smallest numbers.
SMALLEST_MISS = 2.0**-24

#: Only a row's first FIRST_COLUMNS columns carry delta if their terms miss it by at most the
#: larger of ENOUGH |delta| and HALF_STEP times the third largest |dO| among them. Looking for the
#: three largest of a whole row took 0.7 of the time of delta itself, at 1,024 keys of 128 features
#: on an H200.
FIRST_COLUMNS = 8
ENOUGH = 2.0**-23
#: Half a step of FP16's smallest numbers.
HALF_STEP = 2.0**-25


class Carried(NamedTuple):
    out: Tensor  # (B, H, N, E), O' for the kernel's backward
    delta: Tensor  # FP32 (B, C, N), what the wanted heads' rows carry


@float32_products()
def exact_delta(
    d_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lse: Tensor,
    *,
    spec: AttentionSpec,
    head_ids: Sequence[int],
    chunk: int = 128,
    unseeing: float = 0.0,
) -> Tensor:
    """Computes delta of a few heads as a backward needs it, FP32 (B, C, N), from unrounded P.

    delta_i = sum_j P_ij dP_ij / sum_j P_ij, with P = exp(S - L) and dP = dO V^T. L comes from the
    kernel's own forward, so the P of a row need not sum to 1: an L of 1,000 is rounded to 6e-5.
    Dividing by the sum, a sink's P included, makes the row of dS sum to 0, which is what goes wrong
    in training. FP64 inputs give FP64. For a row that sees no key delta is `unseeing`; NaN makes
    `write_carrier` leave the row alone, because engines differ in such rows.
    """
    delta = q.new_full((len(q), len(head_ids), q.shape[2]), unseeing, dtype=_dtype_of_sums(q))
    for terms in recomputed(d_out, q, k, v, spec, head_ids, chunk, lse):
        weighted = terms.d_probabilities.mul_(terms.probabilities).sum(-1)
        row_sum = terms.row_sum[..., 0]
        found = (weighted / row_sum).masked_fill(row_sum == 0, unseeing)
        delta[:, terms.places, terms.rows] = found
    return delta


class Terms(NamedTuple):
    """Some rows of C query heads that share a key head, and all keys that one of them sees."""

    places: list[int]  # index of each head in the wanted heads
    key_head: int
    rows: slice
    keys: slice
    tile: Tile  # their positions
    products: Tensor  # (B, C, R, K), scale * q k
    capped: Tensor  # these after the soft cap
    probabilities: Tensor  # (B, C, R, K), before they are divided by their sum
    row_sum: Tensor  # (B, C, R, 1), what a sink takes included
    d_probabilities: Tensor  # (B, C, R, K), dO V^T


def recomputed(
    d_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    spec: AttentionSpec,
    head_ids: Sequence[int],
    chunk: int,
    lse: Tensor | None = None,
) -> Iterator[Terms]:
    """Recomputes P and dP of a few heads, in FP32 or FP64; memory grows as chunk x M."""
    of_queries, of_keys = spec.starts
    d_out, q = (in_documents(x, of_queries) for x in (d_out, q))
    k, v = (in_documents(x, of_keys) for x in (k, v))
    shape = (len(q), q.shape[1], q.shape[2], k.shape[2])
    group, dtype = q.shape[1] // k.shape[1], _dtype_of_sums(q)
    row_positions, key_positions = (torch.arange(n, device=q.device) for n in shape[2:])
    visible = visible_range(spec, shape, q.device)
    spans = [(rows, keys) for rows, keys in key_spans(spec, shape, chunk) if keys.start < keys.stop]
    for key_head in sorted({head // group for head in head_ids}):
        places = [place for place, head in enumerate(head_ids) if head // group == key_head]
        chosen = [head_ids[place] for place in places]
        members = torch.tensor(chosen, dtype=torch.int64, device=q.device)
        k_wide, v_wide = (x[:, key_head, None].to(dtype) for x in (k, v))
        sinks = None if spec.sinks is None else spec.sinks[members, None, None].to(dtype)
        for rows, keys in spans:
            q_rows, d_out_rows = (x[:, :, rows][:, members].to(dtype) for x in (q, d_out))
            tile = members, row_positions[rows], key_positions[keys]
            products = (q_rows @ k_wide[:, :, keys].mT).mul_(spec.scale)
            plain = capped(products, spec.softcap)
            mask = mask_tile(spec, shape, *tile, visible).to(products.dtype)
            scores = modified(plain, spec, tile) + mask
            if lse is None:  # the row's own maximum
                reference = scores.amax(-1, keepdim=True)
                reference = reference if sinks is None else reference.maximum(sinks)
            else:
                reference = lse[:, :, rows][:, members, :, None].to(dtype)
            # In a row that sees no key all scores are -inf.
            reference = reference.masked_fill(reference.isinf(), 0.0)
            probabilities = scores.sub_(reference).exp_()
            row_sum = probabilities.sum(-1, keepdim=True)
            if sinks is not None:
                row_sum += (sinks - reference).exp_()
            d_probabilities = d_out_rows @ v_wide[:, :, keys].mT
            yield Terms(
                places, key_head, rows, keys, tile, products, plain, probabilities, row_sum,
                d_probabilities,
            )  # fmt: skip


def _dtype_of_sums(q: Tensor) -> torch.dtype:
    return torch.float64 if q.dtype == torch.float64 else torch.float32


def write_carrier(out_prime: Tensor, d_out: Tensor, delta: Tensor, head_ids: Sequence[int]) -> None:
    """Makes some heads' rows of O' carry a delta, FP32 (B, C, N): rowsum(dO * O') = delta.

    A row of O' is 0 except at the three entries of the largest |dO|, the first where several are
    alike: x1 = delta / g1, x2 = (delta - g1 x1) / g2 and x3 likewise, each rounded to the format of
    O' and kept within its range; g is dO there. The three are the largest of the first eight
    columns where that is enough: any dO that is not 0 will do, as long as the quotients have room
    in the format. Else they are the largest of the row.

    That misses delta by 2^-27 of it at most in BF16, with two dO that are not 0 in the whole row by
    2^-18, with one by 2^-9; with none delta is 0 and so is the row. FP16 has steps of 2^-24 below
    2^-14, so that the miss may be half of that times the smallest of the three |dO|, and ends at
    65,504, beyond which the next terms take over.

    A row of `out_prime`, O or a copy of it, keeps what it has where this does not work: where delta
    or a dO that would be divided by is not finite, so that NaN and infinities arise as they would
    have, and where all three terms cannot reach delta.
    """
    index = torch.tensor(list(head_ids), dtype=torch.int64, device=out_prime.device)
    gradients = d_out[:, index].to(delta.dtype)
    if not gradients.numel():
        return
    few, rest, third = _carrying_terms(gradients[..., :FIRST_COLUMNS], delta, out_prime.dtype)
    bound = (delta.abs() * ENOUGH).maximum(third * HALF_STEP)
    enough = (rest.abs() <= bound) & delta.isfinite()
    carrier, rest, _ = _carrying_terms(gradients, delta, out_prime.dtype)
    bound = (delta.abs() * MISS).maximum(gradients.abs().amax(-1) * SMALLEST_MISS)
    reached = (rest.abs() <= bound) & delta.isfinite()
    carrier = torch.where(reached[..., None], carrier, out_prime[:, index])
    few = torch.nn.functional.pad(few, (0, carrier.shape[-1] - few.shape[-1]))
    out_prime[:, index] = torch.where(enough[..., None], few, carrier)


def carry_exact_delta(
    d_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    *,
    spec: AttentionSpec,
    head_ids: Sequence[int],
    into: Tensor | None = None,
) -> Carried:
    """Makes the O' with which a kernel's backward uses the exact delta of some heads."""
    delta = exact_delta(d_out, q, k, v, lse, spec=spec, head_ids=head_ids, unseeing=math.nan)
    carried = torch.empty_like(out).copy_(out) if into is None else into
    write_carrier(carried, d_out, delta, head_ids)
    return Carried(carried, delta)


def carry_compensated_delta(
    d_out: Tensor,
    out: Tensor,
    residual: Tensor,
    *,
    head_ids: Sequence[int],
    into: Tensor | None = None,
) -> Tensor:
    """Makes an O' that carries rowsum(dO (O + residual)) in some heads."""
    index = torch.tensor(list(head_ids), dtype=torch.int64, device=out.device)
    rounded, lost, gradients = (x.index_select(1, index) for x in (out, residual, d_out))
    if lost.dtype == torch.int8:
        lost = decode_residual(rounded, lost)
    delta = (gradients.float() * (rounded.float() + lost.float())).sum(-1)
    carried = torch.empty_like(out).copy_(out) if into is None else into
    write_carrier(carried, d_out, delta, head_ids)
    return carried


def _carrying_terms(
    gradients: Tensor, delta: Tensor, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns rows of three numbers, what these leave of delta, and the smallest |dO| there."""
    carrier = torch.zeros_like(gradients, dtype=dtype)
    largest = torch.finfo(dtype).max
    sizes = gradients.abs()
    rest, gradient = delta, delta
    for _ in range(min(TERMS, sizes.shape[-1])):
        place = sizes.argmax(-1, keepdim=True)
        gradient = gradients.gather(-1, place)[..., 0]
        quotient = torch.where(gradient == 0, 0, rest / gradient).clamp(-largest, largest)
        term = round_nearest(quotient, dtype)
        rest = rest - gradient * term.to(rest.dtype)
        carrier.scatter_(-1, place, term[..., None])
        sizes.scatter_(-1, place, -1.0)
    return carrier, rest, gradient.abs()


def float_carrier(d_out: Tensor, delta: Tensor) -> Tensor:
    """Returns an FP32 O' with rowsum(dO * O') = delta; 0 where dO, and with it delta, is 0."""
    d_out = d_out.float()
    squares = d_out.square().sum(-1)
    return (delta / squares).where(squares > 0, 0.0).unsqueeze(-1) * d_out


def lse_gradient(delta_used: Tensor, delta: Tensor) -> Tensor:
    """Returns dL with which dS = P (dP - (delta_used - dL)) has the wanted delta; else 0."""
    return torch.where(delta.isfinite(), delta_used - delta, 0.0)
