"""`guardbit live`: runs as pages in the browser while they go on."""

from guardbit.dashboards.live.runs import LiveRun, LiveRuns
from guardbit.dashboards.live.server import LiveServer

__all__ = ["LiveRun", "LiveRuns", "LiveServer"]
