"""The attention modules (sites) of a model, and the switch of their heads.

inst = guardbit.instrument(model)        # before the first forward
...                                      # one ordinary training step
inst.sites                               # name of the module -> Site
inst.switch("h.2.attn", "compensated", heads=[3, 7])
inst.remove()
"""

from guardbit.monitor.sites.instrumentation import Instrumentation, checked_heads, instrument
from guardbit.monitor.sites.site import Site, kernel_of, metadata_of

__all__ = ["Instrumentation", "Site", "checked_heads", "instrument", "kernel_of", "metadata_of"]
