"""Lets FlashAttention 4 on Hopper keep what rounding takes from O, so that delta can be exact.

Copy this folder beside your script, and call this before the first step:

    import fa4_residual
    fa4_residual.install()

FlashAttention 4's forward then takes `return_o_lo`, and its backward `o_lo`; it has the like for
sparse attention only. GuardBit tests both at run time. In switched heads of eager calls, packed
ones too, delta then costs the kernels 0 to 7 % more time (`benchmarks/README.md`); in compiled
graphs GuardBit computes it anew. A switched call saves one tensor of O's size more, in one storage
with O. It was written for these releases:

    pip install 'flash-attn-4[cu13]==4.0.0b36' nvidia-cutlass-dsl==4.8.1 quack-kernels==0.6.5
"""

import sys
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

#: Distribution -> the release whose internals `kernel.py` was written for and compiled with.
WRITTEN_FOR = {"flash-attn-4": "4.0.0b36", "nvidia-cutlass-dsl": "4.8.1", "quack-kernels": "0.6.5"}


def why_not() -> str:
    """Why it cannot be had here, a sentence, or ""."""
    for name, known in WRITTEN_FOR.items():
        try:
            found = version(name)
        except PackageNotFoundError:
            found = "not installed"
        if found != known:
            return f"{name} is {found}; O's residual was written for {known} only."
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
        return "FlashAttention 4 stores O's residual on Hopper only."
    return ""


def functions() -> dict[str, Callable[..., Any]]:
    """Name in `flash_attn.cute.interface` -> the function with the parameter."""
    from . import kernel

    return {"_flash_attn_fwd": kernel.forward, "_flash_attn_bwd": kernel.backward}


def install() -> None:
    """Puts both in place; raises RuntimeError, and changes nothing, where `why_not` says why."""
    if why := why_not():
        raise RuntimeError(why)
    for name, function in functions().items():
        setattr(sys.modules["flash_attn.cute.interface"], name, function)
