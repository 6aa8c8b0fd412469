"""PyTorch's FlexAttention as an engine: compiled on GPUs, some ten seconds for each head size."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend

from guardbit.doctor.call import Call
from guardbit.kernels.engines.base import Engine, Gradients, Inputs
from guardbit.kernels.mask import mask_tile


class Flex(Engine):
    """FlexAttention with a mask that is looked up, so that one kernel serves all masks."""

    backend = SDPBackend.OVERRIDEABLE
    name = "flex_attention"  # pyright: ignore[reportAssignmentType]
    reads_out = False

    def __init__(self, is_compiled: bool) -> None:
        self._is_compiled = is_compiled
        # The last forward, whose graph its backward goes back through.
        self._last: tuple[Inputs, list[Tensor], Tensor] | None = None

    @property
    def title(self) -> str:
        """See `Engine.title`."""
        return "the kernel of flex_attention"

    @cached_property
    def _function(self) -> Callable[..., Any]:
        from torch.nn.attention.flex_attention import flex_attention

        return torch.compile(flex_attention, dynamic=False) if self._is_compiled else flex_attention

    def forward(self, inputs: Inputs, training: bool) -> tuple[Tensor, Tensor | None]:
        """See `Engine.forward`."""
        leaves = [x.detach().requires_grad_() for x in inputs[:3]]
        q, k, v = leaves
        with torch.enable_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that it is slow where it is not compiled
            out = self._function(
                q,
                k,
                v,
                score_mod=_cap(inputs.spec.softcap),
                block_mask=_block_mask(Call(q, k, v, q, inputs.spec)),
                scale=inputs.spec.scale,
                enable_gqa=inputs.q.size(1) != inputs.k.size(1),
            )
        self._last = inputs, leaves, out
        return out.detach(), None

    def backward(self, inputs: Inputs, d_out: Tensor, out: Tensor, lse: Tensor) -> Gradients:
        """See `Engine.backward`."""
        if self._last is None or self._last[0].q is not inputs.q:
            self.forward(inputs, training=True)
        assert self._last is not None
        _, leaves, own_out = self._last
        with torch.enable_grad():
            found = torch.autograd.grad(own_out, leaves, d_out, retain_graph=True)
        return Gradients(*found)


def why_not_flex(call: Call) -> str | None:
    """Returns why FlexAttention is not examined at a call, or None."""
    if not call.q.is_cuda:
        return "PyTorch has no backward of it for CPUs"
    if call.spec.mask is not None and call.spec.mask.dtype != torch.bool:
        return "a mask that is added would need another kernel, which is not compiled here"
    if call.q.size(-1) & (call.q.size(-1) - 1):
        return "its kernels are asked for with head sizes that are powers of two only"
    return None


def _block_mask(call: Call) -> Any:
    from torch.nn.attention.flex_attention import create_block_mask

    batch, _, rows, keys = call.sizes
    head, row_ids, key_ids = (torch.arange(n, device=call.q.device) for n in (1, rows, keys))
    added = mask_tile(call.spec, call.sizes, head, row_ids, key_ids)
    seen = (added > -math.inf)[(None,) * (4 - added.dim())].expand(batch, 1, rows, keys)
    seen = seen.contiguous()

    def looked_up(b: Tensor, h: Tensor, row: Tensor, key: Tensor) -> Tensor:
        return seen[b, 0, row, key]

    return create_block_mask(looked_up, batch, None, rows, keys, device=call.q.device)


def _cap(softcap: float) -> Callable[..., Tensor] | None:
    if softcap == 0:
        return None

    def capped(score: Tensor, b: Tensor, h: Tensor, row: Tensor, key: Tensor) -> Tensor:
        return softcap * torch.tanh(score / softcap)

    return capped
