"""Routes the attention calls of instrumented models through GuardBit's op.

`F.scaled_dot_product_attention` is replaced for the whole process while at least one model is
instrumented; outside instrumented modules the replacement hands every call straight to PyTorch.
Forward hooks keep a stack of the running modules; the innermost one owns a call. All of it is
ordinary traceable Python: `torch.compile(fullgraph=True)` inlines it and leaves only the op.

A site's number travels as a 0-d CPU tensor. A compiler would specialise on a plain number and
compile every layer anew.

From the bottom up; each file imports from those before it only:

- `frames`: the instrumented modules, and the stack of those that are running.
- `sharding`: whether ranks share the heads of a module.
- `references`: puts functions in place of others wherever something refers to them.
- `rerunning`: runs a module once more, to see where its queries come from.
- `errors`: the guard around everything that runs inside a model's forward.
- `seen`: what is known of each site, from eager calls and from those that a compiler traces.
- `watching`: attention that is watched but cannot be switched.
- `entry_points`: the functions that people call for attention. Each says which calls it refuses,
  and what the others ask for.
- `observing`: attention unknown to GuardBit, shown to it by `observe` or `watch_attention`.
- `installation`: puts the stand-ins in place of the functions, and takes them back.
- `hooks`: the hooks on each instrumented module, which keep the stack.
"""

from guardbit.monitor.interception.errors import listeners, recorders, unlisten
from guardbit.monitor.interception.hooks import attach, detach, is_attached
from guardbit.monitor.interception.installation import (
    install,
    left_alone,
    replaced,
    restore,
    uninstall,
)
from guardbit.monitor.interception.observing import OBSERVE
from guardbit.monitor.interception.rerunning import rerun
from guardbit.monitor.interception.seen import (
    OutsideCalls,
    SiteRecord,
    StepCalls,
    parts,
    ran,
    site_record,
)

__all__ = [
    "OBSERVE",
    "OutsideCalls",
    "SiteRecord",
    "StepCalls",
    "attach",
    "detach",
    "install",
    "is_attached",
    "left_alone",
    "listeners",
    "parts",
    "ran",
    "recorders",
    "replaced",
    "rerun",
    "restore",
    "site_record",
    "uninstall",
    "unlisten",
]
