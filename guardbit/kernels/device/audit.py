"""The audit of gradients in Triton: dQ to FP32 accuracy.

Scores are kept as products q k with the sign of the scale, or with a soft cap as the tanh of them.
What a mask adds is divided by the size of the scale, or by the cap. The sum is called s here.
The oracle is `guardbit.kernels.reference.exact_query_gradient`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from guardbit.kernels.device import launch
from guardbit.kernels.device.primitives import (
    COUNTS,
    NO_MASK,
    add_mask,
    head_of,
    load_ranges,
    load_tile,
    product,
    product_exact,
    ranged_keys,
    store_tile,
    tanh_and_slope,
    visible_keys,
    visible_of,
    with_sink,
)
from guardbit.kernels.spec import AttentionSpec


@triton.jit
def _masked_scores(
    q, k, dense, rows, first, seqlen_q, seqlen_k, shift, inner_scale, inverse_scale,
    CAUSAL: tl.constexpr, RANGED: tl.constexpr, SOFTCAP: tl.constexpr, MASK: tl.constexpr,
    NEGATIVE_SCALE: tl.constexpr,
):  # fmt: skip
    """Returns s of a tile, -inf where a key is not seen, and the slope of the soft cap's tanh."""
    scores = product(q, tl.trans(k), tl.zeros((q.shape[0], k.shape[0]), tl.float32))
    if NEGATIVE_SCALE:
        scores = -scores
    slope = scores
    if SOFTCAP:
        scores, slope = tanh_and_slope(scores * inner_scale)
    visible = visible_of(rows, first, seqlen_k, shift, k.shape[0], CAUSAL, RANGED)
    if MASK != NO_MASK:
        scores, seen, _ = add_mask(
            scores, dense, rows[0], first, seqlen_q - 1, seqlen_k, inverse_scale, MASK, True
        )
        visible = visible & seen
    return tl.where(visible, scores, float("-inf")), slope


@triton.jit(do_not_specialize=COUNTS)
def query_kernel(
    q_pointer, k_pointer, v_pointer, d_out_pointer, mask_pointer, ranges_pointer, sinks_pointer,
    head_ids_pointer, dq_pointer,
    q_strides, k_strides, v_strides, d_out_strides, mask_strides,
    computed_heads, group, seqlen_q, seqlen_k, shift, inner_scale, scale, scale_log2, inverse_scale,
    CAUSAL: tl.constexpr, RANGED: tl.constexpr, SOFTCAP: tl.constexpr, SINKS: tl.constexpr,
    MASK: tl.constexpr, NEGATIVE_SCALE: tl.constexpr, HEAD_DIM: tl.constexpr, WIDTH: tl.constexpr,
    VALUE_DIM: tl.constexpr, VALUE_WIDTH: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):  # fmt: skip
    """One program: BLOCK_M queries of one head. Their row statistics, then dQ.

    The kernel passes over the keys three times: for the largest s, for 1 / l and delta, and for dQ.
    So nothing is ever rescaled.
    """
    row_tiles = tl.cdiv(seqlen_q, BLOCK_M)
    program = tl.program_id(0)
    batch_head = program // row_tiles
    first = (row_tiles - 1 - program % row_tiles) * BLOCK_M
    batch = batch_head // computed_heads
    head_id = tl.load(head_ids_pointer + batch_head % computed_heads)
    key_head = head_id // group

    q_base = head_of(q_pointer, q_strides, batch, head_id)
    k_base = head_of(k_pointer, k_strides, batch, key_head)
    v_base = head_of(v_pointer, v_strides, batch, key_head)
    d_out_base = head_of(d_out_pointer, d_out_strides, batch, head_id)
    mask_base = mask_pointer
    if MASK != NO_MASK:
        mask_base = head_of(mask_pointer, mask_strides, batch, head_id)
    positions = first + tl.arange(0, BLOCK_M)
    q = load_tile(q_base, first, q_strides[2], seqlen_q, BLOCK_M, HEAD_DIM, WIDTH, True)
    d_out = load_tile(
        d_out_base, first, d_out_strides[2], seqlen_q, BLOCK_M, VALUE_DIM, VALUE_WIDTH, True
    )
    first_seen, end_seen, begin = 0, 0, 0
    if RANGED:
        first_seen, end_seen = load_ranges(ranges_pointer, positions, seqlen_q)
        begin, _, _, end = ranged_keys(first_seen, end_seen, seqlen_k, BLOCK_N)
        seqlen_k = end  # behind the last document anything may lie
    else:
        _, end = visible_keys(first, seqlen_k, shift, BLOCK_M, BLOCK_N, CAUSAL)

    dense = mask_base, mask_strides
    rows = positions, first_seen, end_seen
    row_max = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    for start in tl.range(begin, end, BLOCK_N):
        k = load_tile(k_base, start, k_strides[2], seqlen_k, BLOCK_N, HEAD_DIM, WIDTH, True)
        scores, slope = _masked_scores(
            q, k, dense, rows, start, seqlen_q, seqlen_k, shift, inner_scale, inverse_scale, CAUSAL,
            RANGED, SOFTCAP, MASK, NEGATIVE_SCALE,
        )  # fmt: skip
        row_max = tl.maximum(row_max, tl.max(scores, 1))
    # 0 instead of the -inf of a row that sees no key.
    reference = tl.where(row_max == float("-inf"), 0.0, row_max)

    zeros = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    row_sum = tl.zeros((BLOCK_M,), tl.float32)
    sum_p_dp = tl.zeros((BLOCK_M,), tl.float32)
    for start in tl.range(begin, end, BLOCK_N):
        k = load_tile(k_base, start, k_strides[2], seqlen_k, BLOCK_N, HEAD_DIM, WIDTH, True)
        v = load_tile(v_base, start, v_strides[2], seqlen_k, BLOCK_N, VALUE_DIM, VALUE_WIDTH, True)
        scores, slope = _masked_scores(
            q, k, dense, rows, start, seqlen_q, seqlen_k, shift, inner_scale, inverse_scale, CAUSAL,
            RANGED, SOFTCAP, MASK, NEGATIVE_SCALE,
        )  # fmt: skip
        probabilities = tl.exp2((scores - reference[:, None]) * scale_log2)
        row_sum += tl.sum(probabilities, 1)
        sum_p_dp += tl.sum(probabilities * product(d_out, tl.trans(v), zeros), 1)
    decay = 1.0
    if SINKS:
        moved_by, sink = with_sink(sinks_pointer, head_id, reference * scale_log2)
        decay = tl.exp2(moved_by)
        row_sum = row_sum * decay + tl.exp2(sink)
    # P of a row that sees no key is 0.
    inverse = decay / tl.where(row_sum == 0.0, float("inf"), row_sum)
    delta = sum_p_dp * inverse

    dq = tl.zeros((BLOCK_M, WIDTH), tl.float32)
    for start in tl.range(begin, end, BLOCK_N):
        k = load_tile(k_base, start, k_strides[2], seqlen_k, BLOCK_N, HEAD_DIM, WIDTH, True)
        v = load_tile(v_base, start, v_strides[2], seqlen_k, BLOCK_N, VALUE_DIM, VALUE_WIDTH, True)
        scores, slope = _masked_scores(
            q, k, dense, rows, start, seqlen_q, seqlen_k, shift, inner_scale, inverse_scale, CAUSAL,
            RANGED, SOFTCAP, MASK, NEGATIVE_SCALE,
        )  # fmt: skip
        probabilities = tl.exp2((scores - reference[:, None]) * scale_log2) * inverse[:, None]
        d_probabilities = product(d_out, tl.trans(v), zeros)
        d_scores = probabilities * (d_probabilities - delta[:, None])
        if SOFTCAP:
            d_scores *= slope
        dq += product_exact(d_scores, k)

    if RANGED:
        dq = tl.where(row_max[:, None] == float("-inf"), 0.0, dq)
    dq_base = dq_pointer + batch_head.to(tl.int64) * seqlen_q * HEAD_DIM
    store_tile(dq_base, first, HEAD_DIM, seqlen_q, dq * scale, BLOCK_M, HEAD_DIM, WIDTH)


def exact_query_gradient(
    d_out: Tensor, q: Tensor, k: Tensor, v: Tensor, *, spec: AttentionSpec, head_ids: Sequence[int]
) -> Tensor:
    d_out, q, k, v = map(launch.rows_adjacent, (d_out, q, k, v))
    batch, num_heads, seqlen_q, head_dim = q.shape
    ids = launch.device_constant(tuple(head_ids), torch.int32, q.device)
    dq = q.new_empty((batch, len(ids), seqlen_q, head_dim), dtype=torch.float32)
    call = launch.prepare(spec, q, v, "audit", dq)
    if not dq.numel():
        return dq
    size_of_scale = launch.size_of_scale(call.scale)
    counts = len(ids), num_heads // k.shape[1], seqlen_q, k.shape[2], call.shift
    scales = spec.scale, size_of_scale * math.log2(math.e), 1 / size_of_scale
    launch.run(
        query_kernel,
        -(-seqlen_q // call.tile.block_m) * batch * len(ids),
        (q, k, v, d_out, *call.loaded, ids, dq),
        (*launch.strides(q, k, v, d_out), call.mask_strides),
        (*counts, call.inner_scale, *scales),
        NEGATIVE_SCALE=call.scale < 0,
        **call.constants,
    )
    return dq
