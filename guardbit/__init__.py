"""GuardBit watches every attention head of a low-precision training run.

It sees the rounding bias of low-precision flash attention build up long before the loss moves, and
swaps a stabilized kernel in for the affected heads in the middle of the run.

Everything is imported when it is first used, so reading telemetry never loads torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from guardbit.callbacks.huggingface import HuggingFaceMonitor
    from guardbit.callbacks.monitoring import AttentionMonitor
    from guardbit.callbacks.stabilizing import AutoStabilizer
    from guardbit.catalog import INDICATORS
    from guardbit.dashboards.loading import load
    from guardbit.kernels.attention import flash_attention
    from guardbit.monitor.interception.observing import observe, watch_attention
    from guardbit.monitor.layouts import LayoutUnavailable
    from guardbit.monitor.policy import Policy
    from guardbit.monitor.session import MonitorSession
    from guardbit.monitor.sites import Instrumentation, Site, instrument
    from guardbit.records import STABILIZERS
    from guardbit.store import read_events, read_metadata, read_run

__all__ = [
    "INDICATORS",
    "STABILIZERS",
    "AttentionMonitor",
    "AutoStabilizer",
    "HuggingFaceMonitor",
    "Instrumentation",
    "LayoutUnavailable",
    "MonitorSession",
    "Policy",
    "Site",
    "flash_attention",
    "instrument",
    "load",
    "observe",
    "read_events",
    "read_metadata",
    "read_run",
    "watch_attention",
]

_HOMES = {
    "INDICATORS": "guardbit.catalog",
    "STABILIZERS": "guardbit.records",
    "AttentionMonitor": "guardbit.callbacks.monitoring",
    "AutoStabilizer": "guardbit.callbacks.stabilizing",
    "HuggingFaceMonitor": "guardbit.callbacks.huggingface",
    "Instrumentation": "guardbit.monitor.sites",
    "LayoutUnavailable": "guardbit.monitor.layouts",
    "MonitorSession": "guardbit.monitor.session",
    "Policy": "guardbit.monitor.policy",
    "Site": "guardbit.monitor.sites",
    "flash_attention": "guardbit.kernels.attention",
    "instrument": "guardbit.monitor.sites",
    "load": "guardbit.dashboards.loading",
    "observe": "guardbit.monitor.interception.observing",
    "read_events": "guardbit.store",
    "read_metadata": "guardbit.store",
    "read_run": "guardbit.store",
    "watch_attention": "guardbit.monitor.interception.observing",
}


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib.metadata import version

        return version("guardbit")
    if name not in _HOMES:
        raise AttributeError(f"module 'guardbit' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
