"""GuardBit watches every attention head of a low-precision training run.

It sees the rounding bias of low-precision flash attention build up long before the loss moves, and
swaps a stabilized kernel in for the affected heads in the middle of the run.

Everything is imported when it is first used, so reading telemetry never loads torch.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # "as" tells type checkers that a name may be used from here
    from guardbit.callbacks.huggingface import HuggingFaceMonitor as HuggingFaceMonitor
    from guardbit.callbacks.monitoring import AttentionMonitor as AttentionMonitor
    from guardbit.callbacks.monitoring import AutoStabilizer as AutoStabilizer
    from guardbit.callbacks.plain_loop import MonitorSession as MonitorSession
    from guardbit.catalog import INDICATORS as INDICATORS
    from guardbit.cli import load as load
    from guardbit.kernels.attention import flash_attention as flash_attention
    from guardbit.monitor.interception.observing import observe as observe
    from guardbit.monitor.layouts import LayoutUnavailable as LayoutUnavailable
    from guardbit.monitor.nonfinite import locate_nonfinite as locate_nonfinite
    from guardbit.monitor.policy import Policy as Policy
    from guardbit.monitor.sites import Instrumentation as Instrumentation
    from guardbit.monitor.sites import Site as Site
    from guardbit.monitor.sites import instrument as instrument
    from guardbit.records import STABILIZERS as STABILIZERS
    from guardbit.store import read_events as read_events
    from guardbit.store import read_metadata as read_metadata
    from guardbit.store import read_run as read_run

# Name -> the module that has it.
_HOMES = {
    "INDICATORS": "guardbit.catalog",
    "STABILIZERS": "guardbit.records",
    "AttentionMonitor": "guardbit.callbacks.monitoring",
    "AutoStabilizer": "guardbit.callbacks.monitoring",
    "HuggingFaceMonitor": "guardbit.callbacks.huggingface",
    "Instrumentation": "guardbit.monitor.sites",
    "LayoutUnavailable": "guardbit.monitor.layouts",
    "MonitorSession": "guardbit.callbacks.plain_loop",
    "Policy": "guardbit.monitor.policy",
    "Site": "guardbit.monitor.sites",
    "flash_attention": "guardbit.kernels.attention",
    "instrument": "guardbit.monitor.sites",
    "load": "guardbit.cli",
    "locate_nonfinite": "guardbit.monitor.nonfinite",
    "observe": "guardbit.monitor.interception.observing",
    "read_events": "guardbit.store",
    "read_metadata": "guardbit.store",
    "read_run": "guardbit.store",
}

__all__ = [*_HOMES]  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib.metadata import version

        return version("guardbit")
    if name not in _HOMES:
        raise AttributeError(f"module 'guardbit' has no attribute {name!r}")
    try:
        return getattr(importlib.import_module(_HOMES[name]), name)
    except ModuleNotFoundError as error:
        package = str(error.name).partition(".")[0]
        error.msg = f"guardbit.{name} needs {package}: pip install {package}"
        raise


def __dir__() -> list[str]:
    return sorted(__all__)
