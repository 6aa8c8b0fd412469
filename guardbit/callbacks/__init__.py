"""Lightning events in, calls of the monitoring session out; one file a callback."""

from guardbit.callbacks.monitoring import AttentionMonitor
from guardbit.callbacks.stabilizing import AutoStabilizer

__all__ = ["AttentionMonitor", "AutoStabilizer"]
