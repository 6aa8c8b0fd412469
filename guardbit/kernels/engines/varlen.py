"""PyTorch's packed attention: what `torch.nn.attention.varlen.varlen_attn` calls."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from guardbit.kernels.engines.base import Gradients, Inputs
from guardbit.kernels.engines.library import (
    LibraryEngine,
    found,
    from_library_layout,
    to_library_layout,
)
from guardbit.kernels.engines.random import philox_of
from guardbit.kernels.spec import AttentionSpec

_aten = torch.ops.aten


class Varlen(LibraryEngine):
    """PyTorch's flash kernels for packed sequences; they drop nothing here.

    It passes only arguments that `varlen_attn` has in all of torch 2.11 to 2.13, and `SCHEDULING`
    that the call gives.
    """

    label = "varlen_attn"
    home = "torch.nn.attention.varlen"

    def why_missing(self, is_packed: bool) -> str | None:
        """See `LibraryEngine.why_missing`."""
        runs_on_cudnn = found(self.home, "_should_use_cudnn")
        if runs_on_cudnn is not None and torch.cuda.is_available() and runs_on_cudnn(0):
            return "varlen_attn runs on cuDNN, whose packed kernels GuardBit does not know"
        return super().why_missing(is_packed)

    def forward(self, inputs: Inputs, training: bool) -> tuple[Tensor, Tensor | None]:
        """See `Engine.forward`."""
        q, k, v, spec, _, _ = inputs
        q, k, v = (to_library_layout(x, spec) for x in (q, k, v))
        out, lse, *_ = _aten._flash_attention_forward(
            q, k, v, *_documents(spec), 0.0, spec.causal is True, False, **_range(spec),
            **self.scheduled,
        )  # fmt: skip
        return from_library_layout(out, spec), lse.unsqueeze(0)

    def backward(self, inputs: Inputs, d_out: Tensor, out: Tensor, lse: Tensor) -> Gradients:
        """See `Engine.backward`."""
        q, k, v, spec, drawn, _ = inputs
        tensors = (to_library_layout(x, spec) for x in (d_out, q, k, v, out))
        philox = philox_of(drawn, q.device).view(torch.uint64)
        gradients = _aten._flash_attention_backward(
            *tensors, lse.squeeze(0), *_documents(spec), 0.0, spec.causal is True, philox,
            q.new_empty(0), **_range(spec),
        )  # fmt: skip
        return Gradients(*(from_library_layout(x, spec) for x in gradients))


def _documents(spec: AttentionSpec) -> tuple[Any, ...]:
    assert spec.documents is not None
    return tuple(spec.documents)


def _range(spec: AttentionSpec) -> dict[str, Any]:
    # `varlen_attn` passes causal attention as a window.
    left, right = spec.window[0], 0 if spec.causal is True else spec.window[1]
    return {"scale": spec.scale, "window_size_left": left, "window_size_right": right}
