"""The web server behind the live pages: this machine only, nothing but the numbers of runs.

What is served is a fixed list of addresses: the pages, their files, and a few questions about runs
that are answered as JSON; runs are numbered. No address names a file of a run or of anything else.
All of them begin with a token that only the person who started the server knows, so that other
people on the machine and other pages in the browser cannot read along; requests that name another
host are refused, which is what a page uses that has pointed its own name at this machine (DNS
rebinding).
"""

from __future__ import annotations

import json
import secrets
import socket
from collections.abc import Callable, Sequence
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Mount, Route

from guardbit.dashboards.live.runs import LiveRun, LiveRuns
from guardbit.dashboards.page import asset

HOST = "127.0.0.1"
#: Names this machine has for itself; through an SSH tunnel the browser uses one of them too.
ALLOWED_HOSTS = (HOST, "localhost")

_TYPES = {".html": "text/html", ".js": "text/javascript", ".css": "text/css"}
_SHARED = ("page.css", "theme.css", "charts.js", "live.js", "uPlot.iife.min.js", "uPlot.min.css")
#: Files of a run's page, the page itself first, and of the list of runs.
ASSETS = ("page.html", "page.js", *_SHARED)
LIST_ASSETS = ("list.html", "list.js", *_SHARED)
#: The page runs its own scripts only, talks to this server only, and stands in no frame.
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; connect-src 'self'; "
    "style-src 'self' 'unsafe-inline'; img-src 'self' data:; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "Cache-Control": "no-store",
}


_REFUSAL = "Not found. The address ends in a token and a slash, and is new after every start."


class LiveServer:
    """Serves a run's live page, or a list of runs with a page of each, on 127.0.0.1."""

    def __init__(self, runs: LiveRuns, *, port: int = 0) -> None:
        self._runs = runs
        self._socket = socket.socket()
        # A port that an earlier server has just left is free.
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            self._socket.bind((HOST, port))
            # From here on the address works: who asks early waits until `run` answers.
            self._socket.listen()
        except OSError as error:
            self._socket.close()
            why = f"cannot listen on {HOST}, port {port}: {error.strerror}"
            raise OSError(why) from None
        self.port: int = self._socket.getsockname()[1]
        token = secrets.token_urlsafe(18)
        self.address = f"http://{HOST}:{self.port}/{token}/"
        config = uvicorn.Config(
            application(runs, token),
            log_level="error",
            access_log=False,
            server_header=False,
            headers=list(HEADERS.items()),
            loop="asyncio",
            http="h11",
            ws="none",
        )
        self._server = uvicorn.Server(config)

    def run(self) -> None:
        """Serves until interrupted (Ctrl-C), or until `stop`."""
        self._runs.start()
        try:
            self._server.run(sockets=[self._socket])
        except KeyboardInterrupt:
            pass
        finally:
            self._runs.stop()
            self._socket.close()

    def stop(self) -> None:
        """Ends `run`, which may be in another thread."""
        self._server.should_exit = True


def application(runs: LiveRuns, token: str) -> Starlette:
    """The application: a fixed list of addresses below the token."""
    routes = _routes_of_a_list(runs) if runs.is_list else _routes_of_a_run(lambda _: runs.opened())
    hosts = Middleware(TrustedHostMiddleware, allowed_hosts=list(ALLOWED_HOSTS), www_redirect=False)
    refusals = {LookupError: _refused(404), ValueError: _refused(400), 404: _not_found}
    below = Mount(f"/{token}", routes=routes)
    served = Starlette(routes=[below], middleware=[hosts], exception_handlers=refusals)
    served.router.redirect_slashes = False
    return served


def _routes_of_a_run(run: Callable[[Request], LiveRun]) -> list[BaseRoute]:
    """The page of a run, and what it asks."""

    def state(request: Request) -> Response:
        step = _whole(request, "step")
        return _json(run(request).state(_whole(request, "since"), None if step < 0 else step))

    def head(request: Request) -> Response:
        return _json(run(request).head(_whole(request, "layer"), _whole(request, "head")))

    def curves(request: Request) -> Response:
        return _json(run(request).curves(request.query_params.get("indicator", "")))

    answers = {"/state": state, "/head": head, "/curves": curves}
    return [*_assets(ASSETS), *(Route(path, answer) for path, answer in answers.items())]


def _routes_of_a_list(runs: LiveRuns) -> list[BaseRoute]:
    """The list of runs, what it asks, and below it the page of each run."""

    def overlay(request: Request) -> Response:
        named = [part for part in request.query_params.get("runs", "").split(",") if part]
        if not all(part.isdecimal() and len(part) < 10 for part in named):
            raise ValueError("runs must be whole numbers with commas between them")
        return _json(runs.overlay([int(part) for part in named]))

    def opened(request: Request) -> LiveRun:
        return runs.opened(int(request.path_params["number"]))

    return [
        *_assets(LIST_ASSETS),
        Route("/runs", lambda _: _json(runs.rows())),
        Route("/overlay", overlay),
        Mount("/run/{number:int}", routes=_routes_of_a_run(opened)),
    ]


def _assets(names: Sequence[str]) -> list[Route]:
    """The files of a page; the first stands for the page itself."""

    def route(name: str) -> Route:
        content, kind = asset(name), _TYPES[name[name.rindex(".") :]]
        path = "/" if name == names[0] else f"/{name}"
        return Route(path, lambda _: Response(content, media_type=f"{kind}; charset=utf-8"))

    return [route(name) for name in names]


def _json(content: dict[str, Any]) -> Response:
    text = json.dumps(content, separators=(",", ":"), allow_nan=False)
    return Response(text, media_type="application/json")


def _not_found(request: Request, error: Exception) -> Response:
    return Response(_REFUSAL, status_code=404, media_type="text/plain")


def _refused(status: int) -> Callable[[Request, Exception], Response]:
    return lambda request, error: Response(str(error), status_code=status, media_type="text/plain")


def _whole(request: Request, name: str) -> int:
    value = request.query_params.get(name) or "-1"
    try:
        return int(value)
    except ValueError:
        raise ValueError(f"{name} must be a whole number, got {value[:40]!r}") from None
