"""What a call of attention asks for, as one plain record."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

#: False: every query sees every key. True: bottom-right aligned, query n sees keys up to
#: n + M - N, as FlashAttention has it. "top-left": query n sees keys up to n, as
#: `F.scaled_dot_product_attention(is_causal=True)` has it.
Causal = bool | Literal["top-left"]


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

    Raises:
        ValueError: If `causal` is none of the three.
        TypeError: If `mask` is neither boolean nor floating.
    """

    scale: float
    causal: Causal = False
    mask: Tensor | None = None
    dropout_p: float = 0.0

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
