"""`guardbit live`: a run as a page in the browser while it goes on."""

from guardbit.dashboards.live.server import LiveServer
from guardbit.dashboards.live.watcher import RunWatcher

__all__ = ["LiveServer", "RunWatcher"]
