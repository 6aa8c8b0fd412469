"""The stabilizers that change nothing but delta: they write an O' that carries another one.

The kernel's backward computes delta as rowsum(dO * O'), see `reference.write_carrier`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from guardbit.kernels import dispatch


def _exact(*tensors: Tensor, **how: Any) -> Tensor:
    """Delta from unrounded probabilities."""
    return dispatch.carry_exact_delta(*tensors, **how).out


#: Stabilizer -> what writes its O', called as `dispatch.carry_exact_delta` is: with d_out, q, k, v,
#: out and lse in the shapes of `heads`; with `spec`; with the heads that it is for in `head_ids`;
#: and with the O' that other stabilizers have begun in `into`, or None. It returns that O', or else
#: a copy of out, with the rows of these heads written. A row that sees no key, or whose delta is
#: not finite, keeps its O.
DELTAS: dict[str, Callable[..., Tensor]] = {"exact_delta": _exact}
