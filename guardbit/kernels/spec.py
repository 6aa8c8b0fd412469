"""What an attention call asks for, as one plain record."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

#: False: every query sees every key. True: bottom-right aligned, query n sees keys up to
#: n + M - N, as FlashAttention has it. "top-left": query n sees keys up to n, as
#: `F.scaled_dot_product_attention(is_causal=True)` has it.
Causal = bool | Literal["top-left"]

#: Which keys queries see: takes INT64 positions of C heads of all H, of R queries and of K keys,
#: returns booleans (B, C, R, K).
MaskFunction = Callable[[Tensor, Tensor, Tensor], Tensor]

#: Modifies scores: takes (B, C, R, K) and positions as `MaskFunction` does, returns the same shape.
#: It acts on each score by itself and is differentiable.
ScoreFunction = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


class Documents(NamedTuple):
    """Where packed sequences begin and end: a query sees keys of its own document only.

    A call with documents has a batch of one. Document g has the queries from `cu_queries[g]` up to
    but excluding `cu_queries[g + 1]`, and likewise keys; either range may be empty.
    """

    cu_queries: Tensor  # INT32 (G + 1,), from 0 to N
    cu_keys: Tensor  # INT32 (G + 1,), from 0 to M
    max_queries: int  # queries of the longest document, or more
    max_keys: int  # keys of the longest document, or more


# Compared by identity: what two masks hold is on their device.
@dataclass(frozen=True, eq=False)
class AttentionSpec:
    """What a call asks for besides q, k and v; a query sees a key if every field allows it."""

    scale: float  # factor of Q K^T
    causal: Causal = False  # see `Causal`
    # Boolean, True where a query sees a key, or floating, added to the scaled scores. Any shape
    # that broadcasts to (B, H, N, M). None for no such mask.
    mask: Tensor | None = None
    dropout_p: float = 0  # probability with which an entry of P is dropped
    # How many keys before and after its own place a query sees, -1 for all. Its own place is the
    # last key that `causal=True` would show: the last keys are aligned with the last queries (of
    # each document), as in FlashAttention's `window_size`.
    window: tuple[int, int] = (-1, -1)
    # Packed sequences; `causal` and `window` then hold within each. None for one sequence.
    documents: Documents | None = None
    # Scores s are replaced by softcap * tanh(s / softcap), after the scale and before masks; 0 for
    # no cap. Not 0.0, as `sdpa.bind` says.
    softcap: float = 0
    # (H,), one more score of each head that takes part in the softmax and has no value: the
    # probabilities of the keys add up to less than 1. None for no sinks.
    sinks: Tensor | None = None
    mask_function: MaskFunction | None = None  # a mask that is known tile by tile; None for none
    # Is applied to scores after the scale and the soft cap and before masks; None for none.
    score_function: ScoreFunction | None = None

    def __post_init__(self) -> None:
        check_causal(self.causal)
        mask = self.mask
        if mask is not None and mask.dtype != torch.bool and not mask.is_floating_point():
            raise TypeError(f"mask is {mask.dtype}; it must hold booleans or floating numbers")

    @property
    def is_ranged(self) -> bool:
        """Whether more than `causal` bounds the keys that a query sees, apart from dense masks."""
        return self.window != (-1, -1) or self.documents is not None

    @property
    def starts(self) -> tuple[Tensor | None, Tensor | None]:
        """Where the documents' queries and keys begin; None for one sequence."""
        return (None, None) if self.documents is None else self.documents[:2]

    @property
    def has_functions(self) -> bool:
        """Whether masks or scores are given by functions, which only plain torch evaluates."""
        return self.mask_function is not None or self.score_function is not None

    @property
    def extras(self) -> tuple[str, ...]:
        """Names the fields in use for which `F.scaled_dot_product_attention` has no argument."""
        if not (self.is_ranged or self.softcap or self.sinks is not None or self.has_functions):
            return ()  # quickly: most calls have none, and ask for them several times
        fields = {
            "window": self.window != (-1, -1),
            "documents": self.documents is not None,
            "soft cap": self.softcap > 0,
            "sinks": self.sinks is not None,
            "mask function": self.mask_function is not None,
            "score function": self.score_function is not None,
        }
        return tuple(name for name, is_there in fields.items() if is_there)


def check_causal(causal: Causal) -> None:
    # 0 and NumPy's booleans equal what is allowed, and are taken for something else later.
    is_known = isinstance(causal, bool) or (isinstance(causal, str) and causal == "top-left")
    if not is_known:
        raise ValueError(f"causal is {causal!r}; it must be False, True or 'top-left'")
