"""Streaming rules that turn the telemetry of attention heads into alarms.

A rule compares a head with its own past and with its peers, and fires on growth only. They stand in
`guardbit.monitor.detectors.rules`, with their thresholds and the data that set them; `Detectors`
runs them.
"""

from guardbit.monitor.detectors import rules
from guardbit.monitor.detectors.detector import Detectors
from guardbit.monitor.detectors.rule import Finding, Rule, Snapshot, role_of

# Only the rules' folder defines which rules there are.
from guardbit.monitor.detectors.rules import *  # noqa: F403

__all__ = ["Detectors", "Finding", "Rule", "Snapshot", "role_of"]
__all__ += rules.__all__
