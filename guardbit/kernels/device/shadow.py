"""The shadow in Triton: O to FP32 accuracy on tensor cores, and statistics of its rows.

Scores are kept as plain products q k, as in the forward, or with a soft cap as the tanh of them.
Both are called s here.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from guardbit.kernels.device import launch
from guardbit.kernels.device.primitives import (
    ADDITIVE,
    COUNTS,
    LN_2,
    NO_MASK,
    add_mask,
    head_of,
    load_ranges,
    load_rows,
    load_tile,
    mark_above,
    part_of_keys,
    partial_maxima,
    partial_sums,
    product,
    ranged_keys,
    round_nearest,
    store_tile,
    tanh_and_slope,
    visible_keys,
    visible_of,
    widen,
    with_sink,
)
from guardbit.kernels.mask import IRRELEVANT, hidden_rows
from guardbit.kernels.reference import Shadow
from guardbit.kernels.spec import AttentionSpec

# As bits: below those of every size.
_MINUS_INFINITY = tl.constexpr(-0x800000)

_IRRELEVANT = tl.constexpr(IRRELEVANT)

# exp2 of it is 0 as of -inf, and 0 times it is no NaN.
_NOTHING = tl.constexpr(-1024.0)

# FP16 ends at 2^-24: multiplied by this, a P-bar of at most 1 leaves no part below it that matters.
_FP16_RANGE = tl.constexpr(2.0**15)


@triton.jit
def _lowest_tied_in_bfloat16(row_max, eps):
    """The smallest FP32 score that, both rounded to BF16, lies within eps of the row maximum.

    Rounding is monotonic, so that one comparison with this replaces rounding every score.
    """
    bits = row_max.to(tl.uint32, bitcast=True)
    bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000
    lowest = bits.to(tl.float32, bitcast=True) - eps
    bits = tl.abs(lowest).to(tl.uint32, bitcast=True)
    # The BF16 number at or above it, and half-way to the next one below. What lies half-way itself
    # goes to the even one.
    above = (bits + 0xFFFF) >> 16
    above_bits = (above << 16) - 0x8000 + (above & 1)
    towards_zero = bits >> 16
    below_bits = (towards_zero << 16) + 0x8000 - (towards_zero & 1)
    positive = lowest > 0.0
    size = tl.where(positive, above_bits, below_bits).to(tl.float32, bitcast=True)
    return tl.where(positive, size, -size)


@triton.jit
def _row_maxima(
    highest, largest, q, keys, dense, rows, start, end, seqlen_q, seqlen_k, shift, inner_scale,
    inverse_scale, MASKED: tl.constexpr, CAUSAL: tl.constexpr, RANGED: tl.constexpr,
    SOFTCAP: tl.constexpr, MASK: tl.constexpr, HEAD_DIM: tl.constexpr, WIDTH: tl.constexpr,
    BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Takes the keys from `start` to `end` into the highest s and the largest |s|, eight a row.

    |s| are the bits of FP32 numbers: as INT32 they are ordered alike, and NaN comes last. With an
    additive mask `largest` is FP32, the largest that it adds: which |s| count depends on that.
    `keys` are where K and V of the head begin, and the strides of their rows; `dense` is where the
    head's mask begins, and its strides; of `rows` see `visible_of`.
    """
    k_base, k_stride = keys[0], keys[2]
    for first in tl.range(start, end, BLOCK_N):
        k = load_tile(k_base, first, k_stride, seqlen_k, BLOCK_N, HEAD_DIM, WIDTH, MASKED)
        scores = product(q, tl.trans(k), tl.zeros((q.shape[0], BLOCK_N), tl.float32))
        if SOFTCAP:
            scores, _ = tanh_and_slope(scores * inner_scale)
        if MASK != NO_MASK:
            scores, seen, bias = add_mask(
                scores, dense, rows[0], first, seqlen_q - 1, seqlen_k, inverse_scale, MASK, MASKED
            )
        if MASK == ADDITIVE:
            sizes = bias
            lowest = float("-inf")
        else:
            sizes = scores.to(tl.int32, bitcast=True) & 0x7FFFFFFF
            lowest = _MINUS_INFINITY
        if MASK != NO_MASK:
            scores = tl.where(seen, scores, float("-inf"))
            sizes = tl.where(seen, sizes, lowest)
        if MASKED:
            visible = visible_of(rows, first, seqlen_k, shift, BLOCK_N, CAUSAL, RANGED)
            scores = tl.where(visible, scores, float("-inf"))
            sizes = tl.where(visible, sizes, lowest)
        highest = tl.maximum(highest, partial_maxima(scores))
        largest = tl.maximum(largest, partial_maxima(sizes))
    return highest, largest


@triton.jit
def _attend(
    accumulator, row_sum, sum_p_log_p, maxima, maxima_bf16, largest, q, keys, dense, rows,
    reference, least, start, end, seqlen_q, seqlen_k, shift, inner_scale, scale_log2, inverse_scale,
    MASKED: tl.constexpr, CAUSAL: tl.constexpr, RANGED: tl.constexpr, SOFTCAP: tl.constexpr,
    MASK: tl.constexpr, HEAD_DIM: tl.constexpr, WIDTH: tl.constexpr, VALUE_DIM: tl.constexpr,
    VALUE_WIDTH: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Takes the keys from `start` to `end` into the sums and counts of a tile of rows.

    Carries eight of each a row, see `partial_sums`. Exponents are s less its maximum in log2 units,
    `reference`, up to the rounding of that; `least` are the least that count, in FP32 and in BF16,
    and with an additive mask the least score and bias of a key whose |s| counts. `largest` is as in
    `_row_maxima`, and changes with an additive mask only.
    """
    k_base, v_base, k_stride, v_stride = keys
    tied, tied_bf16, lowest_score, lowest_bias = least
    dtype: tl.constexpr = v_base.dtype.element_ty
    for first in tl.range(start, end, BLOCK_N):
        k = load_tile(k_base, first, k_stride, seqlen_k, BLOCK_N, HEAD_DIM, WIDTH, MASKED)
        v = load_tile(v_base, first, v_stride, seqlen_k, BLOCK_N, VALUE_DIM, VALUE_WIDTH, MASKED)
        scores = product(q, tl.trans(k), tl.zeros((q.shape[0], BLOCK_N), tl.float32))
        if SOFTCAP:
            scores, _ = tanh_and_slope(scores * inner_scale)
        plain = scores
        if MASK != NO_MASK:
            scores, seen, bias = add_mask(
                scores, dense, rows[0], first, seqlen_q - 1, seqlen_k, inverse_scale, MASK, MASKED
            )
        if MASKED:
            visible = visible_of(rows, first, seqlen_k, shift, BLOCK_N, CAUSAL, RANGED)
        if MASK == ADDITIVE:
            counted = (scores >= lowest_score[:, None]) | (bias >= lowest_bias[:, None])
            counted &= seen
            if MASKED:
                counted &= visible
            sizes = tl.where(
                counted, plain.to(tl.int32, bitcast=True) & 0x7FFFFFFF, _MINUS_INFINITY
            )
            largest = tl.maximum(largest, partial_maxima(sizes))
        exponents = tl.fma(scores, scale_log2, -reference[:, None])
        if MASK != NO_MASK:
            exponents = tl.where(seen, exponents, _NOTHING)
        if MASKED:
            exponents = tl.where(visible, exponents, _NOTHING)
        maxima += partial_sums(mark_above(exponents, tied[:, None]))
        maxima_bf16 += partial_sums(mark_above(exponents, tied_bf16[:, None]))
        probabilities = tl.exp2(exponents)
        row_sum += partial_sums(probabilities)
        sum_p_log_p += partial_sums(probabilities * exponents)
        if dtype == tl.float16:
            probabilities *= _FP16_RANGE
        high = round_nearest(probabilities, dtype)
        low = round_nearest(probabilities - widen(high), dtype)
        # A tile's own sum first: tensor cores cut off what they add to a large accumulator, always
        # towards 0, and 16,384 keys in one chain left 2e-5 of O in every row (H200).
        accumulator += product(high, v, product(low, v, tl.zeros_like(accumulator)))
    return accumulator, row_sum, sum_p_log_p, maxima, maxima_bf16, largest


@triton.jit(do_not_specialize=COUNTS)
def shadow_kernel(
    q_pointer, k_pointer, v_pointer, mask_pointer, ranges_pointer, sinks_pointer, query_ids_pointer,
    out_pointer, row_max_pointer, entropy_pointer, maxima_pointer, maxima_bf16_pointer,
    largest_pointer,
    q_strides, k_strides, v_strides, mask_strides,
    num_heads, group, count, seqlen_q, seqlen_k, shift, inner_scale, scale, scale_log2,
    inverse_scale, eps, eps_log2,
    HAS_QUERY_IDS: tl.constexpr, CAUSAL: tl.constexpr, RANGED: tl.constexpr, SOFTCAP: tl.constexpr,
    SINKS: tl.constexpr, MASK: tl.constexpr, NEGATIVE_SCALE: tl.constexpr,
    HEAD_DIM: tl.constexpr, WIDTH: tl.constexpr, VALUE_DIM: tl.constexpr, VALUE_WIDTH: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """One program: BLOCK_M of the `count` rows of one head; heavy causal tiles come first.

    The keys are passed twice: the counts need the row's maximum first. Rows that an additive mask
    hides by finite numbers come out as others: it takes all heads to tell.
    """
    row_tiles = tl.cdiv(count, BLOCK_M)
    program = tl.program_id(0)
    batch_head = program // row_tiles
    first = (row_tiles - 1 - program % row_tiles) * BLOCK_M
    batch = batch_head // num_heads
    head = batch_head % num_heads
    key_head = head // group
    dtype: tl.constexpr = q_pointer.dtype.element_ty

    q_base = head_of(q_pointer, q_strides, batch, head)
    k_base = head_of(k_pointer, k_strides, batch, key_head)
    v_base = head_of(v_pointer, v_strides, batch, key_head)
    mask_base = mask_pointer
    if MASK != NO_MASK:
        mask_base = head_of(mask_pointer, mask_strides, batch, head)
    places = first + tl.arange(0, BLOCK_M)
    positions = places
    if HAS_QUERY_IDS:
        # Past the end, the last one again.
        positions = tl.load(query_ids_pointer + tl.minimum(places, count - 1)).to(tl.int32)
    q = load_rows(q_base, positions, q_strides[2], seqlen_q, HEAD_DIM, WIDTH)
    if NEGATIVE_SCALE:
        q = (-q.to(tl.float32)).to(dtype)
    first_seen, end_seen, start, whole = 0, 0, 0, 0
    if RANGED:
        first_seen, end_seen = load_ranges(ranges_pointer, positions, seqlen_q)
        start, whole, whole_end, end = ranged_keys(first_seen, end_seen, seqlen_k, BLOCK_N)
        seqlen_k = end  # behind the last document anything may lie
    else:
        whole_end, _ = visible_keys(tl.min(positions, 0), seqlen_k, shift, 1, BLOCK_N, CAUSAL)
        _, end = visible_keys(tl.max(positions, 0), seqlen_k, shift, 1, BLOCK_N, CAUSAL)

    keys = k_base, v_base, k_strides[2], v_strides[2]
    dense = mask_base, mask_strides
    rows = positions, first_seen, end_seen
    highest = tl.full((BLOCK_M, 8), float("-inf"), tl.float32)
    none = tl.full((BLOCK_M, 8), _MINUS_INFINITY, tl.int32)
    largest = highest if MASK == ADDITIVE else none
    for part in tl.static_range(0 if RANGED else 1, 3):
        begin, stop = part_of_keys(part, start, whole, whole_end, end)
        highest, largest = _row_maxima(
            highest, largest, q, keys, dense, rows, begin, stop, seqlen_q, seqlen_k, shift,
            inner_scale, inverse_scale, part != 1, CAUSAL, RANGED, SOFTCAP, MASK, HEAD_DIM, WIDTH,
            BLOCK_N,
        )  # fmt: skip
    row_max = tl.max(highest, 1)
    lowest_score, lowest_bias = 0.0, 0.0
    if MASK == ADDITIVE:
        top_bias = tl.max(largest, 1)
        lowest_bias = top_bias - _IRRELEVANT
        lowest_score = row_max - _IRRELEVANT * inverse_scale
        largest = none
    else:
        # Stored at once, to free its registers.
        size = tl.cast(tl.max(largest, 1), tl.float32, bitcast=True) * scale
        tile = tl.arange(0, BLOCK_M)
        largest_base = largest_pointer + batch_head.to(tl.int64) * count + first
        tl.store(largest_base + tile, size, mask=tile < count - first)
    # 0 instead of the -inf of a row that sees no key.
    finite_max = tl.where(row_max == float("-inf"), 0.0, row_max)
    # Scaled before it is subtracted, the maximum is rounded: all exponents of the row are off by
    # the same, O and entropy do not change, and the thresholds are moved along.
    reference = finite_max * scale_log2
    moved = tl.fma(finite_max, scale_log2, -reference)
    lowest = _lowest_tied_in_bfloat16(finite_max * scale, eps) / scale
    # The division may round beyond the maximum itself.
    tied_bf16 = moved + tl.minimum(lowest - finite_max, 0.0) * scale_log2
    tied = moved - eps_log2

    least = tied, tied_bf16, lowest_score, lowest_bias
    accumulator = tl.zeros((BLOCK_M, VALUE_WIDTH), tl.float32)
    row_sum = tl.zeros((BLOCK_M, 8), tl.float32)
    sum_p_log_p = tl.zeros((BLOCK_M, 8), tl.float32)
    maxima = tl.zeros((BLOCK_M, 8), tl.float32)
    maxima_bf16 = tl.zeros((BLOCK_M, 8), tl.float32)
    for part in tl.static_range(0 if RANGED else 1, 3):
        begin, stop = part_of_keys(part, start, whole, whole_end, end)
        accumulator, row_sum, sum_p_log_p, maxima, maxima_bf16, largest = _attend(
            accumulator, row_sum, sum_p_log_p, maxima, maxima_bf16, largest, q, keys, dense, rows,
            reference, least, begin, stop, seqlen_q, seqlen_k,
            shift, inner_scale, scale_log2, inverse_scale, part != 1, CAUSAL, RANGED, SOFTCAP,
            MASK, HEAD_DIM, WIDTH, VALUE_DIM, VALUE_WIDTH, BLOCK_N,
        )  # fmt: skip

    # Divided by 1, a row with no allowed key keeps its 0, and its entropy is log 1.
    row_sum = tl.sum(row_sum, 1)
    sum_p_log_p = tl.sum(sum_p_log_p, 1)
    if SINKS:
        moved_by, sink = with_sink(sinks_pointer, head, reference)
        decay, share = tl.exp2(moved_by), tl.exp2(sink)
        sum_p_log_p = (sum_p_log_p + moved_by * row_sum) * decay + share * sink
        row_sum = row_sum * decay + share
        accumulator *= decay[:, None]
    row_sum = tl.where(row_sum == 0.0, 1.0, row_sum)
    entropy = tl.log(row_sum) - sum_p_log_p / row_sum * LN_2
    if dtype == tl.float16:
        accumulator *= 1.0 / _FP16_RANGE
    out = accumulator / row_sum[:, None]
    # The maximum passes over a NaN, the sum does not.
    spoilt = (row_sum != row_sum) & (row_max < float("inf"))
    row_max = tl.where(spoilt, float("nan"), row_max * scale)
    inside = places < count
    batch_head_start = batch_head.to(tl.int64) * count
    if MASK == ADDITIVE:
        size = tl.cast(tl.max(largest, 1), tl.float32, bitcast=True) * scale
        size = tl.where(row_max != row_max, row_max, size)
        tl.store(largest_pointer + batch_head_start + places, size, mask=inside)
    counted = tl.where(tl.abs(row_max) < float("inf"), 1.0, 0.0)

    out_base = out_pointer + batch_head_start * VALUE_DIM
    store_tile(out_base, first, VALUE_DIM, count, out, BLOCK_M, VALUE_DIM, VALUE_WIDTH)
    tl.store(row_max_pointer + batch_head_start + places, row_max, mask=inside)
    tl.store(entropy_pointer + batch_head_start + places, entropy, mask=inside)
    tl.store(maxima_pointer + batch_head_start + places, tl.sum(maxima, 1) * counted, mask=inside)
    tl.store(
        maxima_bf16_pointer + batch_head_start + places,
        tl.sum(maxima_bf16, 1) * counted,
        mask=inside,
    )


def shadow(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    spec: AttentionSpec,
    eps: float = 1e-3,
    query_ids: Tensor | None = None,
) -> Shadow:
    q, k, v = map(launch.rows_adjacent, (q, k, v))
    batch, num_heads, seqlen_q, _ = q.shape
    count = seqlen_q if query_ids is None else len(query_ids)
    shape = (batch, num_heads, count)
    out = q.new_empty((*shape, v.shape[3]), dtype=torch.float32)
    row_max, entropy, largest = (q.new_empty(shape, dtype=torch.float32) for _ in range(3))
    maxima, maxima_bf16 = (q.new_empty(shape, dtype=torch.int64) for _ in range(2))
    result = Shadow(out, row_max, maxima, maxima_bf16, entropy, largest)
    call = launch.prepare(spec, q, v, "shadow", row_max)
    if not out.numel():
        return result
    size_of_scale = launch.size_of_scale(call.scale)
    chosen = row_max if query_ids is None else query_ids.contiguous()
    sizes = num_heads, num_heads // k.shape[1], count, seqlen_q, k.shape[2], call.shift
    scales = size_of_scale, size_of_scale * math.log2(math.e), 1 / size_of_scale
    results = out, row_max, entropy, maxima, maxima_bf16, largest
    launch.run(
        shadow_kernel,
        -(-count // call.tile.block_m) * batch * num_heads,
        (q, k, v, *call.loaded, chosen, *results),
        (*launch.strides(q, k, v), call.mask_strides),
        (*sizes, call.inner_scale, *scales, eps, eps * math.log2(math.e)),
        HAS_QUERY_IDS=query_ids is not None,
        NEGATIVE_SCALE=call.scale < 0,
        **call.constants,
    )
    hidden = hidden_rows(spec, (*q.shape[:3], k.shape[2]), query_ids)
    if hidden is not None:
        for field in (row_max, largest):
            field.masked_fill_(hidden, -math.inf)
        for field in (maxima, maxima_bf16, entropy):
            field.masked_fill_(hidden, 0)
    return result
