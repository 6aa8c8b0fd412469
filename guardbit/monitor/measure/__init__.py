"""What is measured at a sampled step.

`probes` measure in attention calls, `weights` in the weights. `metric` batches the results of
probes over calls and ranks. `measurement` leads all of them through a sampled step, and takes what
the loop knows. `burst` looks at the heads that a rule has named at every step for a while.
"""

from guardbit.monitor.measure.burst import Burst
from guardbit.monitor.measure.measurement import Measurement, NoAttentionSeenError, Sent, largest

__all__ = ["Burst", "Measurement", "NoAttentionSeenError", "Sent", "largest"]
