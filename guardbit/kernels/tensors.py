"""Small integer tensors on a device, and the casts of autocast."""

from __future__ import annotations

from functools import lru_cache

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


# Outside inference mode: a later training step could not save inference tensors.
@lru_cache(maxsize=4096)
@torch.inference_mode(False)
def device_constant(values: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Returns the values as a tensor `(len(values),)` on the device; the host does not wait."""
    # From pageable memory the copy would be synchronous.
    host = torch.tensor(values, dtype=dtype, device="cpu", pin_memory=device.type == "cuda")
    return host.to(device, non_blocking=True)
