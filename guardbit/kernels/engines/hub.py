"""FlashAttention 2, 3 and 4 as kernels of Hugging Face's hub: `kernels.get_kernel(...)`.

The package `kernels` loads them from files, under names with a hash in them. So they are found by
the name of their file and the functions in it, and so are copies inside other packages. Of each
version the first that is found counts.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from guardbit.kernels.engines.flash_attn import FlashAttn2, FlashAttn3, FlashAttn4
from guardbit.kernels.engines.library import found

_PACKAGES = frozenset({"flash_attn", "flash_attn_interface", "guardbit"})

# Label of an engine -> the module that was found for it, or "".
_homes: dict[str, str] = {}


class HubFlashAttn2(FlashAttn2):
    """FlashAttention 2 of the hub, whose forward and backward are ops by themselves."""

    label = "kernels/flash_attn_2"
    home = ""

    def find_home(self) -> str:
        """See `FlashAttn2.find_home`."""
        return home_of(self.label)

    def functions(self, is_packed: bool) -> tuple[Any, Any]:
        """See `FlashAttn2.functions`."""
        home, kind = self.find_home(), "varlen_" if is_packed else ""
        return found(home, f"_flash_attn_{kind}forward"), found(home, f"_flash_attn_{kind}backward")


class HubFlashAttn3(FlashAttn3):
    """FlashAttention 3 of the hub."""

    label = "kernels/flash_attn_3"
    home = ""

    def find_home(self) -> str:
        """See `FlashAttn3.find_home`."""
        return home_of(self.label)


class HubFlashAttn4(FlashAttn4):
    """FlashAttention 4 of the hub."""

    label = "kernels/flash_attn_4"
    home = ""

    def find_home(self) -> str:
        """See `FlashAttn4.find_home`."""
        return home_of(self.label)


def home_of(label: str) -> str:
    """The name of the module of a version, or "" as long as none is imported."""
    if _homes.get(label) not in sys.modules:
        # Both names of files end so, and thousands of modules do not: they are passed over quickly.
        names = [name for name in list(sys.modules) if name.endswith("interface")]
        found_now = (name for name in names if _label(name, sys.modules.get(name)) == label)
        _homes[label] = next(found_now, "")
    return _homes[label]


def _label(name: str, module: Any) -> str | None:
    """Which version a module is, or None."""
    file = name.rpartition(".")[2]
    if file not in ("flash_attn_interface", "interface") or name.partition(".")[0] in _PACKAGES:
        return None
    has: Mapping[str, Any] = getattr(module, "__dict__", {})
    if file == "interface":
        return HubFlashAttn4.label if "_flash_attn_fwd" in has else None
    if "_flash_attn_varlen_forward" in has:
        return HubFlashAttn2.label
    return HubFlashAttn3.label if "_flash_attn_forward" in has else None


def hub_kernel_is_loaded() -> bool:
    """Whether one of them is imported."""
    return any(home_of(kind.label) for kind in (HubFlashAttn2, HubFlashAttn3, HubFlashAttn4))
