"""The forward in Triton: O, L and the residual. One launch serves heads with different stabilizers.

Scores are kept as plain products q k, called s here. "log2 units" means s scale log2(e), the
exponent of exp2.
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
    LN_2,
    allowed,
    count_above,
    encode_residual,
    head_of,
    kept_entries,
    load_tile,
    part_of_keys,
    partial_sums,
    product,
    round_nearest,
    store_tile,
    visible_keys,
)
from guardbit.kernels.mask import causal_shift
from guardbit.kernels.reference import Causal, Dropout, Forward
from guardbit.kernels.reference.passes import SHIFT_MAX, SHIFT_MAX_FP16, SHIFT_MIN
from guardbit.records import STABILIZERS

# A head's code in the device array: its place in STABILIZERS.
_COMPENSATED = tl.constexpr(STABILIZERS.index("compensated"))
_ROW_MAX = tl.constexpr(STABILIZERS.index("row_max"))

# How many heads of a launch have a stabilizer. With all or none there is nothing to choose.
_NO_HEAD, _SOME_HEADS, _ALL_HEADS = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)

# The narrowest right operand of a product on tensor cores, PTX's m16n8k16.
_LEAST_WIDTH = tl.constexpr(8)


@triton.jit
def _second_near_maximum(has_duplicate_max, differences, row_max, tile_max, distance):
    """Returns whether a row's second largest score lies within a distance of its largest.

    Exact across tiles without the scores of earlier ones: when the maximum rises by no more than
    the distance, the old one is the second score near the new. `differences` are s of this tile
    less the largest so far, `row_max` the largest of earlier tiles, and the distance is in units
    of s.
    """
    here = count_above(differences, -distance) > 1.0
    has_duplicate_max = tl.where(tile_max > row_max, here, has_duplicate_max)
    return has_duplicate_max | (tl.abs(tile_max - row_max) <= distance)


@triton.jit
def _attend(
    accumulator, row_max, raised, row_sum, rounded_sum, has_duplicate_max, q, keys, positions,
    start, end, seqlen_k, shift, scale_log2, eps, raising, code, philox, COMPENSATED: tl.constexpr,
    ROW_MAX: tl.constexpr, DROPOUT: tl.constexpr, MASKED: tl.constexpr, CAUSAL: tl.constexpr,
    HEAD_DIM: tl.constexpr, WIDTH: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Takes the keys from `start` to `end` into the running softmax of a tile of rows.

    It carries for each row: row_max, the largest s so far; raised, by how much m exceeds it, in
    log2 units; row_sum, the sum of P-bar in eight parts, if any head is not compensated;
    rounded_sum, eight copies of the sum of rounded P-bar, if any head is; has_duplicate_max,
    whether a second score lies within eps of row_max. Fused multiply-adds are spelled out, so that
    all variants give the same bits. `keys` are where K and V of the head begin, and the strides of
    their rows; `raising` is how m is shifted, see `forward`; `philox` is key, head and threshold.
    """
    k_base, v_base, k_stride, v_stride = keys
    shift_turns, shift_min_log2, shift_range_log2 = raising
    philox_key, batch_head, threshold = philox
    dtype: tl.constexpr = v_base.dtype.element_ty
    for first in tl.range(start, end, BLOCK_N):
        k = load_tile(k_base, first, k_stride, seqlen_k, BLOCK_N, HEAD_DIM, WIDTH, MASKED)
        scores = product(q, tl.trans(k), tl.zeros((q.shape[0], BLOCK_N), tl.float32))
        if MASKED:
            columns = first + tl.arange(0, BLOCK_N)
            visible = allowed(positions[:, None], columns[None, :], seqlen_k, shift, CAUSAL)
            scores = tl.where(visible, scores, float("-inf"))
        tile_max = tl.max(scores, 1)
        new_max = tl.maximum(row_max, tile_max)
        # 0 instead of the -inf of a row that has seen no key.
        finite = tl.where(new_max == float("-inf"), 0.0, new_max)
        # Subtracted before the scale: the largest P-bar is 1 however large s is. Fused into one
        # multiply-add, s beyond 10^4 makes it 2^e with e the rounding of row_max scale, which BF16
        # then rounds.
        differences = scores - finite[:, None]
        if ROW_MAX != _NO_HEAD:
            has_duplicate_max = _second_near_maximum(
                has_duplicate_max, differences, row_max, tile_max, eps
            )
        if ROW_MAX == _NO_HEAD:
            new_raised = raised
            exponents = differences * scale_log2
            rise = (row_max - finite) * scale_log2
        else:
            shifted = has_duplicate_max
            if ROW_MAX == _SOME_HEADS:
                shifted = has_duplicate_max & (code == _ROW_MAX)
            turns = tl.abs(finite) * shift_turns
            fraction = tl.fma(tl.abs(finite), shift_turns, -tl.floor(turns))
            shift_log2 = tl.fma(tl.maximum(fraction, 0.0), shift_range_log2, shift_min_log2)
            new_raised = tl.where(shifted, shift_log2, 0.0)
            exponents = tl.fma(differences, scale_log2, -new_raised[:, None])
            rise = tl.fma(row_max - finite, scale_log2, raised - new_raised)
        probabilities = tl.exp2(exponents)
        rescale = tl.exp2(rise)
        rounded = round_nearest(probabilities, dtype)
        v = load_tile(v_base, first, v_stride, seqlen_k, BLOCK_N, HEAD_DIM, WIDTH, MASKED)
        weights = rounded
        if DROPOUT:
            kept = kept_entries(philox_key, positions, batch_head, first, threshold, BLOCK_N)
            weights = tl.where(kept, rounded, 0.0)
        accumulator = product(weights, v, accumulator * rescale[:, None])
        if COMPENSATED != _ALL_HEADS:
            row_sum = tl.fma(row_sum, rescale[:, None], partial_sums(probabilities))
        if COMPENSATED != _NO_HEAD:
            # By a tensor core: widening and adding the rounded numbers costs more.
            ones = tl.full((BLOCK_N, _LEAST_WIDTH), 1.0, dtype)
            rounded_sum = product(rounded, ones, rounded_sum * rescale[:, None])
        row_max = new_max
        raised = new_raised
    return accumulator, row_max, raised, row_sum, rounded_sum, has_duplicate_max


@triton.jit(do_not_specialize=COUNTS)
def forward_kernel(
    q_pointer, k_pointer, v_pointer, out_pointer, lse_pointer, residual_pointer, codes_pointer,
    head_ids_pointer, philox_key_pointer,
    q_strides, k_strides, v_strides, out_strides,
    num_heads, computed_heads, group, seqlen_q, seqlen_k, shift, scale, scale_log2, eps,
    shift_turns, shift_min_log2, shift_range_log2, threshold, factor,
    CAUSAL: tl.constexpr, NEGATIVE_SCALE: tl.constexpr, COMPENSATED: tl.constexpr,
    ROW_MAX: tl.constexpr, DROPOUT: tl.constexpr, HEAD_DIM: tl.constexpr, WIDTH: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """One program: one tile of BLOCK_M queries of one head; heavy causal tiles come first.

    COMPENSATED and ROW_MAX say how many heads of this launch have that stabilizer: none, some or
    all. With DROPOUT, entries of P-bar that `kept_entries` keeps are multiplied by `factor`.
    """
    row_tiles = tl.cdiv(seqlen_q, BLOCK_M)
    program = tl.program_id(0)
    batch_head = program // row_tiles
    first = (row_tiles - 1 - program % row_tiles) * BLOCK_M
    batch = (batch_head // computed_heads).to(tl.int64)
    head = batch_head % computed_heads
    code = tl.load(codes_pointer + head)
    head_id = tl.load(head_ids_pointer + head)
    key_head = head_id // group
    dtype: tl.constexpr = q_pointer.dtype.element_ty

    philox_head = batch * num_heads + head_id
    philox_key = tl.full((), 0, tl.int64)
    if DROPOUT:
        philox_key = tl.load(philox_key_pointer)

    q_base = head_of(q_pointer, q_strides, batch, head_id)
    k_base = head_of(k_pointer, k_strides, batch, key_head)
    v_base = head_of(v_pointer, v_strides, batch, key_head)
    positions = first + tl.arange(0, BLOCK_M)
    q = load_tile(q_base, first, q_strides[2], seqlen_q, BLOCK_M, HEAD_DIM, WIDTH, True)
    if NEGATIVE_SCALE:
        q = (-q.to(tl.float32)).to(dtype)
    whole_end, end = visible_keys(first, seqlen_k, shift, BLOCK_M, BLOCK_N, CAUSAL)

    accumulator = tl.zeros((BLOCK_M, WIDTH), tl.float32)
    row_max = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    raised = tl.zeros((BLOCK_M,), tl.float32)
    row_sum = tl.zeros((BLOCK_M, 8), tl.float32)
    rounded_sum = tl.zeros((BLOCK_M, _LEAST_WIDTH), tl.float32)
    has_duplicate_max = tl.zeros((BLOCK_M,), tl.int1)
    keys = k_base, v_base, k_strides[2], v_strides[2]
    raising = shift_turns, shift_min_log2, shift_range_log2
    philox = philox_key, philox_head, threshold
    # First the whole tiles, which need no mask, then those on the diagonal or the edge. The loops
    # never run zero times: if one may, ptxas (13.4) makes every asynchronous product wait for the
    # one before.
    for part in tl.static_range(1, 3):
        begin, stop = part_of_keys(part, 0, 0, whole_end, end)
        if stop > begin:
            accumulator, row_max, raised, row_sum, rounded_sum, has_duplicate_max = _attend(
                accumulator, row_max, raised, row_sum, rounded_sum, has_duplicate_max, q, keys,
                positions, begin, stop, seqlen_k, shift, scale_log2, eps, raising, code, philox,
                COMPENSATED, ROW_MAX, DROPOUT, part != 1, CAUSAL, HEAD_DIM, WIDTH, BLOCK_N,
            )  # fmt: skip

    row_sum = tl.sum(row_sum, 1)
    if COMPENSATED == _ALL_HEADS:
        row_sum = tl.sum(rounded_sum, 1) * (1.0 / _LEAST_WIDTH)
    elif COMPENSATED == _SOME_HEADS:
        row_sum = tl.where(
            code == _COMPENSATED, tl.sum(rounded_sum, 1) * (1.0 / _LEAST_WIDTH), row_sum
        )
    # Divided by 1, a row with no allowed key keeps its 0, and L = -inf + log 1.
    row_sum = tl.where(row_sum == 0.0, 1.0, row_sum)
    lse = tl.fma(row_max, scale, (raised + tl.log2(row_sum)) * LN_2)
    tl.store(
        lse_pointer + batch_head.to(tl.int64) * seqlen_q + positions, lse, mask=positions < seqlen_q
    )

    if DROPOUT:
        accumulator *= factor
    exact = accumulator * (1.0 / row_sum)[:, None]
    out = round_nearest(exact, dtype)
    if COMPENSATED != _NO_HEAD:
        residual = encode_residual(exact, out)
        if COMPENSATED == _SOME_HEADS:
            residual = tl.where(code == _COMPENSATED, residual, 0)
        residual_base = head_of(residual_pointer, out_strides, batch, head)
        store_tile(
            residual_base, first, out_strides[2], seqlen_q, residual, BLOCK_M, HEAD_DIM, WIDTH
        )
    out_base = head_of(out_pointer, out_strides, batch, head)
    store_tile(out_base, first, out_strides[2], seqlen_q, out, BLOCK_M, HEAD_DIM, WIDTH)


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: Causal,
    scale: float,
    stabilizers: Sequence[str],
    beta: float = 2.0,
    eps: float = 1e-3,
    head_ids: Sequence[int] | None = None,
    dropout: Dropout | None = None,
) -> Forward:
    q, k, v = map(launch.rows_adjacent, (q, k, v))
    batch, num_heads, seqlen_q, head_dim = q.shape
    kv_heads, seqlen_k = k.shape[1:3]
    computed = tuple(range(num_heads)) if head_ids is None else tuple(head_ids)
    shift = causal_shift(causal, seqlen_q, seqlen_k)
    codes = launch.device_constant(tuple(map(STABILIZERS.index, stabilizers)), torch.int8, q.device)
    out = launch.empty_like_rows(q if head_ids is None else q[:, : len(computed)])
    lse = torch.empty(out.shape[:3], dtype=torch.float32, device=q.device)
    compensated = "compensated" in stabilizers
    residual = torch.empty_like(out, dtype=torch.int8) if compensated else None
    if not out.numel():
        return Forward(out, lse, residual)

    width = launch.padded_width(head_dim)
    tile = launch.tile_of(q, width, "forward")
    shift_max = SHIFT_MAX_FP16 if q.dtype == torch.float16 else SHIFT_MAX
    size_of_scale = launch.size_of_scale(scale)
    philox_key, threshold, factor = lse, 0, 1.0
    if dropout is not None:
        tile = tile.for_dropout
        philox_key, threshold, factor = dropout.philox_key, dropout.threshold, dropout.factor
    kept = out if residual is None else residual
    ids = launch.device_constant(computed, torch.int32, q.device)
    counts = num_heads, len(computed), num_heads // kv_heads, seqlen_q, seqlen_k, shift
    scales = size_of_scale, size_of_scale * math.log2(math.e), eps / size_of_scale
    shift_turns = (beta - 1) * size_of_scale / (shift_max - SHIFT_MIN)
    ends = SHIFT_MIN * math.log2(math.e), (shift_max - SHIFT_MIN) * math.log2(math.e)
    launch.run(
        forward_kernel,
        -(-seqlen_q // tile.block_m) * batch * len(computed),
        (q, k, v, out, lse, kept, codes, ids, philox_key),
        launch.strides(q, k, v, out),
        (*counts, *scales, shift_turns, *ends, threshold, factor),
        CAUSAL=causal is not False,
        NEGATIVE_SCALE=scale < 0,
        COMPENSATED=_none_some_all(stabilizers, "compensated"),
        ROW_MAX=_none_some_all(stabilizers, "row_max"),
        DROPOUT=dropout is not None,
        HEAD_DIM=head_dim,
        WIDTH=width,
        **tile.constants,
    )
    return Forward(out, lse, residual)


def _none_some_all(stabilizers: Sequence[str], name: str) -> int:
    """Whether none, some or all of the heads have this stabilizer."""
    count = list(stabilizers).count(name)
    return 0 if count == 0 else 2 if count == len(stabilizers) else 1
