"""PyTorch's flash attention for the CPU."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend

from guardbit.kernels.engines.base import Engine, Gradients, Inputs, additive

_aten = torch.ops.aten


class CPUFlash(Engine):
    """PyTorch's CPU kernel; it drops nothing, and gives no gradient of a mask."""

    backend = SDPBackend.FLASH_ATTENTION

    def forward(self, inputs: Inputs, training: bool) -> tuple[Tensor, Tensor | None]:
        """See `Engine.forward`."""
        q, k, v, spec, _, _ = inputs
        return _aten._scaled_dot_product_flash_attention_for_cpu(
            q, k, v, spec.dropout_p, spec.causal is not False,
            attn_mask=additive(spec.mask, q.dtype), scale=spec.scale,
        )  # fmt: skip

    def backward(self, inputs: Inputs, d_out: Tensor, out: Tensor, lse: Tensor) -> Gradients:
        """See `Engine.backward`."""
        q, k, v, spec, _, _ = inputs
        gradients = _aten._scaled_dot_product_flash_attention_for_cpu_backward(
            d_out,
            q,
            k,
            v,
            out,
            lse,
            spec.dropout_p,
            spec.causal is not False,
            attn_mask=additive(spec.mask, q.dtype),
            scale=spec.scale,
        )  # fmt: skip
        return Gradients(*gradients)
