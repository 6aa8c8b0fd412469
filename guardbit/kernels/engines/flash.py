"""FlashAttention-2, as PyTorch ships it for CUDA."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend

from guardbit.kernels.engines.base import Engine, Gradients, Inputs
from guardbit.kernels.engines.random import keep, philox_of

_aten = torch.ops.aten


class Flash(Engine):
    """PyTorch's flash kernels on CUDA; they take no mask."""

    backend = SDPBackend.FLASH_ATTENTION

    def forward(self, inputs: Inputs, training: bool) -> tuple[Tensor, Tensor | None]:
        """See `Engine.forward`."""
        q, k, v, spec, drawn, _ = inputs
        out, lse, _, _, _, _, seed, offset, _ = _aten._scaled_dot_product_flash_attention(
            q, k, v, spec.dropout_p, spec.causal is not False, False, scale=spec.scale
        )
        keep(drawn, seed, offset)
        return out, lse

    def backward(self, inputs: Inputs, d_out: Tensor, out: Tensor, lse: Tensor) -> Gradients:
        """See `Engine.backward`."""
        q, k, v, spec, drawn, _ = inputs
        philox = philox_of(drawn, q.device).view(torch.uint64)
        gradients = _aten._scaled_dot_product_flash_attention_backward(
            d_out,
            q,
            k,
            v,
            out,
            lse,
            None,
            None,
            q.size(2),
            k.size(2),
            spec.dropout_p,
            spec.causal is not False,
            philox,
            philox[:0],
            scale=spec.scale,
        )  # fmt: skip
        return Gradients(*gradients)
