"""The backward in Triton: delta and dQ over tiles of queries, dK and dV over tiles of keys.

There are no atomics, so every run gives the same bits.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from guardbit.kernels.device import launch
from guardbit.kernels.device.primitives import (
    COUNTS,
    LOG2_E,
    allowed,
    behind,
    decode_residual,
    head_of,
    kept_entries,
    load_tile,
    part_of_keys,
    product,
    round_nearest,
    seeing_rows,
    store_tile,
    visible_keys,
    widen,
)
from guardbit.kernels.mask import causal_shift
from guardbit.kernels.reference import Causal, Dropout, Gradients
from guardbit.records import STABILIZERS

_COMPENSATED = tl.constexpr(STABILIZERS.index("compensated"))


@triton.jit
def _query_gradient(
    dq, q, d_out, negative_lse, delta, keys, positions, start, end, seqlen_k, shift, scale, philox,
    DROPOUT: tl.constexpr, MASKED: tl.constexpr, CAUSAL: tl.constexpr, HEAD_DIM: tl.constexpr,
    WIDTH: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Adds the part of the keys from `start` to `end` to dQ / scale of a tile of rows.

    `keys` are where K and V of the head begin, and the strides of their rows; `philox` is key,
    head, threshold and factor.
    """
    k_base, v_base, k_stride, v_stride = keys
    philox_key, batch_head, threshold, factor = philox
    dtype: tl.constexpr = q.dtype
    zeros = tl.zeros((q.shape[0], BLOCK_N), tl.float32)
    for first in tl.range(start, end, BLOCK_N):
        k = load_tile(k_base, first, k_stride, seqlen_k, BLOCK_N, HEAD_DIM, WIDTH, MASKED)
        v = load_tile(v_base, first, v_stride, seqlen_k, BLOCK_N, HEAD_DIM, WIDTH, MASKED)
        scores = product(q, tl.trans(k), zeros)
        # Not in log2 units, where L would be rounded once more. A P of scores beyond 10^4 is off by
        # exp(L's own rounding), which is none where one key has all of P and scale is a power of 2.
        exponents = tl.fma(scores, scale, negative_lse[:, None]) * LOG2_E
        if MASKED:
            columns = first + tl.arange(0, BLOCK_N)
            visible = allowed(positions[:, None], columns[None, :], seqlen_k, shift, CAUSAL)
            exponents = tl.where(visible, exponents, float("-inf"))
        probabilities = tl.exp2(exponents)
        d_probabilities = product(d_out, tl.trans(v), zeros)
        if DROPOUT:
            kept = kept_entries(philox_key, positions, batch_head, first, threshold, BLOCK_N)
            d_probabilities = tl.where(kept, d_probabilities * factor, 0.0)
        d_scores = probabilities * (d_probabilities - delta[:, None])
        dq = product(round_nearest(d_scores, dtype), k, dq)
    return dq


@triton.jit(do_not_specialize=COUNTS)
def query_gradients_kernel(
    q_pointer, k_pointer, v_pointer, out_pointer, residual_pointer, d_out_pointer, lse_pointer,
    codes_pointer, dq_pointer, statistics_pointer, head_ids_pointer, philox_key_pointer,
    q_strides, k_strides, v_strides, out_strides, residual_strides, d_out_strides, dq_strides,
    computed_heads, group, seqlen_q, seqlen_k, shift, scale, num_heads, threshold, factor,
    DROPOUT: tl.constexpr, CAUSAL: tl.constexpr, HEAD_DIM: tl.constexpr, WIDTH: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """One program: delta and dQ of BLOCK_M queries of one head.

    It stores -L and delta of each row side by side. Heavy causal tiles come first.
    """
    row_tiles = tl.cdiv(seqlen_q, BLOCK_M)
    program = tl.program_id(0)
    batch_head = program // row_tiles
    first = (row_tiles - 1 - program % row_tiles) * BLOCK_M
    batch = (batch_head // computed_heads).to(tl.int64)
    head = batch_head % computed_heads
    key_head = head // group

    q_base = head_of(q_pointer, q_strides, batch, head)
    k_base = head_of(k_pointer, k_strides, batch, key_head)
    v_base = head_of(v_pointer, v_strides, batch, key_head)
    d_out_base = head_of(d_out_pointer, d_out_strides, batch, head)
    dq_base = head_of(dq_pointer, dq_strides, batch, head)
    positions = first + tl.arange(0, BLOCK_M)
    q = load_tile(q_base, first, q_strides[2], seqlen_q, BLOCK_M, HEAD_DIM, WIDTH, True)
    d_out = load_tile(d_out_base, first, d_out_strides[2], seqlen_q, BLOCK_M, HEAD_DIM, WIDTH, True)
    out_base = head_of(out_pointer, out_strides, batch, head)
    out = load_tile(out_base, first, out_strides[2], seqlen_q, BLOCK_M, HEAD_DIM, WIDTH, True)
    delta = tl.sum(widen(d_out) * widen(out), 1)
    # A variant of its own for launches without such heads would sum delta in another order.
    if tl.load(codes_pointer + head) == _COMPENSATED:
        residual_base = head_of(residual_pointer, residual_strides, batch, head)
        counts = load_tile(
            residual_base, first, residual_strides[2], seqlen_q, BLOCK_M, HEAD_DIM, WIDTH, True
        )
        delta += tl.sum(widen(d_out) * decode_residual(out, counts), 1)
    inside = positions < seqlen_q
    row_place = batch_head.to(tl.int64) * seqlen_q + positions
    log_sum = tl.load(lse_pointer + row_place, mask=inside, other=float("-inf"))
    # -inf, which makes its P 0, for a row with no allowed key too.
    negative_lse = tl.where(log_sum == float("-inf"), log_sum, -log_sum)
    tl.store(statistics_pointer + 2 * row_place, negative_lse, mask=inside)
    tl.store(statistics_pointer + 2 * row_place + 1, delta, mask=inside)

    philox_key = tl.full((), 0, tl.int64)
    philox_head = philox_key
    if DROPOUT:
        philox_key = tl.load(philox_key_pointer)
        philox_head = batch * num_heads + tl.load(head_ids_pointer + head)
    whole_end, end = visible_keys(first, seqlen_k, shift, BLOCK_M, BLOCK_N, CAUSAL)
    keys = k_base, v_base, k_strides[2], v_strides[2]
    philox = philox_key, philox_head, threshold, factor
    dq = tl.zeros((BLOCK_M, WIDTH), tl.float32)
    for part in tl.static_range(1, 3):
        begin, stop = part_of_keys(part, 0, 0, whole_end, end)
        # Loops never run zero times, for the reason given in the forward.
        if stop > begin:
            dq = _query_gradient(
                dq, q, d_out, negative_lse, delta, keys, positions, begin, stop, seqlen_k, shift,
                scale, philox, DROPOUT, part != 1, CAUSAL, HEAD_DIM, WIDTH, BLOCK_N,
            )  # fmt: skip
    rounded = round_nearest(dq * scale, q_pointer.dtype.element_ty)
    store_tile(dq_base, first, dq_strides[2], seqlen_q, rounded, BLOCK_M, HEAD_DIM, WIDTH)


@triton.jit
def _key_gradients(
    dk, dv, k, v, rows, first_key, start, end, seqlen_q, shift, scale, philox,
    DROPOUT: tl.constexpr, BOUNDED: tl.constexpr, CAUSAL: tl.constexpr, HEAD_DIM: tl.constexpr,
    WIDTH: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """Adds the part of the queries from `start` to `end` to dK / scale and dV of a tile of keys.

    S, P and their gradients are transposed, (BLOCK_N, BLOCK_M), so that P and dS are the left
    operands. `rows` are where Q and dO of the head begin, the strides of their rows, and where its
    statistics begin that `query_gradients_kernel` wrote, (seqlen_q, 2).
    """
    q_base, d_out_base, q_stride, d_out_stride, statistics_base = rows
    philox_key, batch_head, threshold, factor = philox
    columns = first_key + tl.arange(0, k.shape[0])
    dtype: tl.constexpr = k.dtype
    zeros = tl.zeros((k.shape[0], BLOCK_M), tl.float32)
    for first in tl.range(start, end, BLOCK_M):
        positions = first + tl.arange(0, BLOCK_M)
        q = load_tile(q_base, first, q_stride, seqlen_q, BLOCK_M, HEAD_DIM, WIDTH, BOUNDED)
        # Side by side, the numbers of a row are as many as the threads at least. Fewer, Triton 3.6
        # lets each thread copy all that it needs.
        pairs = statistics_base + 2 * positions[:, None] + tl.arange(0, 2)[None, :]
        if BOUNDED:
            # Rows past the end are 0 in q and d_out too: whatever their P is, they add nothing.
            statistics = tl.load(pairs, mask=(positions < seqlen_q)[:, None], other=0.0)
        else:
            statistics = tl.load(pairs)
        negative_lse, delta = tl.split(statistics)
        d_out = load_tile(
            d_out_base, first, d_out_stride, seqlen_q, BLOCK_M, HEAD_DIM, WIDTH, BOUNDED
        )
        scores = product(k, tl.trans(q), zeros)
        exponents = tl.fma(scores, scale, negative_lse[None, :]) * LOG2_E
        if CAUSAL:
            visible = behind(positions[None, :], columns[:, None], shift)
            exponents = tl.where(visible, exponents, float("-inf"))
        probabilities = tl.exp2(exponents)
        weights = round_nearest(probabilities, dtype)
        if DROPOUT:
            BLOCK_N: tl.constexpr = k.shape[0]
            kept = tl.trans(
                kept_entries(philox_key, positions, batch_head, first_key, threshold, BLOCK_N)
            )
            weights = tl.where(kept, weights, 0.0)
        dv = product(weights, d_out, dv)
        d_probabilities = product(v, tl.trans(d_out), zeros)
        if DROPOUT:
            d_probabilities = tl.where(kept, d_probabilities * factor, 0.0)
        d_scores = probabilities * (d_probabilities - delta[None, :])
        dk = product(round_nearest(d_scores, dtype), q, dk)
    return dk, dv


@triton.jit(do_not_specialize=COUNTS)
def key_gradients_kernel(
    q_pointer, k_pointer, v_pointer, d_out_pointer, statistics_pointer, dk_pointer, dv_pointer,
    head_ids_pointer, philox_key_pointer,
    q_strides, k_strides, v_strides, d_out_strides, dk_strides, dv_strides,
    kv_heads, group, seqlen_q, seqlen_k, shift, scale, num_heads, threshold, factor,
    DROPOUT: tl.constexpr, CAUSAL: tl.constexpr, BOUNDED: tl.constexpr, HEAD_DIM: tl.constexpr,
    WIDTH: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """One program: dK and dV of BLOCK_N keys of one key head, over all query heads of its group.

    The first keys come first: causal masking makes them the heaviest. BOUNDED is set where BLOCK_M
    does not divide seqlen_q.
    """
    key_tiles = tl.cdiv(seqlen_k, BLOCK_N)
    program = tl.program_id(0)
    batch_head = program // key_tiles
    first = program % key_tiles * BLOCK_N
    batch = (batch_head // kv_heads).to(tl.int64)
    key_head = batch_head % kv_heads

    k_base = head_of(k_pointer, k_strides, batch, key_head)
    v_base = head_of(v_pointer, v_strides, batch, key_head)
    k = load_tile(k_base, first, k_strides[2], seqlen_k, BLOCK_N, HEAD_DIM, WIDTH, True)
    v = load_tile(v_base, first, v_strides[2], seqlen_k, BLOCK_N, HEAD_DIM, WIDTH, True)

    start, whole = seeing_rows(first, seqlen_q, shift, BLOCK_M, BLOCK_N, CAUSAL)
    philox_key = tl.full((), 0, tl.int64)
    philox_head = philox_key
    if DROPOUT:
        philox_key = tl.load(philox_key_pointer)
    dk = tl.zeros((BLOCK_N, WIDTH), tl.float32)
    dv = tl.zeros((BLOCK_N, WIDTH), tl.float32)
    for member in tl.range(0, group, 1, num_stages=1):
        head = key_head * group + member
        q_base = head_of(q_pointer, q_strides, batch, head)
        d_out_base = head_of(d_out_pointer, d_out_strides, batch, head)
        statistics_base = statistics_pointer + 2 * (batch * kv_heads * group + head) * seqlen_q
        if DROPOUT:
            philox_head = batch * num_heads + tl.load(head_ids_pointer + head)
        rows = q_base, d_out_base, q_strides[2], d_out_strides[2], statistics_base
        philox = philox_key, philox_head, threshold, factor
        # First the queries that see some of the keys, then those that see them all.
        for seeing_all in tl.static_range(0 if CAUSAL else 1, 2):
            begin = whole if seeing_all else start
            stop = seqlen_q if seeing_all else whole
            if stop > begin:
                dk, dv = _key_gradients(
                    dk, dv, k, v, rows, first, begin, stop, seqlen_q, shift, scale, philox, DROPOUT,
                    BOUNDED, seeing_all == 0, HEAD_DIM, WIDTH, BLOCK_M,
                )  # fmt: skip
    dtype: tl.constexpr = k_pointer.dtype.element_ty
    dk_base = head_of(dk_pointer, dk_strides, batch, key_head)
    dv_base = head_of(dv_pointer, dv_strides, batch, key_head)
    rounded = round_nearest(dk * scale, dtype)
    store_tile(dk_base, first, dk_strides[2], seqlen_k, rounded, BLOCK_N, HEAD_DIM, WIDTH)
    if DROPOUT:
        dv *= factor
    rounded = round_nearest(dv, dtype)
    store_tile(dv_base, first, dv_strides[2], seqlen_k, rounded, BLOCK_N, HEAD_DIM, WIDTH)


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
    d_out, q, k, v, out = map(launch.rows_adjacent, (d_out, q, k, v, out))
    batch, computed_heads, seqlen_q, head_dim = q.shape
    kv_heads, seqlen_k = k.shape[1:3]
    shift = causal_shift(causal, seqlen_q, seqlen_k)
    codes = launch.device_constant(tuple(map(STABILIZERS.index, stabilizers)), torch.int8, q.device)
    # Never read if no head is compensated; any pointer to bytes will do.
    residual = out.view(torch.int8) if residual is None else launch.rows_adjacent(residual)
    dq, dk, dv = (launch.empty_like_rows(x) for x in (q, k, v))

    width = launch.padded_width(head_dim)
    query_tile = launch.tile_of(q, width, "query_gradients")
    key_tile = launch.tile_of(q, width, "key_gradients")
    lse = lse.contiguous()
    statistics = lse.new_empty((*lse.shape, 2))
    random, dropped = (codes, lse), (computed_heads, 0, 1.0)
    if dropout is not None:
        query_tile, key_tile = query_tile.for_dropout, key_tile.for_dropout
        ids = launch.device_constant(dropout.head_ids, torch.int32, q.device)
        random = (ids, dropout.philox_key)
        dropped = (dropout.num_heads, dropout.threshold, dropout.factor)
    shared = (computed_heads // kv_heads, seqlen_q, seqlen_k, shift, scale, *dropped)
    options = {
        "DROPOUT": dropout is not None,
        "CAUSAL": causal is not False,
        "HEAD_DIM": head_dim,
        "WIDTH": width,
    }
    if q.numel():
        launch.run(
            query_gradients_kernel,
            -(-seqlen_q // query_tile.block_m) * batch * computed_heads,
            (q, k, v, out, residual, d_out, lse, codes, dq, statistics, *random),
            launch.strides(q, k, v, out, residual, d_out, dq),
            (computed_heads, *shared),
            **options,
            **query_tile.constants,
        )
    if k.numel():
        launch.run(
            key_gradients_kernel,
            -(-seqlen_k // key_tile.block_n) * batch * kv_heads,
            (q, k, v, d_out, statistics, dk, dv, *random),
            launch.strides(q, k, v, d_out, dk, dv),
            (kv_heads, *shared),
            **options,
            BOUNDED=seqlen_q % key_tile.block_m != 0,
            **key_tile.constants,
        )
    return Gradients(dq, dk, dv)
