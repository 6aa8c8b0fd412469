"""Masks inside kernels: which keys the rows of a tile see, and how a dense mask is loaded."""

from __future__ import annotations

import triton
import triton.language as tl

#: Values of a kernel's MASK: the kind of its dense mask.
NO_MASK, BOOLEAN, ADDITIVE = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)

# Far below any score, with room for the scale.
_LOWEST = tl.constexpr(-(2.0**100))


@triton.jit
def visible_keys(
    first_row, seqlen_k, shift, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, CAUSAL: tl.constexpr
):
    """Returns where the tiles end that every row sees whole, and the keys that any row sees."""
    if CAUSAL:
        whole = tl.minimum(tl.maximum(first_row + shift + 1, 0), seqlen_k)
        end = tl.minimum(tl.maximum(first_row + shift + BLOCK_M, 0), seqlen_k)
    else:
        whole = seqlen_k
        end = seqlen_k
    return whole // BLOCK_N * BLOCK_N, end


@triton.jit
def load_ranges(ranges_pointer, positions, seqlen_q):
    """Loads where the keys of each row begin and end, (R,); past the last query, those of it."""
    pointers = ranges_pointer + tl.minimum(positions, seqlen_q - 1)
    return tl.load(pointers), tl.load(pointers + seqlen_q)


@triton.jit
def ranged_keys(first_seen, end_seen, seqlen_k, BLOCK_N: tl.constexpr):
    """Returns where the keys lie that a tile of rows sees, from the range of each row.

    The first key that any row sees; the start and the end of the whole tiles, counted from there,
    that every row sees; and the end of the keys that any row sees.
    """
    seeing = first_seen < end_seen
    end = tl.max(tl.where(seeing, end_seen, 0), 0)
    start = tl.minimum(tl.min(tl.where(seeing, first_seen, seqlen_k), 0), end)
    whole = start + tl.cdiv(tl.max(first_seen, 0) - start, BLOCK_N) * BLOCK_N
    whole_end = whole + tl.maximum(tl.min(end_seen, 0) - whole, 0) // BLOCK_N * BLOCK_N
    return start, whole, whole_end, end


@triton.jit
def seeing_rows(
    first_key, seqlen_q, shift, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, CAUSAL: tl.constexpr
):
    """Returns where the rows begin that see a tile's first key, and those that see all its keys.

    Both are multiples of BLOCK_M, and these rows go on to the last one.
    """
    start = 0
    whole = 0
    if CAUSAL:
        start = tl.minimum(tl.maximum(first_key - shift, 0), seqlen_q) // BLOCK_M * BLOCK_M
        whole = tl.maximum(first_key + BLOCK_N - 1 - shift, 0)
        whole = tl.minimum(tl.cdiv(whole, BLOCK_M) * BLOCK_M, tl.cdiv(seqlen_q, BLOCK_M) * BLOCK_M)
    return start, whole


@triton.jit
def allowed(positions, columns, seqlen_k, shift, CAUSAL: tl.constexpr):
    """Returns which of `columns`, of any shape that broadcasts, the queries may see."""
    last = seqlen_k - 1
    if CAUSAL:
        # One comparison an element: the smaller bound is the same for a whole row.
        last = tl.minimum(positions + shift, last)
    return columns <= last


@triton.jit
def visible_of(
    rows,
    first_key,
    seqlen_k,
    shift,
    BLOCK_N: tl.constexpr,
    CAUSAL: tl.constexpr,
    RANGED: tl.constexpr,
):
    """Returns which keys of a tile are seen, (R, BLOCK_N); `rows`: position, first key, end."""
    positions, first_seen, end_seen = rows
    columns = first_key + tl.arange(0, BLOCK_N)
    if RANGED:
        columns = columns[None, :]
        visible = (columns >= first_seen[:, None]) & (columns < end_seen[:, None])
    else:
        visible = allowed(positions[:, None], columns[None, :], seqlen_k, shift, CAUSAL)
    return visible


@triton.jit
def part_of_keys(part: tl.constexpr, start, whole, whole_end, end):
    """Returns where a part of the keys begins and ends.

    Part 1 are the tiles that every row sees whole. What comes before is part 0, which only ranges
    of keys have, and what comes after part 2.
    """
    if part == 0:
        begin, stop = start, tl.minimum(whole, end)
    elif part == 1:
        begin, stop = whole, whole_end
    else:
        begin, stop = whole_end, end
    return begin, stop


@triton.jit
def behind(positions, columns, shift):
    """Returns which of `columns` the causal mask allows, wherever the keys end."""
    return columns <= positions + shift


@triton.jit
def load_mask(
    dense,
    positions,
    first_key,
    last_row,
    seqlen_k,
    BLOCK_N: tl.constexpr,
    BOUNDED: tl.constexpr,
):
    """Loads a tile of a dense mask, (R, BLOCK_N), from `first_key` on.

    `dense` is where the head's mask begins, and its four strides, 0 where it broadcasts. Rows past
    `last_row` get that one's. What lies past the last key is 0 if BOUNDED, else nothing does.
    """
    base, strides = dense
    columns = tl.arange(0, BLOCK_N)
    base += tl.cast(first_key, tl.int64) * strides[3]
    row_bases = base + tl.minimum(positions, last_row).to(tl.int64) * strides[2]
    pointers = row_bases[:, None] + (columns * strides[3])[None, :]
    if BOUNDED:
        tile = tl.load(pointers, mask=(first_key + columns < seqlen_k)[None, :], other=0)
    else:
        tile = tl.load(pointers)
    return tile


@triton.jit
def add_mask(
    scores,
    dense,
    positions,
    first_key,
    last_row,
    seqlen_k,
    inverse_scale,
    MASK: tl.constexpr,
    BOUNDED: tl.constexpr,
):
    """Adds a dense mask to a tile of scores that are not scaled yet, FP32 (R, K).

    Returns these, which keys are seen, and what was added, or the mask itself if it is boolean.
    """
    tile = load_mask(dense, positions, first_key, last_row, seqlen_k, scores.shape[1], BOUNDED)
    if MASK == BOOLEAN:
        seen = tile != 0
        bias = tile
    else:
        bias = tile.to(tl.float32)
        seen = bias != float("-inf")
        # What every key of a row has makes no difference, and nothing overflows.
        scores += tl.where(bias < _LOWEST, _LOWEST, bias) * inverse_scale
    return scores, seen, bias
