"""Casts as autocast casts for PyTorch's own attention."""

from __future__ import annotations

import torch
from torch import Tensor

_CAST = (torch.bfloat16, torch.float16, torch.float32)


def is_autocast(x: Tensor) -> bool:
    """Whether autocast is on for x's device; on meta, which has none, the question is an error."""
    return x.device.type != "meta" and torch.is_autocast_enabled(x.device.type)


def autocast_tensors(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Casts as autocast casts the arguments of `F.scaled_dot_product_attention`."""
    if not is_autocast(q):
        return q, k, v
    dtype = torch.get_autocast_dtype(q.device.type)
    q, k, v = (x.to(dtype) if x.dtype in _CAST else x for x in (q, k, v))
    return q, k, v
