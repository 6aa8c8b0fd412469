"""Engines, the ways to compute attention, and which of them serves a call.

An engine runs a forward, and a backward from a given O', with the arguments that the original
function would pass to its kernels, so that results are equal bit for bit.
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
    AutogradEngine,
    choose,
    engine_of,
    scaled_dot_product_attention,
)
