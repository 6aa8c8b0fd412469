"""Backward in Triton: delta with its bias, dQ, dK and dV; no atomics, so the same bits every run.

Shapes: q, out, d_out `(B, H, N, D)`; k, v `(B, H_kv, M, D)`, H a multiple of H_kv; lse FP32
`(B, H, N)`.
"""

# Triton kernels are typed by Triton: constexpr parameters take plain values, launches take options.
# pyright: reportArgumentType=false, reportAssignmentType=false, reportCallIssue=false
# pyright: reportGeneralTypeIssues=false, reportInvalidTypeForm=false, reportOperatorIssue=false
# pyright: reportPossiblyUnboundVariable=false

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from guardbit.kernels import launch, tiles
from guardbit.kernels.mask.geometry import causal_shift
from guardbit.kernels.mask.tiles import allowed, behind, seeing_rows, visible_keys
from guardbit.kernels.primitives import (
    LOG2_E,
    decode_residual,
    head_of,
    kept_entries,
    load_tile,
    product,
    round_nearest,
    store_tile,
    widen,
)
from guardbit.kernels.reference import Causal, Dropout, Gradients
from guardbit.records import STABILIZERS

_COMPENSATED = tl.constexpr(STABILIZERS.index("compensated"))


@triton.jit
def _query_gradient(
    dq,
    q,
    d_out,
    negative_lse,
    delta,
    k_base,
    v_base,
    k_stride,
    v_stride,
    rows,
    start,
    end,
    keys,
    shift,
    scale,
    word,
    place,
    threshold,
    factor,
    DROPOUT: tl.constexpr,
    MASKED: tl.constexpr,
    CAUSAL: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    KEYS: tl.constexpr,
):
    """Adds the share of the keys from `start` to `end` to dQ / scale of a tile of rows."""
    dtype: tl.constexpr = q.dtype
    zeros = tl.zeros((q.shape[0], KEYS), tl.float32)
    for first in tl.range(start, end, KEYS):
        k = load_tile(k_base, first, k_stride, keys, KEYS, HEAD_DIM, WIDTH, MASKED)
        v = load_tile(v_base, first, v_stride, keys, KEYS, HEAD_DIM, WIDTH, MASKED)
        scores = product(q, tl.trans(k), zeros)
        # Not in log2 units, where L would be rounded once more. A P of scores beyond 10^4 is off by
        # exp(L's own rounding), which is none where one key has all of P and scale is a power of 2.
        exponents = tl.fma(scores, scale, negative_lse[:, None]) * LOG2_E
        if MASKED:
            columns = first + tl.arange(0, KEYS)
            visible = allowed(rows[:, None], columns[None, :], keys, shift, CAUSAL)
            exponents = tl.where(visible, exponents, float("-inf"))
        probabilities = tl.exp2(exponents)
        d_probabilities = product(d_out, tl.trans(v), zeros)
        if DROPOUT:
            kept = kept_entries(word, rows, place, first, threshold, KEYS)
            d_probabilities = tl.where(kept, d_probabilities * factor, 0.0)
        d_scores = probabilities * (d_probabilities - delta[:, None])
        dq = product(round_nearest(d_scores, dtype), k, dq)
    return dq


@triton.jit(do_not_specialize=["heads", "group", "rows", "keys", "shift", "all_heads", "threshold"])
def query_gradients_kernel(
    q_pointer,
    k_pointer,
    v_pointer,
    out_pointer,
    residual_pointer,
    d_out_pointer,
    lse_pointer,
    codes_pointer,
    dq_pointer,
    statistics_pointer,
    numbers_pointer,
    word_pointer,
    q_strides,
    k_strides,
    v_strides,
    out_strides,
    residual_strides,
    d_out_strides,
    dq_strides,
    heads,
    group,
    rows,
    keys,
    shift,
    scale,
    all_heads,
    threshold,
    factor,
    DROPOUT: tl.constexpr,
    CAUSAL: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
):
    """One program: delta and dQ of ROWS queries of one head.

    Leaves -L and delta of each row side by side. Heavy causal tiles come first.
    """
    row_tiles = tl.cdiv(rows, ROWS)
    program = tl.program_id(0)
    place = program // row_tiles
    first = (row_tiles - 1 - program % row_tiles) * ROWS
    batch = (place // heads).to(tl.int64)
    head = place % heads
    key_head = head // group

    q_base = head_of(q_pointer, q_strides, batch, head)
    k_base = head_of(k_pointer, k_strides, batch, key_head)
    v_base = head_of(v_pointer, v_strides, batch, key_head)
    k_row, v_row = k_strides[2], v_strides[2]
    d_out_base = head_of(d_out_pointer, d_out_strides, batch, head)
    dq_base = head_of(dq_pointer, dq_strides, batch, head)
    positions = first + tl.arange(0, ROWS)
    q = load_tile(q_base, first, q_strides[2], rows, ROWS, HEAD_DIM, WIDTH, True)
    d_out = load_tile(d_out_base, first, d_out_strides[2], rows, ROWS, HEAD_DIM, WIDTH, True)
    out_base = head_of(out_pointer, out_strides, batch, head)
    out = load_tile(out_base, first, out_strides[2], rows, ROWS, HEAD_DIM, WIDTH, True)
    delta = tl.sum(widen(d_out) * widen(out), 1)
    # A variant of its own for launches without such heads would sum delta in another order.
    if tl.load(codes_pointer + head) == _COMPENSATED:
        residual_base = head_of(residual_pointer, residual_strides, batch, head)
        counts = load_tile(
            residual_base, first, residual_strides[2], rows, ROWS, HEAD_DIM, WIDTH, True
        )
        delta += tl.sum(widen(d_out) * decode_residual(out, counts), 1)
    inside = positions < rows
    row_place = place.to(tl.int64) * rows + positions
    log_sum = tl.load(lse_pointer + row_place, mask=inside, other=float("-inf"))
    # -inf, which makes its P 0, for a row with no allowed key too.
    negative_lse = tl.where(log_sum == float("-inf"), log_sum, -log_sum)
    tl.store(statistics_pointer + 2 * row_place, negative_lse, mask=inside)
    tl.store(statistics_pointer + 2 * row_place + 1, delta, mask=inside)

    word = tl.full((), 0, tl.int64)
    random_place = word
    if DROPOUT:
        word = tl.load(word_pointer)
        random_place = batch * all_heads + tl.load(numbers_pointer + head)
    whole_end, end = visible_keys(first, keys, shift, ROWS, KEYS, CAUSAL)
    dq = tl.zeros((ROWS, WIDTH), tl.float32)
    # Loops never run zero times, for the reason given in the forward.
    if whole_end > 0:
        dq = _query_gradient(
            dq, q, d_out, negative_lse, delta, k_base, v_base, k_row, v_row, positions,
            0, whole_end, keys, shift, scale, word, random_place, threshold, factor,
            DROPOUT, False, CAUSAL, HEAD_DIM, WIDTH, KEYS,
        )  # fmt: skip
    if end > whole_end:
        dq = _query_gradient(
            dq, q, d_out, negative_lse, delta, k_base, v_base, k_row, v_row, positions,
            whole_end, end, keys, shift, scale, word, random_place, threshold, factor,
            DROPOUT, True, CAUSAL, HEAD_DIM, WIDTH, KEYS,
        )  # fmt: skip
    rounded = round_nearest(dq * scale, q_pointer.dtype.element_ty)
    store_tile(dq_base, first, dq_strides[2], rows, rounded, ROWS, HEAD_DIM, WIDTH)


@triton.jit
def _key_gradients(
    dk,
    dv,
    k,
    v,
    q_base,
    d_out_base,
    statistics_base,
    q_stride,
    d_out_stride,
    columns,
    start,
    end,
    rows,
    shift,
    scale,
    word,
    place,
    first_key,
    threshold,
    factor,
    DROPOUT: tl.constexpr,
    BOUNDED: tl.constexpr,
    CAUSAL: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Adds the share of the queries from `start` to `end` to dK / scale and dV of a tile of keys.

    S, P and their gradients are transposed, (KEYS, ROWS), so that P and dS are the left operands.
    The statistics are those that `query_gradients_kernel` left, (rows, 2).
    """
    dtype: tl.constexpr = k.dtype
    zeros = tl.zeros((k.shape[0], ROWS), tl.float32)
    for first in tl.range(start, end, ROWS):
        positions = first + tl.arange(0, ROWS)
        q = load_tile(q_base, first, q_stride, rows, ROWS, HEAD_DIM, WIDTH, BOUNDED)
        # Side by side, the numbers of a row are as many as the threads at least. Fewer, Triton 3.6
        # lets each thread copy all that it needs.
        pairs = statistics_base + 2 * positions[:, None] + tl.arange(0, 2)[None, :]
        if BOUNDED:
            # Rows past the end are 0 in q and d_out too: whatever their P is, they add nothing.
            statistics = tl.load(pairs, mask=(positions < rows)[:, None], other=0.0)
        else:
            statistics = tl.load(pairs)
        negative_lse, delta = tl.split(statistics)
        d_out = load_tile(d_out_base, first, d_out_stride, rows, ROWS, HEAD_DIM, WIDTH, BOUNDED)
        scores = product(k, tl.trans(q), zeros)
        exponents = tl.fma(scores, scale, negative_lse[None, :]) * LOG2_E
        if CAUSAL:
            visible = behind(positions[None, :], columns[:, None], shift)
            exponents = tl.where(visible, exponents, float("-inf"))
        probabilities = tl.exp2(exponents)
        weights = round_nearest(probabilities, dtype)
        if DROPOUT:
            KEYS: tl.constexpr = k.shape[0]
            kept = tl.trans(kept_entries(word, positions, place, first_key, threshold, KEYS))
            weights = tl.where(kept, weights, 0.0)
        dv = product(weights, d_out, dv)
        d_probabilities = product(v, tl.trans(d_out), zeros)
        if DROPOUT:
            d_probabilities = tl.where(kept, d_probabilities * factor, 0.0)
        d_scores = probabilities * (d_probabilities - delta[None, :])
        dk = product(round_nearest(d_scores, dtype), q, dk)
    return dk, dv


@triton.jit(
    do_not_specialize=["kv_heads", "group", "rows", "keys", "shift", "all_heads", "threshold"]
)
def key_gradients_kernel(
    q_pointer,
    k_pointer,
    v_pointer,
    d_out_pointer,
    statistics_pointer,
    dk_pointer,
    dv_pointer,
    numbers_pointer,
    word_pointer,
    q_strides,
    k_strides,
    v_strides,
    d_out_strides,
    dk_strides,
    dv_strides,
    kv_heads,
    group,
    rows,
    keys,
    shift,
    scale,
    all_heads,
    threshold,
    factor,
    DROPOUT: tl.constexpr,
    CAUSAL: tl.constexpr,
    BOUNDED: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
):
    """One program: dK and dV of KEYS keys of one key head, over all query heads of its group.

    The first keys, which causal masking makes the heaviest, come first. BOUNDED says that ROWS does
    not divide the number of rows.
    """
    key_tiles = tl.cdiv(keys, KEYS)
    program = tl.program_id(0)
    place = program // key_tiles
    first = program % key_tiles * KEYS
    batch = (place // kv_heads).to(tl.int64)
    key_head = place % kv_heads

    k_base = head_of(k_pointer, k_strides, batch, key_head)
    v_base = head_of(v_pointer, v_strides, batch, key_head)
    q_row, d_out_row = q_strides[2], d_out_strides[2]
    k = load_tile(k_base, first, k_strides[2], keys, KEYS, HEAD_DIM, WIDTH, True)
    v = load_tile(v_base, first, v_strides[2], keys, KEYS, HEAD_DIM, WIDTH, True)
    columns = first + tl.arange(0, KEYS)

    start, whole = seeing_rows(first, rows, shift, ROWS, KEYS, CAUSAL)
    word = tl.full((), 0, tl.int64)
    random_place = word
    if DROPOUT:
        word = tl.load(word_pointer)
    dk = tl.zeros((KEYS, WIDTH), tl.float32)
    dv = tl.zeros((KEYS, WIDTH), tl.float32)
    for member in tl.range(0, group, 1, num_stages=1):
        head = key_head * group + member
        q_base = head_of(q_pointer, q_strides, batch, head)
        d_out_base = head_of(d_out_pointer, d_out_strides, batch, head)
        statistics_base = statistics_pointer + 2 * (batch * kv_heads * group + head) * rows
        if DROPOUT:
            random_place = batch * all_heads + tl.load(numbers_pointer + head)
        if CAUSAL:
            if whole > start:
                dk, dv = _key_gradients(
                    dk, dv, k, v, q_base, d_out_base, statistics_base, q_row, d_out_row,
                    columns, start, whole, rows, shift, scale, word, random_place, first,
                    threshold, factor, DROPOUT, BOUNDED, True, HEAD_DIM, WIDTH, ROWS,
                )  # fmt: skip
            if rows > whole:
                dk, dv = _key_gradients(
                    dk, dv, k, v, q_base, d_out_base, statistics_base, q_row, d_out_row,
                    columns, whole, rows, rows, shift, scale, word, random_place, first,
                    threshold, factor, DROPOUT, BOUNDED, False, HEAD_DIM, WIDTH, ROWS,
                )  # fmt: skip
        elif rows > 0:
            dk, dv = _key_gradients(
                dk, dv, k, v, q_base, d_out_base, statistics_base, q_row, d_out_row,
                columns, 0, rows, rows, shift, scale, word, random_place, first, threshold,
                factor, DROPOUT, BOUNDED, False, HEAD_DIM, WIDTH, ROWS,
            )  # fmt: skip
    dtype: tl.constexpr = k_pointer.dtype.element_ty
    dk_base = head_of(dk_pointer, dk_strides, batch, key_head)
    dv_base = head_of(dv_pointer, dv_strides, batch, key_head)
    rounded = round_nearest(dk * scale, dtype)
    store_tile(dk_base, first, dk_strides[2], keys, rounded, KEYS, HEAD_DIM, WIDTH)
    if DROPOUT:
        dv *= factor
    rounded = round_nearest(dv, dtype)
    store_tile(dv_base, first, dv_strides[2], keys, rounded, KEYS, HEAD_DIM, WIDTH)


def backward(
    d_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    residual: Tensor | None,
    *,
    causal: Causal,
    scale: float,
    stabilizers: Sequence[str],
    dropout: Dropout | None = None,
) -> Gradients:
    """Backward with the roundings of FlashAttention-2 (paper, Algorithm 2).

    Two launches: delta and dQ over tiles of queries, dK and dV over tiles of keys. Both compute S
    and dP, seven products instead of five, which spares the atomics.

    Args:
        d_out: (B, H, N, D), gradient of `out`; any strides.
        q: (B, H, N, D), BF16 or FP16.
        k: (B, H_kv, M, D).
        v: (B, H_kv, M, D).
        out: (B, H, N, D), from the forward.
        lse: FP32 (B, H, N), from the forward.
        residual: From the forward; None if no head is compensated.
        causal: See `Causal`.
        scale: Factor of Q K^T.
        stabilizers: The forward's, one name a head.
        dropout: The forward's.

    Returns:
        See `Gradients`; dq, dk and dv lie in memory as q, k and v do. Rows with no allowed key have
        gradient 0.

    Raises:
        TypeError: If a dtype is neither BF16 nor FP16.
        ValueError: If a head is compensated and no residual came, `stabilizers` has not one known
            name a head, or `causal` is unknown.
    """
    launch.check_tensors(d_out=d_out, q=q, k=k, v=v, out=out)
    d_out, q, k, v, out = (launch.rows_adjacent(x) for x in (d_out, q, k, v, out))
    batch, heads, rows, head_dim = q.shape
    kv_heads, keys = k.shape[1:3]
    launch.check_count(stabilizers, heads)
    shift = causal_shift(causal, rows, keys)
    codes = launch.device_codes(tuple(stabilizers), q.device)
    if "compensated" in stabilizers and residual is None:
        raise ValueError("Compensated heads need the forward's residual, but it is None.")
    # Never read if no head is compensated; any pointer to bytes will do.
    residual = out.view(torch.int8) if residual is None else launch.rows_adjacent(residual)
    dq, dk, dv = (launch.empty_like_rows(x) for x in (q, k, v))

    width = launch.padded_width(head_dim)
    capability = launch.capability_of(q)
    size = tiles.tile(capability, width, "query_gradients")
    key_size = tiles.tile(capability, width, "key_gradients")
    if dropout is not None:
        size, key_size = size.for_dropout, key_size.for_dropout
    lse = lse.contiguous()
    statistics = lse.new_empty((*lse.shape, 2))
    random, dropped = (codes, lse), (heads, 0, 1.0)
    if dropout is not None:
        random = (launch.device_numbers(dropout.heads, q.device), dropout.word)
        dropped = (dropout.all_heads, dropout.threshold, dropout.factor)
    shared = (heads // kv_heads, rows, keys, shift, scale, *dropped)
    options = {
        "DROPOUT": dropout is not None,
        "CAUSAL": causal is not False,
        "HEAD_DIM": head_dim,
        "WIDTH": width,
        **launch.COMPILER_OPTIONS,
    }
    with launch.device_of(q):
        if q.numel():
            query_gradients_kernel[(triton.cdiv(rows, size.rows) * batch * heads,)](
                q,
                k,
                v,
                out,
                residual,
                d_out,
                lse,
                codes,
                dq,
                statistics,
                *random,
                q.stride()[:3],
                k.stride()[:3],
                v.stride()[:3],
                out.stride()[:3],
                residual.stride()[:3],
                d_out.stride()[:3],
                dq.stride()[:3],
                heads,
                *shared,
                **options,
                ROWS=size.rows,
                KEYS=size.keys,
                **size.options,
            )
        if k.numel():
            key_gradients_kernel[(triton.cdiv(keys, key_size.keys) * batch * kv_heads,)](
                q,
                k,
                v,
                d_out,
                statistics,
                dk,
                dv,
                *random,
                q.stride()[:3],
                k.stride()[:3],
                v.stride()[:3],
                d_out.stride()[:3],
                dk.stride()[:3],
                dv.stride()[:3],
                kv_heads,
                *shared,
                **options,
                BOUNDED=rows % key_size.rows != 0,
                ROWS=key_size.rows,
                KEYS=key_size.keys,
                **key_size.options,
            )
    return Gradients(dq, dk, dv)
