"""Routes the attention calls of instrumented models through GuardBit's op.

`F.scaled_dot_product_attention` is replaced for the whole process while at least one model is
instrumented; outside instrumented modules the replacement hands every call straight to PyTorch.
Forward hooks keep a stack of the running modules; the innermost one owns a call.
"""

from guardbit.monitor.interception.frames import of_call
from guardbit.monitor.interception.installation import left_alone, replaced
from guardbit.monitor.interception.seen import OutsideCalls, StepCalls, ran, unchanged
