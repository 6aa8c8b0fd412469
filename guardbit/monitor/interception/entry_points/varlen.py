"""`torch.nn.attention.varlen.varlen_attn`, PyTorch's attention for packed sequences."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from guardbit.monitor.interception.entry_points.libraries import entry_point, lse_of


def _returns(out: Tensor, lse: Tensor, *args: Any, **kwargs: Any) -> Any:
    wanted = kwargs.get("return_aux")
    return (out, lse_of(lse, VARLEN)) if wanted is not None and wanted.lse else out


VARLEN = entry_point(
    "torch.nn.attention.varlen.varlen_attn",
    home="torch.nn.attention.varlen",
    engine="varlen_attn",
    returns=_returns,
    is_packed=True,
)
