"""What is measured at a sampled step.

`probes` measure in attention calls, `weights` in the weights, and `run` takes what the loop knows.
`plan` knows which of them the wanted indicators need. `metric` batches their results over calls and
ranks. `measurement` leads all of them through a sampled step. `burst` looks at the heads that a
rule has named at every step for a while.
"""

from guardbit.monitor.measure.burst import Burst
from guardbit.monitor.measure.measurement import Measurement, NoAttentionSeenError, Sent, largest

__all__ = ["Burst", "Measurement", "NoAttentionSeenError", "Sent", "largest"]
