"""Keeps the live page open for its reader, whoever else on the machine connects to its port.

A connection needs no token: only a request does. So connections are few, those that ask nothing
give way to new ones, and a request has to arrive in good time.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

log = logging.getLogger("guardbit")

#: Connections open at a time; a browser holds six.
MOST_CONNECTIONS = 64
#: Seconds for a request to arrive, from the connection or from its first byte on.
REQUEST_SECONDS = 10.0

Context = dict[str, Any]


class PatientConnection(H11Protocol):
    """A connection that is closed if its request does not come, or if others need its place."""

    _deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Makes room by closing those that have waited longest."""
        waiting = [other for other in self.connections if _is_waiting(other)]
        crowd = len(self.connections) + 1 - MOST_CONNECTIONS
        if crowd > 0:
            _say_once(self.server_state)
            for other in sorted(waiting, key=_age)[:crowd]:
                self.connections.discard(other)
                other.transport.abort()
        super().connection_made(transport)
        self._since = self.loop.time()
        self._expect()
        if crowd > len(waiting):  # all others are being answered
            transport.abort()

    def data_received(self, data: bytes) -> None:
        """Takes in a part of a request."""
        super().data_received(data)
        if not _is_waiting(self):
            self._forget()
        elif self._deadline is None:
            self._expect()

    def connection_lost(self, exc: Exception | None) -> None:
        """Ends."""
        self._forget()
        super().connection_lost(exc)

    def _expect(self) -> None:
        self._deadline = self.loop.call_later(REQUEST_SECONDS, self.transport.abort)

    def _forget(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None


def _is_waiting(connection: Any) -> bool:
    """Whether no request of it is being answered."""
    return connection.cycle is None or connection.cycle.response_complete


def _age(connection: Any) -> float:
    return connection._since


def _say_once(server: Any) -> None:
    if not getattr(server, "is_crowded", False):
        server.is_crowded = True
        log.warning(
            "more than %d connections to the live page at once: those that ask nothing are closed",
            MOST_CONNECTIONS,
        )


def say_in_a_line() -> Callable[[asyncio.AbstractEventLoop, Context], None]:
    """An event loop's handler of errors that logs each kind once, in a line."""
    said: set[str] = set()

    def say(_: asyncio.AbstractEventLoop, context: Context) -> None:
        error = context.get("exception")
        what = f"{context['message']}: {error!r}" if error else context["message"]
        kind = f"{context['message'].partition('(')[0]} {type(error).__name__}"
        if kind not in said:
            said.add(kind)
            log.error("the live page's server: %s", what)

    return say
