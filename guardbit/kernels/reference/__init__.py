"""Stabilized flash attention in plain torch: the oracle of the kernels, and the CPU backend.

Tile by tile over the keys, with the roundings of FlashAttention-2 and no others. Shapes in all
modules: q, out (B, H, N, D), k and v (B, H_kv, M, D); H is a multiple of H_kv.
"""

from guardbit.kernels.reference.audit import Shadow, delta_bias, exact_backward, shadow
from guardbit.kernels.reference.backward_pass import Gradients, backward
from guardbit.kernels.reference.common import Causal, Dropout
from guardbit.kernels.reference.forward_pass import STABILIZERS, Forward, Telemetry, forward

__all__ = [
    "STABILIZERS",
    "Causal",
    "Dropout",
    "Forward",
    "Gradients",
    "Shadow",
    "Telemetry",
    "backward",
    "delta_bias",
    "exact_backward",
    "forward",
    "shadow",
]
