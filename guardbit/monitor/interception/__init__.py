"""Routes the attention calls of instrumented models through GuardBit's op.

`F.scaled_dot_product_attention` is replaced for the whole process while at least one model is
instrumented; outside instrumented modules the replacement hands every call straight to PyTorch.
Which module a call belongs to is told by a stack that forward hooks keep. All of it is ordinary
traceable Python: under `torch.compile(fullgraph=True)` it is inlined and leaves only the op.

Numbers of sites travel as 0-d CPU tensors, because a compiler would specialise on plain numbers
and compile every layer anew.

From the bottom up; each file imports from those before it only:

- `frames`: the instrumented modules, and the stack of those that are running.
- `calls`: what the calls of a site did in the latest step.
- `sharding`: whether ranks share the heads of a module.
- `inputs`: what a module's inputs look like, and others like them.
- `doors`: the guard of all that runs inside a model's forward.
- `records`: what was learned about each site, from eager calls and from traced ones.
- `rerunning`: running a module once more, to see where its queries come from.
- `tracing`: learning from a compiler; the calls it traces do not come back to Python.
- `watching`: attention that is watched and not switched.
- `entry_points`: the functions that people call for attention, one file each; which calls are
  refused, and what the others ask for.
- `observing`: attention that GuardBit does not know, and its own code shows.
- `checkpointing`: what stands in for PyTorch's activation checkpointing.
- `compiler_rules`: what a compiler takes for PyTorch's functions.
- `installation`: putting what stands in for functions in everyone's hands, and taking it back.
- `hooks`: keeping the stack, by hooks on each instrumented module.
"""

from guardbit.monitor.interception.calls import StepCalls
from guardbit.monitor.interception.doors import listeners
from guardbit.monitor.interception.frames import entries
from guardbit.monitor.interception.hooks import attach, detach, is_attached
from guardbit.monitor.interception.installation import install, left_alone, release, restore
from guardbit.monitor.interception.observing import OBSERVE
from guardbit.monitor.interception.records import SiteRecord, parts, ran, site_record
from guardbit.monitor.interception.rerunning import rerun

__all__ = [
    "OBSERVE",
    "SiteRecord",
    "StepCalls",
    "attach",
    "detach",
    "entries",
    "install",
    "is_attached",
    "left_alone",
    "listeners",
    "parts",
    "ran",
    "release",
    "rerun",
    "restore",
    "site_record",
]
