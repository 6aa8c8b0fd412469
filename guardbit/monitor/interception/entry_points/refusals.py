"""Why a call must stay with the original: the reasons that the entry points share."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.overrides import _get_current_function_mode_stack, has_torch_function
from torch.utils._device import DeviceContext

from guardbit.kernels.attention import MAX_HEAD_DIM, MIN_HEAD_DIM
from guardbit.kernels.op import has_tangent
from guardbit.kernels.tensors import is_autocast
from guardbit.monitor.interception.seen import CAPTURED

#: What answers for tensors of PyTorch's own classes, and for those that leave it at that.
_ORDINARY = (
    Tensor.__torch_function__.__func__,  # pyright: ignore[reportFunctionMemberAccess]
    torch._C._disabled_torch_function_impl,
)

_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


#: Why a call, of latent attention for example, can be watched but not switched.
OTHER_WIDTH = "its values have another head size than its keys, and a switch needs one for both"

_DTENSORS = (
    "it is called with DTensors, which GuardBit reads in eager calls of"
    " F.scaled_dot_product_attention only"
)


def why_call(
    q: Tensor, k: Tensor, v: Tensor, masks: Sequence[Tensor | None], dropout_p: float = 0.0
) -> str | None:
    """Returns why a call that may have masks and dropout stays with the original, or None."""
    for mask in masks:
        if (why := why_mask(mask)) is not None:
            return why
    return why_dropout(dropout_p) or why_tensors(q, k, v, any_width=True) or why_now(q, k, v)


def why_tensors(q: Tensor, k: Tensor, v: Tensor, any_width: bool = False) -> str | None:
    if isinstance(q, DTensor) or isinstance(k, DTensor):
        return _DTENSORS
    if q.is_nested or q.dim() != 4 or k.dim() != 4 or v.dim() != 4:
        return "its inputs are not of shape (batch, heads, tokens, head size)"
    if (why := why_head(q, q.size(3))) is not None:
        return why
    if not q.dtype == k.dtype == v.dtype and not is_autocast(q):
        return f"it mixes {q.dtype}, {k.dtype} and {v.dtype}"
    if k.shape[:3] != v.shape[:3]:
        return "its keys and values differ in shape"
    if q.size(0) != k.size(0) or q.size(3) != k.size(3):
        return "its queries and keys differ in batch or head size"
    if k.size(3) != v.size(3):
        return why_head(v, v.size(3)) if any_width else OTHER_WIDTH
    return None


def why_head(q: Tensor, head_dim: int) -> str | None:
    """Returns why a call with queries of any shape and this head size stays, or None."""
    if isinstance(q, DTensor):
        return _DTENSORS
    if q.is_nested:
        return "its inputs are nested"
    if q.dtype not in _DTYPES:
        return f"it computes in {q.dtype}"
    if not MIN_HEAD_DIM <= head_dim <= MAX_HEAD_DIM:
        return f"its head size {head_dim} is outside {MIN_HEAD_DIM} to {MAX_HEAD_DIM}"
    return None


def why_groups(q: Tensor, k: Tensor, are_allowed: bool = True) -> str | None:
    if q.size(1) != k.size(1) and not (are_allowed and q.size(1) % k.size(1) == 0):
        return "it broadcasts keys over heads"
    return None


def why_mask(mask: Tensor | None) -> str | None:
    if mask is None:
        return None
    if isinstance(mask, DTensor) or mask.is_nested or mask.layout is not torch.strided:
        return "its mask is no ordinary tensor"
    if takes_over(mask):
        return f"its mask is a {type(mask).__name__}, which calls attention by itself"
    if mask.dtype != torch.bool and not mask.is_floating_point():
        return f"its mask is {mask.dtype}"
    return None


def why_dropout(dropout_p: float) -> str | None:
    if dropout_p != 0.0 and not 0.0 < dropout_p < 1.0:
        return f"it is called with dropout {dropout_p}"
    return None


def why_now(q: Tensor, *others: Tensor) -> str | None:
    """Returns why every eager call must stay with the original at this moment, or None."""
    if torch.compiler.is_compiling():
        return None
    if torch._C._are_functorch_transforms_active():
        return "it runs under a torch.func transform"
    if has_tangent(q, *others):
        return "it is differentiated in forward mode"
    if q.is_cuda and torch.cuda.is_current_stream_capturing():
        return CAPTURED
    return None


def takes_over(x: Tensor) -> bool:
    """Whether a tensor's class answers PyTorch's functions itself; what it holds is its affair."""
    if type(x) in (Tensor, nn.Parameter):  # PyTorch 2.11's compiler cannot trace the comparison
        return False
    handler = type(x).__torch_function__
    return getattr(handler, "__func__", handler) not in _ORDINARY


def is_taken_over(tensors: Sequence[Tensor]) -> bool:
    """Whether a tensor, or a mode that is active, takes a call of PyTorch's function for itself."""
    return has_torch_function(tensors) and (
        any(map(takes_over, tensors))
        or any(type(mode) is not DeviceContext for mode in _get_current_function_mode_stack())
    )
