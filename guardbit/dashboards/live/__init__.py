"""`guardbit live`: runs as pages in the browser while they go on."""

from guardbit.dashboards.live.run_list import RunList
from guardbit.dashboards.live.server import LiveServer
from guardbit.dashboards.live.watcher import RunWatcher
from guardbit.dashboards.live.webhook import Webhook

__all__ = ["LiveServer", "RunList", "RunWatcher", "Webhook"]
