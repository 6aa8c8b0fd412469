"""What is measured at a sampled step: probes, a plan of them, and what they have in common.

A probe is one file for what is measured together: `weights`, `rows`, `delta`, `gradient_audit`,
`keys` and `run`. `probes` defines the probes of attention calls. `plan` knows which probes the
wanted indicators need. `metric` batches their results over calls and ranks. `measurement` leads all
of them through a sampled step.
"""

from guardbit.monitor.measure.measurement import (
    Measurement,
    NoAttentionSeenError,
    Sent,
    largest,
)

__all__ = ["Measurement", "NoAttentionSeenError", "Sent", "largest"]
