"""The functions of FlashAttention 2, 3 and 4: `flash_attn`, `flash_attn_interface`, `.cute`.

The same functions of kernels from Hugging Face's hub are here too, see
`guardbit.kernels.engines.libraries`.

The functions for inference with a cache of keys are not watched, and their refusal says so.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from guardbit.monitor.interception.entry_points.base import EntryPoint, Refusal
from guardbit.monitor.interception.entry_points.libraries import (
    LibraryEntryPoint,
    entry_point,
    lse_of,
)

_WITH_CACHE = "it is inference with a cache of keys, which is not watched"


def _make(package: str, attribute: str, home: str, engine: str) -> LibraryEntryPoint:
    def returns(out: Tensor, lse: Tensor, *args: Any, **kwargs: Any) -> Any:
        if engine.endswith("flash_attn_4"):
            return out, lse_of(lse, entry)
        if "return_attn_probs" not in entry.defaults:  # early releases of FlashAttention 3
            return out, lse_of(lse, entry)
        if not entry.given(args, kwargs).get("return_attn_probs", False):
            return out
        if engine.endswith("flash_attn_3"):
            return out, lse_of(lse, entry)
        return out, lse_of(lse, entry), out.new_empty(0)  # P is there with dropout only

    name = f"{package}.{attribute}"
    entry = entry_point(name, home, engine, returns, is_packed="varlen" in attribute)
    return entry


def _make_cached(package: str, home: str) -> EntryPoint:
    def bind(*args: Any, **kwargs: Any) -> Refusal:
        return Refusal(_WITH_CACHE)

    attribute = "flash_attn_with_kvcache"
    return EntryPoint(f"{package}.{attribute}", home, attribute, bind)


#: The functions of FlashAttention 2; later versions have fewer.
_KINDS = ("", "_qkvpacked", "_kvpacked", "_varlen", "_varlen_qkvpacked", "_varlen_kvpacked")

FLASH_ATTN: tuple[EntryPoint, ...] = (
    *(
        _make(
            "flash_attn", f"flash_attn{kind}_func", "flash_attn.flash_attn_interface", "flash_attn"
        )
        for kind in _KINDS
    ),
    *(
        _make(
            "flash_attn_interface", f"flash_attn{kind}_func", "flash_attn_interface", "flash_attn_3"
        )
        for kind in ("", "_varlen", "_qkvpacked")
    ),
    *(
        _make(
            "flash_attn.cute", f"flash_attn{kind}_func", "flash_attn.cute.interface", "flash_attn_4"
        )
        for kind in ("", "_varlen")
    ),
    *(
        _make(engine, f"flash_attn{kind}_func", "", engine)
        for engine, kinds in (
            ("kernels/flash_attn_2", _KINDS),
            ("kernels/flash_attn_3", ("", "_varlen", "_qkvpacked")),
            ("kernels/flash_attn_4", ("", "_varlen")),
        )
        for kind in kinds
    ),
    _make_cached("flash_attn", "flash_attn.flash_attn_interface"),
    _make_cached("flash_attn_interface", "flash_attn_interface"),
)
