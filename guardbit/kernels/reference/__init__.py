"""Stabilized flash attention in plain torch: the oracle of the kernels, and the CPU backend.

Tile by tile over the keys, with the roundings of FlashAttention-2 and no others. Arguments mean the
same in all functions, and in `guardbit.kernels.device` under the same names; H is a multiple
of H_kv, C heads and R queries are wanted::

    q            (B, H, N, D), BF16, FP16 or FP32; any strides, as of all tensors
    k, v         (B, H_kv, M, D) and (B, H_kv, M, E)
    out, d_out   (B, H, N, E), what a forward returned, and its gradient
    lse          FP32 (B, H, N), L = m + log l of what a forward returned
    residual     INT8 (B, H, N, E), see `Forward`; None if no head is compensated
    spec         what the call asks for, see `AttentionSpec`; `dropout` replaces its dropout
    causal       see `AttentionSpec`
    scale        factor of Q K^T
    stabilizers  one name a computed head, see `forward`
    head_ids     the query heads wanted
    query_ids    INT64 (R,), the queries to look at; None for all N
    eps          how near the row maximum a score counts as another maximum
    dropout      what is dropped, with the numbers of the computed heads; None for nothing
    into         where O' is written; None for a copy of O
    key_tile     keys looked at together
    chunk        queries looked at together

A mask, or another field of `spec`, that does not fit (B, H, N, M) is a ValueError.
"""

from guardbit.kernels.reference.audit import (
    Shadow,
    delta_bias,
    exact_query_gradient,
    gradient_error,
    shadow,
)
from guardbit.kernels.reference.common import Dropout
from guardbit.kernels.reference.delta import (
    Carried,
    carry_compensated_delta,
    carry_exact_delta,
    exact_delta,
    float_carrier,
    lse_gradient,
    write_carrier,
)
from guardbit.kernels.reference.passes import Forward, Gradients, backward, forward
from guardbit.kernels.spec import Causal
