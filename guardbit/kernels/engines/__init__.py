"""Engines, the ways to compute attention: and the choice for a call.

An engine runs a forward, and runs its backward from a given O'. It calls PyTorch's or a library's
own kernel with its own arguments, so its results equal those of the original function bit for bit.
`proof` finds out whether the backward reads O for delta only; otherwise no O' is handed to it.
"""

from guardbit.kernels.engines.base import Drawn, Engine, Gradients, Inputs, state_bytes
from guardbit.kernels.engines.libraries import (
    LIBRARIES,
    SCHEDULING,
    LibraryEngine,
    home_of,
    hub_kernel_is_loaded,
    library_engine,
)
from guardbit.kernels.engines.sdpa import (
    Whole,
    choose,
    engine_of,
    scaled_dot_product_attention,
)

__all__ = [
    "LIBRARIES",
    "SCHEDULING",
    "Drawn",
    "Engine",
    "Gradients",
    "Inputs",
    "LibraryEngine",
    "Whole",
    "choose",
    "engine_of",
    "home_of",
    "hub_kernel_is_loaded",
    "library_engine",
    "scaled_dot_product_attention",
    "state_bytes",
]
