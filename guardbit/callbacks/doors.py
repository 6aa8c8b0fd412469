"""The guard around the frameworks' events: an error stays in its session and is reported once."""

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
    """Wraps a method so that a framework may call it: without a session it does nothing."""

    @functools.wraps(event)
    def door(self: _HasSession, *args: Any, **kwargs: Any) -> None:
        session = self.session
        if session is not None:
            session.always("callback", lambda: event(self, *args, **kwargs))

    return door


def watched(strict: bool, make: Callable[[], MonitorSession]) -> MonitorSession | None:
    """Makes a session; returns None, with a warning, if the run has to go on without one.

    That happens if GuardBit would see none of the model's attention, or after an error of its own.

    Raises:
        ValueError: If a setting is wrong.
        TypeError: If a setting has the wrong type.
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
