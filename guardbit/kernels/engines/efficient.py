"""PyTorch's memory-efficient attention, the CUDA kernel for FP32 and for gradients of masks."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend

from guardbit.kernels.engines.base import Engine, Gradients, Inputs, additive
from guardbit.kernels.engines.random import is_capturing, keep, philox_of

_aten = torch.ops.aten

# The kernel pads the rows of its logsumexp to a multiple of this (kAlignLSE in PyTorch's
# kernel_forward.h).
_LSE_ALIGNMENT = 32
# Strides of a mask are multiples of this (preprocess_mask in PyTorch's attention.cpp).
_MASK_ALIGNMENT = 8


class Efficient(Engine):
    """PyTorch's memory-efficient kernels, with masks as additive ones."""

    backend = SDPBackend.EFFICIENT_ATTENTION

    def forward(self, inputs: Inputs, training: bool) -> tuple[Tensor, Tensor | None]:
        """See `Engine.forward`."""
        q, k, v, spec, drawn, _ = inputs
        out, lse, seed, offset = _aten._scaled_dot_product_efficient_attention(
            q, k, v, _prepared(spec.mask, q, k), training, spec.dropout_p,
            spec.causal is not False, scale=spec.scale,
        )  # fmt: skip
        keep(drawn, seed, offset)
        return out, lse

    def backward(self, inputs: Inputs, d_out: Tensor, out: Tensor, lse: Tensor) -> Gradients:
        """See `Engine.backward`."""
        q, k, v, spec, drawn, wants_mask = inputs
        if drawn is not None and not is_capturing():
            seed, offset = drawn.generator_state.view(torch.int64).unbind()
        else:
            seed, offset = philox_of(drawn, q.device).unbind()
        padded_lse = F.pad(lse, (0, -q.size(2) % _LSE_ALIGNMENT), value=torch.inf)
        dq, dk, dv, d_mask = _aten._scaled_dot_product_efficient_attention_backward(
            d_out, q, k, v, _prepared(spec.mask, q, k), out, padded_lse, seed, offset,
            spec.dropout_p, [True, True, True, wants_mask], spec.causal is not False,
            scale=spec.scale,
        )  # fmt: skip
        if not wants_mask:
            return Gradients(dq, dk, dv)
        assert spec.mask is not None
        return Gradients(dq, dk, dv, d_mask.sum_to_size(spec.mask.shape))

    def laid_out(self, out: Tensor, q: Tensor) -> Tensor:
        """Lays the heads out side by side in each row, as the backward assumes."""
        return out.transpose(1, 2).contiguous().transpose(1, 2)


def _prepared(mask: Tensor | None, q: Tensor, k: Tensor) -> Tensor | None:
    """Returns the mask as PyTorch hands it to the kernel."""
    mask = additive(mask, q.dtype)
    if mask is None:
        return None
    aligned = mask.stride(-1) == 1 and not any(s % _MASK_ALIGNMENT for s in mask.stride()[:-1])
    if not aligned:
        keys = mask.size(-1)
        mask = F.pad(mask, (0, _MASK_ALIGNMENT - keys % _MASK_ALIGNMENT))[..., :keys]
    return mask.expand(q.size(0), q.size(1), q.size(2), k.size(2))
