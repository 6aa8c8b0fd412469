"""Engines that only autograd can run backward: the call is run again for its backward."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from guardbit.kernels.engines.base import Engine, Gradients, Inputs
from guardbit.kernels.engines.random import drawing_again, generator_of, is_capturing
from guardbit.kernels.spec import AttentionSpec

#: PyTorch's own, from where nobody replaces it: what is called `F.scaled_dot_product_attention` may
#: be another function by now.
scaled_dot_product_attention = torch._C._nn.scaled_dot_product_attention  # pyright: ignore


class Whole(Engine):
    """PyTorch's function under autograd: its math kernel, and kernels whose inputs it pads.

    The math kernel's backward computes delta from P and dP. The backward of a padded flash call
    cannot be called directly. So neither can get an O'.
    """

    reads_out = False

    def __init__(self, backend: SDPBackend) -> None:
        self.backend = backend

    def forward(self, inputs: Inputs, training: bool) -> tuple[Tensor, Tensor | None]:
        """See `Engine.forward`."""
        q, k, v, spec, drawn, _ = inputs
        if drawn is not None:
            if q.is_cuda and is_capturing():
                raise RuntimeError(
                    f"dropout of PyTorch's {self.name} kernel, head size {q.size(-1)}, cannot be"
                    " captured in a CUDA graph inside an instrumented model"
                )
            drawn.generator_state.copy_(generator_of(q.device).get_state())
        return self._call(q, k, v, spec), None

    def backward(self, inputs: Inputs, d_out: Tensor, out: Tensor, lse: Tensor) -> Gradients:
        """See `Engine.backward`."""
        q, k, v = (x.detach().requires_grad_() for x in inputs[:3])
        return self._again(inputs._replace(q=q, k=k, v=v), d_out, create_graph=False)

    def differentiable_backward(self, inputs: Inputs, d_out: Tensor) -> Gradients:
        """Gradients with their own history; of PyTorch's kernels only the math kernel's have it."""
        q, k, v = (x if x.requires_grad else x.detach().requires_grad_() for x in inputs[:3])
        return self._again(inputs._replace(q=q, k=k, v=v), d_out, create_graph=True)

    def _again(self, inputs: Inputs, d_out: Tensor, create_graph: bool) -> Gradients:
        q, k, v, spec, drawn, wants_mask = inputs
        leaves = [q, k, v]
        if wants_mask:
            assert spec.mask is not None
            mask = spec.mask
            mask = mask if create_graph and mask.requires_grad else mask.detach().requires_grad_()
            spec = replace(spec, mask=mask)
            leaves.append(mask)
        with torch.enable_grad(), drawing_again(q.device, drawn):
            out = self._call(q, k, v, spec)
        return Gradients(*torch.autograd.grad(out, leaves, d_out, create_graph=create_graph))

    def _call(self, q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec) -> Tensor:
        with sdpa_kernel(self.backend), torch.autocast(q.device.type, enabled=False):
            return scaled_dot_product_attention(
                q, k, v, spec.mask, spec.dropout_p, spec.causal is not False,
                scale=spec.scale, enable_gqa=q.size(1) != k.size(1),
            )  # fmt: skip
