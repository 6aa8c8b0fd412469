"""What is measured at a sampled step.

`probes` measure in attention calls, `weights` in the weights. `measurement` leads them through a
sampled step, adds up over calls and ranks, and takes what the loop knows. `burst` looks at the
heads that a rule has named at every step for a while.
"""

from guardbit.monitor.measure.burst import Burst
from guardbit.monitor.measure.measurement import Measurement, Sent, Transfer, is_number, largest
