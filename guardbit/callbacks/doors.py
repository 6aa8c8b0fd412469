"""The guard of the frameworks' events: an error stays in its session, and is reported once."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Protocol

from guardbit.monitor.session import MonitorSession
from guardbit.monitor.stages import log
from guardbit.monitor.unseen import UnseenAttentionError


class _HasSession(Protocol):
    session: MonitorSession | None


def guarded(event: Callable[..., None]) -> Callable[..., None]:
    """Makes a method one that a framework may call: without a session, or an error, nothing."""

    @functools.wraps(event)
    def door(self: _HasSession, *args: Any, **kwargs: Any) -> None:
        session = self.session
        if session is not None:
            session.always("callback", lambda: event(self, *args, **kwargs))

    return door


def watched(strict: bool, make: Callable[[], MonitorSession]) -> MonitorSession | None:
    """Makes a session; returns None, and says so, where the run has to go on without one.

    That is where none of the model's attention would be seen, and after a fault of GuardBit's own.

    Raises:
        ValueError: If a setting is wrong.
        TypeError: The same.
    """
    try:
        return make()
    except UnseenAttentionError as error:
        if strict:
            raise
        log.warning("GuardBit does not watch this run, which goes on without it: %s", error)
        return None
    except (ValueError, TypeError):
        raise
    except Exception:
        if strict:
            raise
        log.warning(
            "GuardBit could not be set up: the run goes on, UNWATCHED and unguarded", exc_info=True
        )
        return None
