"""The attention modules (sites) of a model, and the switch of their heads.

inst = guardbit.instrument(model)        # before the first forward
...                                      # one ordinary training step
inst.sites                               # name of the module -> Site
inst.switch("h.2.attn", "compensated", heads=[3, 7])
inst.remove()

From the bottom up; each file imports from those before it only:

- `candidates`: which modules may call attention.
- `called`: a module in which attention is called, and what its calls were like.
- `weights`: its heads' rows of W_Q and W_K.
- `site`: what its heads run.
- `selecting`: choosing modules by name or pattern, and heads by number.
- `instrumentation`: routing a model's attention through GuardBit, switching it, and taking it back.
"""

from guardbit.monitor.sites.instrumentation import Instrumentation, instrument
from guardbit.monitor.sites.selecting import checked_heads
from guardbit.monitor.sites.site import Site

__all__ = ["Instrumentation", "Site", "checked_heads", "instrument"]
