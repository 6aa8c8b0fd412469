"""What a call of attention asks for, as one plain record."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

#: False: every query sees every key. True: bottom-right aligned, query n sees keys up to
#: n + M - N, as FlashAttention has it. "top-left": query n sees keys up to n, as
#: `F.scaled_dot_product_attention(is_causal=True)` has it.
Causal = bool | Literal["top-left"]


class Documents(NamedTuple):
    """Where packed sequences begin and end: a query sees keys of its own document only.

    A call with documents has a batch of one; its queries, and its keys, stand one document after
    the other. Document g has the queries `cu_queries[g]` to `cu_queries[g + 1]`, the last not
    included, and the keys `cu_keys[g]` to `cu_keys[g + 1]`; either may be none.

    Attributes:
        cu_queries: INT32 (G + 1,), from 0 to N.
        cu_keys: INT32 (G + 1,), from 0 to M.
        max_queries: Queries of the longest document, or more.
        max_keys: Keys of the longest document, or more.
    """

    cu_queries: Tensor
    cu_keys: Tensor
    max_queries: int
    max_keys: int


# Compared by identity: what two masks hold is on their device.
@dataclass(frozen=True, eq=False)
class AttentionSpec:
    """What a call asks for besides q, k and v.

    A key is seen if every field allows it. What the fields mean for single queries and keys stands
    in `guardbit.kernels.mask` alone.

    Attributes:
        scale: Factor of Q K^T.
        causal: See `Causal`.
        mask: Boolean, True where a query sees a key, or floating, added to the scaled scores. Any
            shape that broadcasts to (B, H, N, M). None for no such mask.
        dropout_p: Probability with which an entry of P is dropped.
        window: How many keys before and after its own place a query sees, -1 for all; its own place
            is where `causal=True` has it end, the last keys aligned with the last queries (of each
            document), as FlashAttention's `window_size` has it.
        documents: Packed sequences; `causal` and `window` are then meant within each. None for one
            sequence.
        softcap: Scores s are replaced by softcap * tanh(s / softcap), after the scale and before
            masks; 0 for no cap.
        sinks: (H,), one more score of each head that takes part in the softmax and has no value:
            the probabilities of the keys add up to less than 1. None for no sinks.

    Raises:
        ValueError: If `causal` is none of the three.
        TypeError: If `mask` is neither boolean nor floating.
    """

    scale: float
    causal: Causal = False
    mask: Tensor | None = None
    dropout_p: float = 0.0
    window: tuple[int, int] = (-1, -1)
    documents: Documents | None = None
    softcap: float = 0.0
    sinks: Tensor | None = None

    def __post_init__(self) -> None:
        check_causal(self.causal)
        mask = self.mask
        if mask is not None and mask.dtype != torch.bool and not mask.is_floating_point():
            raise TypeError(f"`mask` takes booleans or floating numbers, but it is {mask.dtype}.")


def check_causal(causal: Causal) -> None:
    """Refuses what is no `Causal`.

    Raises:
        ValueError: Saying what came.
    """
    if causal not in (False, True, "top-left"):
        raise ValueError(f'`causal` takes False, True or "top-left", but it is {causal!r}.')
