"""Exact delta in Triton, and the O' that carries it to another kernel's backward.

Scores are kept as plain products q k, as in the forward.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from guardbit.kernels.device import launch
from guardbit.kernels.device.carrier import write_rows
from guardbit.kernels.device.masks import (
    ADDITIVE,
    BOOLEAN,
    NO_MASK,
    load_mask,
    load_ranges,
    part_of_keys,
    ranged_keys,
    visible_keys,
    visible_of,
)
from guardbit.kernels.device.primitives import (
    COUNTS,
    LOG2_E,
    head_of,
    load_tile,
    partial_sums,
    product,
    tanh_and_slope,
)
from guardbit.kernels.reference.delta import Carried, check_heads
from guardbit.kernels.spec import AttentionSpec


@triton.jit
def _add_keys(
    row_sum,
    sum_p_dp,
    q,
    d_out,
    keys,
    dense,
    rows,
    log_sum,
    start,
    end,
    seqlen_q,
    seqlen_k,
    shift,
    inner_scale,
    scale,
    BOUNDED: tl.constexpr,
    CAUSAL: tl.constexpr,
    RANGED: tl.constexpr,
    SOFTCAP: tl.constexpr,
    MASK: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    VALUE_WIDTH: tl.constexpr,
    BLOCK_N: tl.constexpr,
    OVERLAP: tl.constexpr,
    USE_TMA: tl.constexpr,
):
    """Adds the keys from `start` to `end` to the sums of P and of P dP, eight of each a row.

    `keys` are where K and V of the head begin, or with USE_TMA the tensors' descriptors; the
    strides of their rows; batch and head. `dense` is where the head's mask begins, and its strides.
    Of `rows` see `visible_of`.
    With an additive mask, `scale` and `log_sum` are in natural units, so that a format's lowest
    number, which masks use, does not overflow. Otherwise they are in log2 units, which saves a
    multiplication.
    """
    k_base, v_base, k_stride, v_stride, batch, key_head = keys
    zeros = tl.zeros((q.shape[0], BLOCK_N), tl.float32)
    probabilities, d_probabilities = zeros, zeros
    for first in tl.range(start, end, BLOCK_N):
        if USE_TMA:
            k = k_base.load([batch, key_head, first, 0]).reshape(BLOCK_N, WIDTH)
            v = v_base.load([batch, key_head, first, 0]).reshape(BLOCK_N, VALUE_WIDTH)
        else:
            k = load_tile(k_base, first, k_stride, seqlen_k, BLOCK_N, HEAD_DIM, WIDTH, BOUNDED)
            v = load_tile(
                v_base, first, v_stride, seqlen_k, BLOCK_N, VALUE_DIM, VALUE_WIDTH, BOUNDED
            )
        scores = product(q, tl.trans(k), zeros)
        if OVERLAP:
            # Of the tile before, whose second product nothing has waited for yet.
            sum_p_dp += partial_sums(probabilities * d_probabilities)
        d_probabilities = product(d_out, tl.trans(v), zeros)
        if SOFTCAP:
            scores, _ = tanh_and_slope(scores * inner_scale)
        if MASK == ADDITIVE:
            mask = load_mask(dense, rows[0], first, seqlen_q - 1, seqlen_k, BLOCK_N, BOUNDED)
            exponents = tl.fma(scores, scale, mask.to(tl.float32)) - log_sum[:, None]
            exponents *= LOG2_E
        else:
            exponents = tl.fma(scores, scale, -log_sum[:, None])
        if MASK == BOOLEAN:
            mask = load_mask(dense, rows[0], first, seqlen_q - 1, seqlen_k, BLOCK_N, BOUNDED)
            exponents = tl.where(mask != 0, exponents, float("-inf"))
        if BOUNDED:
            visible = visible_of(rows, first, seqlen_k, shift, BLOCK_N, CAUSAL, RANGED)
            exponents = tl.where(visible, exponents, float("-inf"))
        probabilities = tl.exp2(exponents)
        row_sum += partial_sums(probabilities)
        if not OVERLAP:
            sum_p_dp += partial_sums(probabilities * d_probabilities)
    if OVERLAP:
        sum_p_dp += partial_sums(probabilities * d_probabilities)
    return row_sum, sum_p_dp


@triton.jit(do_not_specialize=COUNTS)
def delta_kernel(
    q_pointer,
    k_pointer,
    v_pointer,
    d_out_pointer,
    lse_pointer,
    mask_pointer,
    ranges_pointer,
    sinks_pointer,
    head_ids_pointer,
    out_pointer,
    delta_pointer,
    carrier_pointer,
    q_strides,
    k_strides,
    v_strides,
    d_out_strides,
    lse_strides,
    mask_strides,
    out_strides,
    carrier_strides,
    batch_heads,
    section,
    computed_heads,
    group,
    seqlen_q,
    seqlen_k,
    shift,
    inner_scale,
    scale,
    CAUSAL: tl.constexpr,
    RANGED: tl.constexpr,
    SOFTCAP: tl.constexpr,
    SINKS: tl.constexpr,
    MASK: tl.constexpr,
    CARRY: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    VALUE_WIDTH: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    OVERLAP: tl.constexpr,
    USE_TMA: tl.constexpr,
):
    """One program: delta of BLOCK_M queries of one head, and with CARRY their rows of O'.

    Programs work on `section` heads at a time, whose keys and values the cache holds. Within those,
    heavy causal tiles come first: with few heads, the launch would wait for a heavy one at the end.
    """
    row_tiles = tl.cdiv(seqlen_q, BLOCK_M)
    program = tl.program_id(0)
    first_batch_head = program // (section * row_tiles) * section
    turn = program - first_batch_head * row_tiles
    present = tl.minimum(section, batch_heads - first_batch_head)
    batch_head = first_batch_head + turn % present
    first = (row_tiles - 1 - turn // present) * BLOCK_M
    batch = batch_head // computed_heads
    head_id = tl.load(head_ids_pointer + batch_head % computed_heads)
    key_head = head_id // group

    q_base = head_of(q_pointer, q_strides, batch, head_id)
    k_base = k_pointer
    v_base = v_pointer
    if not USE_TMA:
        k_base = head_of(k_pointer, k_strides, batch, key_head)
        v_base = head_of(v_pointer, v_strides, batch, key_head)
    d_out_base = head_of(d_out_pointer, d_out_strides, batch, head_id)
    lse_base = head_of(lse_pointer, lse_strides, batch, head_id)
    mask_base = mask_pointer
    if MASK != NO_MASK:
        mask_base = head_of(mask_pointer, mask_strides, batch, head_id)
    positions = first + tl.arange(0, BLOCK_M)
    inside = positions < seqlen_q
    q = load_tile(q_base, first, q_strides[2], seqlen_q, BLOCK_M, HEAD_DIM, WIDTH, True)
    d_out = load_tile(
        d_out_base, first, d_out_strides[2], seqlen_q, BLOCK_M, VALUE_DIM, VALUE_WIDTH, True
    )
    log_sum = tl.load(lse_base + positions * lse_strides[2], mask=inside, other=0.0)
    # Whatever an engine leaves for a row that sees no key.
    log_sum = tl.where(tl.abs(log_sum) == float("inf"), 0.0, log_sum)
    if MASK != ADDITIVE:
        scale *= LOG2_E
        log_sum *= LOG2_E
    first_seen, end_seen, start, whole = 0, 0, 0, 0
    if RANGED:
        first_seen, end_seen = load_ranges(ranges_pointer, positions, seqlen_q)
        start, whole, whole_end, end = ranged_keys(first_seen, end_seen, seqlen_k, BLOCK_N)
    else:
        whole_end, end = visible_keys(first, seqlen_k, shift, BLOCK_M, BLOCK_N, CAUSAL)

    keys = k_base, v_base, k_strides[2], v_strides[2], batch, key_head
    dense = mask_base, mask_strides
    rows = positions, first_seen, end_seen
    row_sum = tl.zeros((BLOCK_M, 8), tl.float32)
    sum_p_dp = tl.zeros((BLOCK_M, 8), tl.float32)
    for part in tl.static_range(0 if RANGED else 1, 3):
        begin, stop = part_of_keys(part, start, whole, whole_end, end)
        # Loops never run zero times, for the reason given in the forward.
        if stop > begin:
            row_sum, sum_p_dp = _add_keys(
                row_sum, sum_p_dp, q, d_out, keys, dense, rows, log_sum, begin, stop, seqlen_q,
                seqlen_k, shift, inner_scale, scale, part != 1, CAUSAL, RANGED, SOFTCAP, MASK,
                HEAD_DIM, WIDTH, VALUE_DIM, VALUE_WIDTH, BLOCK_N, OVERLAP, USE_TMA,
            )  # fmt: skip
    row_sum = tl.sum(row_sum, 1)
    if SINKS:
        sink = tl.load(sinks_pointer + head_id)
        if MASK == ADDITIVE:
            row_sum += tl.exp2((sink - log_sum) * LOG2_E)
        else:
            row_sum += tl.exp2(sink * LOG2_E - log_sum)
    # Divided by 1, a row that sees no key keeps its 0.
    delta = tl.sum(sum_p_dp, 1) / tl.where(row_sum == 0.0, 1.0, row_sum)
    tl.store(delta_pointer + batch_head.to(tl.int64) * seqlen_q + positions, delta, mask=inside)

    if CARRY:
        # A row that sees no key keeps its O: engines differ in what they make of it.
        carried = tl.where(row_sum == 0.0, float("nan"), delta)
        write_rows(
            (head_of(carrier_pointer, carrier_strides, batch, head_id), carrier_strides[2]),
            (head_of(out_pointer, out_strides, batch, head_id), out_strides[2]),
            (d_out_base, d_out_strides[2]), first, seqlen_q, carried, VALUE_DIM, VALUE_WIDTH,
        )  # fmt: skip


# Bytes of keys and values that are read again and again: what half of the second-level cache of an
# H100 holds.
_CACHE = 2**25


def exact_delta(
    d_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lse: Tensor,
    *,
    spec: AttentionSpec,
    head_ids: Sequence[int],
) -> Tensor:
    """See `reference.exact_delta`."""
    return _launch(d_out, q, k, v, None, lse, spec, head_ids, None)


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
    """See `reference.carry_exact_delta`; one launch."""
    if into is None:
        into = launch.empty_like_rows(out)
        if len(set(head_ids)) < q.shape[1]:
            into.copy_(out)
    if into.stride(-1) != 1:
        raise ValueError("`into` needs rows whose neighbouring elements are adjacent in memory.")
    return Carried(into, _launch(d_out, q, k, v, out, lse, spec, head_ids, into))


def _launch(
    d_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor | None,
    lse: Tensor,
    spec: AttentionSpec,
    head_ids: Sequence[int],
    carrier: Tensor | None,
) -> Tensor:
    """Launches the kernel, which writes delta, and with `carrier` the heads' rows of O'."""
    launch.check_tensors(d_out=d_out, q=q, k=k, v=v, **({} if out is None else {"out": out}))
    check_heads(head_ids, q.shape[1])
    d_out, q, k, v = map(launch.rows_adjacent, (d_out, q, k, v))
    batch, num_heads, seqlen_q, head_dim = q.shape
    kv_heads, seqlen_k, value_dim = v.shape[1:]
    ids = launch.device_head_ids(tuple(head_ids), q.device)
    delta = q.new_empty((batch, len(ids), seqlen_q), dtype=torch.float32)
    call = launch.prepare(spec, q, v, "delta", delta)
    if not delta.numel():
        return delta
    out = d_out if out is None else launch.rows_adjacent(out)
    carried = out if carrier is None else carrier
    rows, widths = call.tile.block_n, (call.constants["WIDTH"], call.constants["VALUE_WIDTH"])
    use_tma = call.tile.use_tma and launch.can_use_tma(k) and launch.can_use_tma(v)
    keys = (
        launch.tma_descriptor(x, rows, width) if use_tma else x
        for x, width in zip((k, v), widths, strict=True)
    )
    strides = launch.strides(q, k, v, d_out, lse)
    section = max(1, _CACHE // max(1, seqlen_k * (head_dim + value_dim) * q.element_size()))
    counts = batch * len(ids), section, len(ids), num_heads // kv_heads, seqlen_q, seqlen_k
    launch.run(
        delta_kernel,
        triton.cdiv(seqlen_q, call.tile.block_m) * batch * len(ids),
        (q, *keys, d_out, lse, *call.loaded, ids, out, delta, carried),
        (*strides, call.mask_strides, *launch.strides(out, carried)),
        (*counts, call.shift, call.inner_scale, call.scale),
        CARRY=carrier is not None,
        OVERLAP=call.tile.overlap,
        USE_TMA=use_tma,
        **call.constants,
    )
    return delta
