"""Stabilized flash attention in plain torch: the oracle of the kernels, and the CPU backend.

Tile by tile over the keys, with the roundings of FlashAttention-2 and no others. Shapes in all
modules: q, out (B, H, N, D), k and v (B, H_kv, M, D); H is a multiple of H_kv.
"""

from guardbit.kernels.reference.audit import (
    RowMaxima,
    Shadow,
    delta_bias,
    exact_query_gradient,
    row_maxima,
    shadow,
)
from guardbit.kernels.reference.backward_pass import Gradients, backward
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
from guardbit.kernels.reference.forward_pass import FORWARD_STABILIZERS, Forward, forward
from guardbit.kernels.spec import Causal

__all__ = [
    "FORWARD_STABILIZERS",
    "Carried",
    "Causal",
    "Dropout",
    "Forward",
    "Gradients",
    "RowMaxima",
    "Shadow",
    "backward",
    "carry_compensated_delta",
    "carry_exact_delta",
    "delta_bias",
    "exact_delta",
    "exact_query_gradient",
    "float_carrier",
    "forward",
    "lse_gradient",
    "row_maxima",
    "shadow",
    "write_carrier",
]
