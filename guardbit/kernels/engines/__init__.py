"""Engines, the ways to compute attention, and which of them serves a call.

An engine runs a forward, and a backward from a given O'. It calls PyTorch's or a library's own
kernel with the arguments that the original function would pass, so its results equal that
function's, bit for bit. `proof` tests whether the backward reads O for delta only; if not, the
engine gets no O'.
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
