"""Small integer tensors on a device, made once."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor


# Outside inference mode: a later training step could not save inference tensors.
@lru_cache(maxsize=4096)
@torch.inference_mode(False)
def device_constant(values: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Returns the values as a tensor `(len(values),)` on the device; the host does not wait."""
    # From pageable memory the copy would be synchronous.
    host = torch.tensor(values, dtype=dtype, pin_memory=device.type == "cuda")
    return host.to(device, non_blocking=True)
