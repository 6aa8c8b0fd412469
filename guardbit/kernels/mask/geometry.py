"""The geometry of masks for whole tensors, in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor

from guardbit.kernels.spec import AttentionSpec, Causal, check_causal

#: An additive mask means to hide a key where it adds less: -inf, or the lowest number of a format,
#: FP16's being -65,504. No position bias comes near it.
HIDES = -3e4


def causal_shift(causal: Causal, rows: int, keys: int) -> int:
    """By how much the last key a query sees lies past the query's own number.

    Raises:
        ValueError: If `causal` is none of the three.
    """
    check_causal(causal)
    return keys - rows if causal is True else 0


def visible_end(causal: Causal, last_row: int, shape: tuple[int, int]) -> int:
    """Where the keys end that queries up to `last_row` see, dense masks apart.

    Args:
        causal: See `Causal`.
        last_row: Number of a query.
        shape: (N, M), the whole lengths.
    """
    if causal is False:
        return shape[1]
    return min(max(last_row + 1 + causal_shift(causal, *shape), 0), shape[1])


def additive_mask(rows: Tensor, columns: Tensor, shape: tuple[int, int], causal: Causal) -> Tensor:
    """0 where a query may see a key, -inf where not, dense masks apart.

    It is added, not filled in, so that NaN and +inf scores of forbidden keys come out as in
    PyTorch's math backend.

    Args:
        rows: INT64 (R,), positions of the queries.
        columns: INT64 (C,), positions of the keys.
        shape: (N, M), the whole lengths.
        causal: See `Causal`.

    Returns:
        FP32 (R, C).

    Raises:
        ValueError: If `causal` is none of the three.
    """
    mask = torch.zeros(len(rows), len(columns), device=rows.device)
    shift = causal_shift(causal, *shape)
    if causal is False:
        return mask
    return mask.masked_fill_(columns > rows[:, None] + shift, -torch.inf)


def dense_mask(mask: Tensor, shape: tuple[int, int, int, int]) -> Tensor:
    """A dense mask for each head of a call: no copy, strides of 0 where it broadcasts.

    Args:
        mask: See `AttentionSpec`.
        shape: (B, H, N, M).

    Returns:
        `mask`, expanded to `shape`.

    Raises:
        ValueError: If it does not broadcast to `shape`.
    """
    try:
        return mask.expand(shape)
    except RuntimeError:
        raise ValueError(
            f"`mask` needs a shape that broadcasts to (B, H, N, M) = {shape},"
            f" but has {tuple(mask.shape)}."
        ) from None


def mask_tile(
    spec: AttentionSpec,
    shape: tuple[int, int, int, int],
    heads: Tensor,
    rows: Tensor,
    columns: Tensor,
) -> Tensor:
    """What all masks of a call add to some of its scaled scores; -inf where a key is not seen.

    Args:
        spec: What the call asks for.
        shape: (B, H, N, M).
        heads: INT64 (C,), the query heads.
        rows: INT64 (R,), positions of the queries.
        columns: INT64 (K,), positions of the keys.

    Returns:
        FP32, or FP64 where the mask is, (R, K) or (B, C, R, K).

    Raises:
        ValueError: If the mask does not broadcast to `shape`.
    """
    causal = additive_mask(rows, columns, shape[2:], spec.causal)
    if spec.mask is None:
        return causal
    dense = dense_mask(spec.mask, shape)[:, heads[:, None, None], rows[:, None], columns]
    if dense.dtype == torch.bool:
        return causal.expand(dense.shape).masked_fill(~dense, -torch.inf)
    return dense + causal
