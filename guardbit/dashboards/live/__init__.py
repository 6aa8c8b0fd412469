"""`guardbit live`: runs as pages in the browser while they go on."""

from guardbit.dashboards.live.runs import LiveRun, LiveRuns
from guardbit.dashboards.live.server import LiveServer
from guardbit.dashboards.live.webhook import Webhook

__all__ = ["LiveRun", "LiveRuns", "LiveServer", "Webhook"]
