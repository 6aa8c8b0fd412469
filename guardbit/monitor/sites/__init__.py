"""The attention modules (sites) of a model, and the switch of their heads."""

from guardbit.monitor.sites.instrumentation import Instrumentation, checked_heads, instrument
from guardbit.monitor.sites.site import Site, kernel_of, metadata_of

__all__ = ["Instrumentation", "Site", "checked_heads", "instrument", "kernel_of", "metadata_of"]
