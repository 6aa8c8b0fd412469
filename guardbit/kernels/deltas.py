"""The stabilizers that change nothing but delta: they write an O' that carries another one.

The kernel's backward computes delta as rowsum(dO * O'), see `reference.write_carrier`.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from guardbit.kernels import dispatch
from guardbit.kernels.spec import AttentionSpec


def _exact(
    d_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    spec: AttentionSpec,
    head_ids: tuple[int, ...],
    into: Tensor | None,
) -> Tensor:
    """Delta from unrounded probabilities."""
    return dispatch.carry_exact_delta(
        d_out, q, k, v, out, lse, spec=spec, head_ids=head_ids, into=into
    )


#: Stabilizer -> what writes its O'. It takes d_out, q, k, v, out, lse and the spec of a call, with
#: the shapes of `heads`; the C heads that it is for; and the O' with which other stabilizers have
#: begun, None for none. It returns that O', or else a copy of out, with the rows of these heads
#: written. A row that sees no key, or whose delta is not finite, keeps its O.
DELTAS: dict[str, Callable[..., Tensor]] = {"exact_delta": _exact}
