"""FlashAttention 2, 3 and 4, from the packages of its authors.

Each is called by the functions that its own autograd functions call:

- `flash_attn` 2.7 and later, `flash_attn.flash_attn_interface._wrapped_flash_attn_*`;
- `flash_attn_interface`, FlashAttention 3, `_flash_attn_forward` and `_flash_attn_backward`;
- `flash_attn.cute`, FlashAttention 4, `interface._flash_attn_fwd` and `_flash_attn_bwd`.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

import torch
from torch import Tensor

from guardbit.kernels.engines.base import Gradients, Inputs
from guardbit.kernels.engines.library import (
    LibraryEngine,
    call,
    found,
    from_library_layout,
    nothing_like,
    parameters,
    to_library_layout,
)
from guardbit.kernels.engines.random import philox_of
from guardbit.kernels.spec import AttentionSpec


class _FlashAttn(LibraryEngine):
    """What the three have in common.

    Attributes:
        needs: Parameters that the forward must have; without them this engine does not know it.
    """

    needs: frozenset[str]

    def find_home(self) -> str:
        """The name of the module with the functions, in this process."""
        return self.home

    @abstractmethod
    def functions(self, is_packed: bool) -> tuple[Any, Any]:
        """Forward and backward, None where there is none."""

    def why_missing(self, is_packed: bool) -> str | None:
        """See `LibraryEngine.why_missing`."""
        functions = self.functions(is_packed)
        if None in functions:
            return f"this release of {self.label} has no functions that GuardBit knows"
        packed = {"cu_seqlens_q", "cu_seqlens_k"} if is_packed else set()
        for function in functions:
            unknown = (self.needs | packed) - parameters(function).keys()
            if unknown:
                return f"the functions of this release of {self.label} do not take {min(unknown)}"
        return super().why_missing(is_packed)

    def forward(self, inputs: Inputs, training: bool) -> tuple[Tensor, Tensor | None]:
        """See `Engine.forward`."""
        q, k, v, spec, drawn, _ = inputs
        q, k, v = (to_library_layout(x, spec) for x in (q, k, v))
        function = self.functions(spec.documents is not None)[0]
        out, lse, *rest = call(function, q=q, k=k, v=v, **self.arguments(spec))
        if drawn is not None:
            drawn.philox.copy_(rest[-1].view(torch.int64))
        return from_library_layout(out, spec), lse if spec.documents is None else lse.unsqueeze(0)

    def backward(self, inputs: Inputs, d_out: Tensor, out: Tensor, lse: Tensor) -> Gradients:
        """See `Engine.backward`."""
        q, k, v, spec, drawn, _ = inputs
        d_out, q, k, v, out = (to_library_layout(x, spec) for x in (d_out, q, k, v, out))
        lse = lse if spec.documents is None else lse.squeeze(0)
        dq, dk, dv = nothing_like(q, k, v)
        returned = call(
            self.functions(spec.documents is not None)[1],
            dout=d_out,
            q=q,
            k=k,
            v=v,
            out=out,
            softmax_lse=lse,
            lse=lse,
            dq=dq,
            dk=dk,
            dv=dv,
            deterministic=self.deterministic,
            rng_state=philox_of(drawn, q.device),
            **self.arguments(spec),
        )
        gradients = (from_library_layout(x, spec) for x in (dq, dk, dv))
        return Gradients(*gradients, d_sinks=None if spec.sinks is None else returned[3])

    def arguments(self, spec: AttentionSpec) -> dict[str, Any]:
        """Returns what a call asks for, under every name that one of the functions has for it."""
        left, right = spec.window
        causal = spec.causal is True
        asked: dict[str, Any] = {
            "softmax_scale": spec.scale,
            "causal": causal,
            "is_causal": causal,
            "window_size": spec.window,
            "window_size_left": left,
            "window_size_right": right,
            "softcap": spec.softcap,
            "dropout_p": spec.dropout_p,
            "return_softmax": False,
            **self.scheduled,
        }
        if spec.documents is not None:
            names = ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k")
            asked |= dict(zip(names, spec.documents, strict=True))
        return asked


class FlashAttn2(_FlashAttn):
    """FlashAttention 2, of the package `flash_attn`."""

    label = "flash_attn"
    home = "flash_attn.flash_attn_interface"
    needs = frozenset({"window_size_left", "softcap", "softmax_scale", "causal"})
    drops = True

    def functions(self, is_packed: bool) -> tuple[Any, Any]:
        """See `_FlashAttn.functions`."""
        kind = "varlen_" if is_packed else ""
        forward = found(self.find_home(), f"_wrapped_flash_attn_{kind}forward")
        return forward, found(self.find_home(), f"_wrapped_flash_attn_{kind}backward")


class FlashAttn3(_FlashAttn):
    """FlashAttention 3, of the module `flash_attn_interface`."""

    label = "flash_attn_3"
    home = "flash_attn_interface"
    needs = frozenset({"softmax_scale", "softcap"})

    def functions(self, is_packed: bool) -> tuple[Any, Any]:
        """See `_FlashAttn.functions`."""
        return found(self.find_home(), "_flash_attn_forward"), found(
            self.find_home(), "_flash_attn_backward"
        )


class FlashAttn4(_FlashAttn):
    """FlashAttention 4, of the package `flash_attn.cute`."""

    label = "flash_attn_4"
    home = "flash_attn.cute.interface"
    needs = frozenset({"window_size_left", "softmax_scale", "causal", "softcap"})

    def functions(self, is_packed: bool) -> tuple[Any, Any]:
        """See `_FlashAttn.functions`."""
        return found(self.find_home(), "_flash_attn_fwd"), found(
            self.find_home(), "_flash_attn_bwd"
        )

    def arguments(self, spec: AttentionSpec) -> dict[str, Any]:
        """See `_FlashAttn.arguments`."""
        left, right = (None if n < 0 else n for n in spec.window)
        return {
            **super().arguments(spec),
            "window_size_left": left,
            "window_size_right": right,
            "learnable_sink": spec.sinks,
            "return_lse": True,
        }
