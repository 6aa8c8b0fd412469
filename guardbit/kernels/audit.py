"""Gradient audit in Triton: dQ, dK and dV of a few heads to FP32 accuracy on tensor cores.

Shapes: q, d_out `(B, H, N, D)`; k, v `(B, H_kv, M, D)`, H a multiple of H_kv; C heads are wanted.
Scores are kept as products q k with the sign of the scale; s stands for them.
"""

# Triton kernels are typed by Triton: constexpr parameters take plain values, launches take options.
# pyright: reportArgumentType=false, reportAssignmentType=false, reportCallIssue=false
# pyright: reportGeneralTypeIssues=false, reportInvalidTypeForm=false, reportOperatorIssue=false
# pyright: reportPossiblyUnboundVariable=false

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from guardbit.kernels import launch, tiles
from guardbit.kernels.mask.geometry import causal_shift
from guardbit.kernels.mask.tiles import allowed, seeing_rows, visible_keys
from guardbit.kernels.primitives import (
    head_of,
    load_tile,
    product,
    product_exact,
    store_tile,
)
from guardbit.kernels.reference import Causal


@triton.jit
def _scores(a, b, NEGATIVE_SCALE: tl.constexpr):
    """The s of all rows of a with all rows of b."""
    scores = product(a, tl.trans(b), tl.zeros((a.shape[0], b.shape[0]), tl.float32))
    if NEGATIVE_SCALE:
        scores = -scores
    return scores


@triton.jit(do_not_specialize=["heads", "group", "rows", "keys", "shift"])
def query_kernel(
    q_pointer,
    k_pointer,
    v_pointer,
    d_out_pointer,
    numbers_pointer,
    dq_pointer,
    reference_pointer,
    inverse_pointer,
    delta_pointer,
    q_strides,
    k_strides,
    v_strides,
    d_out_strides,
    heads,
    group,
    rows,
    keys,
    shift,
    scale,
    scale_log2,
    CAUSAL: tl.constexpr,
    NEGATIVE_SCALE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
):
    """One program: ROWS queries of one head. Their row statistics, then dQ.

    The keys are passed three times, for the largest s, for 1 / l and delta, and for dQ, so that
    nothing is ever rescaled.
    """
    row_tiles = tl.cdiv(rows, ROWS)
    program = tl.program_id(0)
    place = program // row_tiles
    first = (row_tiles - 1 - program % row_tiles) * ROWS
    batch = place // heads
    number = tl.load(numbers_pointer + place % heads)
    key_head = number // group

    q_base = head_of(q_pointer, q_strides, batch, number)
    k_base = head_of(k_pointer, k_strides, batch, key_head)
    v_base = head_of(v_pointer, v_strides, batch, key_head)
    d_out_base = head_of(d_out_pointer, d_out_strides, batch, number)
    positions = first + tl.arange(0, ROWS)
    q = load_tile(q_base, first, q_strides[2], rows, ROWS, HEAD_DIM, WIDTH, True)
    d_out = load_tile(d_out_base, first, d_out_strides[2], rows, ROWS, HEAD_DIM, WIDTH, True)
    _, end = visible_keys(first, keys, shift, ROWS, KEYS, CAUSAL)

    row_max = tl.full((ROWS,), float("-inf"), tl.float32)
    for start in tl.range(0, end, KEYS):
        columns = start + tl.arange(0, KEYS)
        visible = allowed(positions[:, None], columns[None, :], keys, shift, CAUSAL)
        k = load_tile(k_base, start, k_strides[2], keys, KEYS, HEAD_DIM, WIDTH, True)
        scores = tl.where(visible, _scores(q, k, NEGATIVE_SCALE), float("-inf"))
        row_max = tl.maximum(row_max, tl.max(scores, 1))
    # 0 instead of the -inf of a row that sees no key.
    reference = tl.where(row_max == float("-inf"), 0.0, row_max)

    zeros = tl.zeros((ROWS, KEYS), tl.float32)
    row_sum = tl.zeros((ROWS,), tl.float32)
    weighted = tl.zeros((ROWS,), tl.float32)
    for start in tl.range(0, end, KEYS):
        columns = start + tl.arange(0, KEYS)
        visible = allowed(positions[:, None], columns[None, :], keys, shift, CAUSAL)
        k = load_tile(k_base, start, k_strides[2], keys, KEYS, HEAD_DIM, WIDTH, True)
        v = load_tile(v_base, start, v_strides[2], keys, KEYS, HEAD_DIM, WIDTH, True)
        scores = tl.where(visible, _scores(q, k, NEGATIVE_SCALE), float("-inf"))
        probabilities = tl.exp2((scores - reference[:, None]) * scale_log2)
        row_sum += tl.sum(probabilities, 1)
        weighted += tl.sum(probabilities * product(d_out, tl.trans(v), zeros), 1)
    # P of a row that sees no key is 0.
    inverse = 1.0 / tl.where(row_sum == 0.0, float("inf"), row_sum)
    delta = weighted * inverse

    dq = tl.zeros((ROWS, WIDTH), tl.float32)
    for start in tl.range(0, end, KEYS):
        columns = start + tl.arange(0, KEYS)
        visible = allowed(positions[:, None], columns[None, :], keys, shift, CAUSAL)
        k = load_tile(k_base, start, k_strides[2], keys, KEYS, HEAD_DIM, WIDTH, True)
        v = load_tile(v_base, start, v_strides[2], keys, KEYS, HEAD_DIM, WIDTH, True)
        scores = tl.where(visible, _scores(q, k, NEGATIVE_SCALE), float("-inf"))
        probabilities = tl.exp2((scores - reference[:, None]) * scale_log2) * inverse[:, None]
        d_probabilities = product(d_out, tl.trans(v), zeros)
        dq += product_exact(probabilities * (d_probabilities - delta[:, None]), k)

    start = place.to(tl.int64) * rows
    dq_base = dq_pointer + start * HEAD_DIM
    store_tile(dq_base, first, HEAD_DIM, rows, dq * scale, ROWS, HEAD_DIM, WIDTH)
    tl.store(reference_pointer + start + positions, reference, mask=positions < rows)
    tl.store(inverse_pointer + start + positions, inverse, mask=positions < rows)
    tl.store(delta_pointer + start + positions, delta, mask=positions < rows)


@triton.jit(do_not_specialize=["heads", "group", "rows", "keys", "shift"])
def key_kernel(
    q_pointer,
    k_pointer,
    v_pointer,
    d_out_pointer,
    numbers_pointer,
    reference_pointer,
    inverse_pointer,
    delta_pointer,
    dk_pointer,
    dv_pointer,
    q_strides,
    k_strides,
    v_strides,
    d_out_strides,
    heads,
    group,
    rows,
    keys,
    shift,
    scale,
    scale_log2,
    CAUSAL: tl.constexpr,
    NEGATIVE_SCALE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
):
    """One program: dK and dV of KEYS keys, from one query head alone.

    S, P and their gradients are transposed, (KEYS, ROWS), so that P and dS are the left operands.
    """
    key_tiles = tl.cdiv(keys, KEYS)
    program = tl.program_id(0)
    place = program // key_tiles
    first = program % key_tiles * KEYS
    batch = place // heads
    number = tl.load(numbers_pointer + place % heads)
    key_head = number // group

    q_base = head_of(q_pointer, q_strides, batch, number)
    k_base = head_of(k_pointer, k_strides, batch, key_head)
    v_base = head_of(v_pointer, v_strides, batch, key_head)
    d_out_base = head_of(d_out_pointer, d_out_strides, batch, number)
    columns = first + tl.arange(0, KEYS)
    k = load_tile(k_base, first, k_strides[2], keys, KEYS, HEAD_DIM, WIDTH, True)
    v = load_tile(v_base, first, v_strides[2], keys, KEYS, HEAD_DIM, WIDTH, True)
    start, _ = seeing_rows(first, rows, shift, ROWS, KEYS, CAUSAL)

    statistics = place.to(tl.int64) * rows
    zeros = tl.zeros((KEYS, ROWS), tl.float32)
    dk = tl.zeros((KEYS, WIDTH), tl.float32)
    dv = tl.zeros((KEYS, WIDTH), tl.float32)
    for row in tl.range(start, rows, ROWS):
        positions = row + tl.arange(0, ROWS)
        inside = positions < rows
        reference = tl.load(reference_pointer + statistics + positions, mask=inside, other=0.0)
        inverse = tl.load(inverse_pointer + statistics + positions, mask=inside, other=0.0)
        delta = tl.load(delta_pointer + statistics + positions, mask=inside, other=0.0)
        q = load_tile(q_base, row, q_strides[2], rows, ROWS, HEAD_DIM, WIDTH, True)
        d_out = load_tile(d_out_base, row, d_out_strides[2], rows, ROWS, HEAD_DIM, WIDTH, True)
        visible = allowed(positions[None, :], columns[:, None], keys, shift, CAUSAL)
        scores = tl.where(visible, _scores(k, q, NEGATIVE_SCALE), float("-inf"))
        probabilities = tl.exp2((scores - reference[None, :]) * scale_log2) * inverse[None, :]
        d_probabilities = product(v, tl.trans(d_out), zeros)
        dv += product_exact(probabilities, d_out)
        dk += product_exact(probabilities * (d_probabilities - delta[None, :]), q)

    gradients = place.to(tl.int64) * keys * HEAD_DIM
    dk_base, dv_base = dk_pointer + gradients, dv_pointer + gradients
    store_tile(dk_base, first, HEAD_DIM, keys, dk * scale, KEYS, HEAD_DIM, WIDTH)
    store_tile(dv_base, first, HEAD_DIM, keys, dv, KEYS, HEAD_DIM, WIDTH)


def exact_backward(
    d_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: Causal,
    scale: float,
    heads: Sequence[int],
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of a few heads to FP32 accuracy, from the inputs a kernel got; O(N) memory.

    S and dP of BF16 or FP16 numbers are exact to FP32 on tensor cores; P and dS are FP32 and go
    into their products as three BF16 parts, which hold all 24 bits. delta is rowsum(P dP), as in
    `guardbit.kernels.reference.exact_backward`. No atomics: the same bits every run.

    Args:
        d_out: (B, H, N, D), gradient of the output; any strides.
        q: (B, H, N, D), BF16 or FP16.
        k: (B, H_kv, M, D).
        v: (B, H_kv, M, D).
        causal: See `Causal`.
        scale: Factor of Q K^T.
        heads: The query heads wanted, C of them.

    Returns:
        dQ (B, C, N, D), dK and dV (B, C, M, D), FP32. With grouped heads, dK and dV are the share
        of each query head alone: a key head's gradient is their sum over its group.

    Raises:
        IndexError: If a head does not exist.
        TypeError: If a dtype is neither BF16 nor FP16.
        ValueError: If `causal` is unknown, or a tensor is not on a CUDA device.
    """
    launch.check_tensors(d_out=d_out, q=q, k=k, v=v)
    missing = [head for head in heads if not 0 <= head < q.shape[1]]
    if missing:
        raise IndexError(f"`heads` takes 0 to {q.shape[1] - 1}, but holds {missing}.")
    d_out, q, k, v = (launch.rows_adjacent(x) for x in (d_out, q, k, v))
    batch, all_heads, rows, head_dim = q.shape
    keys = k.shape[2]
    shift = causal_shift(causal, rows, keys)
    numbers = launch.device_numbers(tuple(heads), q.device)
    count = len(numbers)
    dq = torch.empty((batch, count, rows, head_dim), dtype=torch.float32, device=q.device)
    dk, dv = torch.empty((2, batch, count, keys, head_dim), dtype=torch.float32, device=q.device)
    reference, inverse, delta = torch.empty((3, batch, count, rows), device=q.device)
    strides = [x.stride()[:3] for x in (q, k, v, d_out)]
    sizes = (count, all_heads // k.shape[1], rows, keys, shift)
    size_of_scale = launch.size_of_scale(scale)
    factors = (scale, size_of_scale * math.log2(math.e))
    width = launch.padded_width(head_dim)
    options = {
        "CAUSAL": causal is not False,
        "NEGATIVE_SCALE": scale < 0,
        "HEAD_DIM": head_dim,
        "WIDTH": width,
        **launch.COMPILER_OPTIONS,
    }
    capability = launch.capability_of(q)
    with launch.device_of(q):
        if dq.numel():
            size = tiles.tile(capability, width, "audit_query")
            query_kernel[(triton.cdiv(rows, size.rows) * batch * count,)](
                q,
                k,
                v,
                d_out,
                numbers,
                dq,
                reference,
                inverse,
                delta,
                *strides,
                *sizes,
                *factors,
                **options,
                ROWS=size.rows,
                KEYS=size.keys,
                **size.options,
            )
        if dk.numel():
            size = tiles.tile(capability, width, "audit_key")
            key_kernel[(triton.cdiv(keys, size.keys) * batch * count,)](
                q,
                k,
                v,
                d_out,
                numbers,
                reference,
                inverse,
                delta,
                dk,
                dv,
                *strides,
                *sizes,
                *factors,
                **options,
                ROWS=size.rows,
                KEYS=size.keys,
                **size.options,
            )
    return dq, dk, dv
