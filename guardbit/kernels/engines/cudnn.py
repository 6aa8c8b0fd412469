"""cuDNN's attention, PyTorch's first choice on Hopper."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend

from guardbit.kernels.engines.base import Engine, Gradients, Inputs, additive
from guardbit.kernels.engines.random import keep, philox_of

_aten = torch.ops.aten


class CuDNN(Engine):
    """cuDNN's kernels, with masks as additive ones."""

    backend = SDPBackend.CUDNN_ATTENTION

    def forward(self, inputs: Inputs, training: bool) -> tuple[Tensor, Tensor | None]:
        """See `Engine.forward`."""
        q, k, v, spec, drawn, _ = inputs
        out, lse, _, _, _, _, seed, offset, _ = _aten._scaled_dot_product_cudnn_attention(
            q, k, v, additive(spec.mask, q.dtype, _HIDDEN), training, spec.dropout_p,
            spec.causal is not False, False, scale=spec.scale,
        )  # fmt: skip
        keep(drawn, seed, offset)
        return out, lse

    def backward(self, inputs: Inputs, d_out: Tensor, out: Tensor, lse: Tensor) -> Gradients:
        """See `Engine.backward`."""
        q, k, v, spec, drawn, _ = inputs
        seed, offset = philox_of(drawn, q.device).unbind()
        gradients = _aten._scaled_dot_product_cudnn_attention_backward(
            d_out,
            q,
            k,
            v,
            out,
            lse.unsqueeze(-1),
            seed,
            offset,
            additive(spec.mask, q.dtype, _HIDDEN),
            None,
            None,
            q.size(2),
            k.size(2),
            spec.dropout_p,
            spec.causal is not False,
            scale=spec.scale,
        )  # fmt: skip
        return Gradients(*gradients)

    def laid_out(self, out: Tensor, q: Tensor) -> Tensor:
        """Lays O' out as q: PyTorch's cached graph stores q's strides, not those of out."""
        wanted = torch.empty_like(q) if q.shape == out.shape else out
        return out if out.stride() == wanted.stride() else wanted.copy_(out)


# Until 2.11, PyTorch's own conversion for cuDNN replaces -inf by -65504, so that a row that sees no
# key attends to all keys (pytorch #177842, fixed in 2.12).
_RELEASE = tuple(int(part) for part in torch.__version__.split(".")[:2])
_HIDDEN = -math.inf if _RELEASE >= (2, 12) else -65504.0
