"""The live page: follows runs, and serves their pages on this machine only.

A fixed list of addresses is served, none of which names a file. All begin with a token that only
the person who started the server knows; requests that name another host are refused, as they come
from a page that has pointed its own name at this machine (DNS rebinding).
"""

import json
import logging
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.datastructures import QueryParams
from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response
from starlette.routing import BaseRoute, Mount, Route

from guardbit.dashboards.document import last_loss
from guardbit.dashboards.loading import read_diagnosed
from guardbit.dashboards.page import OVERLAYS, Json, RunPage, rendered, source_of_script
from guardbit.dashboards.tables import RunSoFar, events_of, marked
from guardbit.judgement import Ended
from guardbit.records import Event
from guardbit.store import RunFollower, folder_of_run, is_run, read_events, runs_below
from guardbit.store.files import names_of_runs

log = logging.getLogger("guardbit")

#: Between two looks at a run's folder, and two searches for new runs.
LOOK_SECONDS = 1.0
SEARCH_SECONDS = 10.0
#: Between two updates of a page while a long run is read.
UPDATE_SECONDS = 1.0
#: Seconds without anything new after which a run does not count as running, as in the pages.
SILENT_SECONDS = 120.0
#: Steps that a page resolves, even.
BUCKETS = 400

HOST = "127.0.0.1"
#: Names this machine has for itself; through an SSH tunnel the browser uses one of them too.
ALLOWED_HOSTS = (HOST, "localhost")

#: The page runs its own scripts only, talks to this server only, and stands in no frame.
HEADERS = {
    "Content-Security-Policy": f"default-src 'none'; script-src {source_of_script('page.html')} "
    f"{source_of_script('list.html')}; connect-src 'self'; style-src 'unsafe-inline'; "
    "img-src data:; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "Cache-Control": "no-store",
}
_REFUSAL = "Not found. The address ends in a token and a slash, and is new after every start."

Question = Callable[["LiveRun", QueryParams], Any]
Answer = Callable[[Request], Response]


class LiveRun:
    """Follows one run, which need not have written anything yet."""

    def __init__(self, path: str | Path, name: str = "", *, is_open: bool = True) -> None:
        self.path = Path(path)
        self._place = name or names_of_runs([self.path])[0]
        self.problem = ""  # why it cannot be read
        self.is_open = is_open  # whether its page is wanted, and not its judgement alone
        self.looked_at = 0.0
        self.lock = threading.RLock()
        self._changed: int | None = None
        self._alarms: list[Event] = []
        self._follower = RunFollower(self.path)
        self._run = RunSoFar(BUCKETS)
        self.page = RunPage(self._run)
        self._judged: Json = {}  # once its samples were read
        self._event_files: tuple[str, ...] | None = ()  # that were read
        self._is_reading = False
        # A run that is over keeps no samples once it was judged: a long list needs little memory.
        self._is_forgotten = False

    def look(self) -> None:
        """Reads what is new."""
        self.looked_at, before = time.monotonic(), self._changed
        try:
            self._changed = os.stat(folder_of_run(self.path)).st_mtime_ns
        except FileNotFoundError:
            if before is not None:
                raise
        if not self.is_open and self._changed == before and self._ended == self._run.ended:
            return
        if self._is_forgotten:
            self._follower, self._is_forgotten = RunFollower(self.path), False
            self._event_files = None
        if self._follower.look():
            self._event_files = None  # a resumed run does some steps again: their events go
            with self.lock:
                self._run.forget_samples()
        has_changed = self._read_samples()
        diagnosed = read_diagnosed(folder_of_run(self.path))
        about = self._follower.metadata, self._ended, diagnosed
        run = self._run
        has_changed |= (run.metadata, run.ended, run.diagnosed) != about
        run.diagnosed = diagnosed
        try:
            files = self._follower.event_files()
            if files != self._event_files:
                events = events_of(read_events(self.path))
                with self.lock:
                    self._run.events = events
                    self._alarms = [event for event, mark in marked(events) if mark == "alarm"]
                self._event_files, has_changed = files, True
        finally:
            # Samples are shown whatever is wrong with the events.
            if has_changed:
                self._update_state()
            if not self.is_open and self._ended:
                with self.lock:
                    self._is_forgotten = True
                    self._run.forget_samples()

    def state(self, since: int = -1) -> Json:
        """Returns the page's state, or only the run's status if nothing changed since a version."""
        if since == self.page.state["version"]:
            return {"version": since, "status": self._status()}
        main = self.page.main(self.name, is_part=True)
        return {**self.page.state, "main": main, "status": self._status()}

    def largest(self) -> Json:
        with self.lock:
            return {"name": self.name, **self.page.largest()}

    def row(self) -> Json:
        """Returns the run's row in the list; with a headline once its samples were read."""
        return {
            "name": self.name,
            "end": self._follower.end,
            "seconds_silent": self._seconds_silent() or 0.0,
            "last_step": self.page.state["last_step"],
            "problem": self.problem,
            "alarms": len(self._alarms),
            "first_alarm": asdict(self._alarms[0]) if self._alarms else None,
            **self._judged,
        }

    @property
    def name(self) -> str:
        """What its tracker calls it, and its folder."""
        called = self._follower.metadata.get("name")
        return f"{called} ({self._place})" if called else self._place

    @property
    def _ended(self) -> Ended | None:
        """How the run ended, None while it goes on; a silent one was killed."""
        is_silent = (self._seconds_silent() or 0.0) > SILENT_SECONDS
        return self._follower.end or ("not closed" if is_silent else None)

    def _read_samples(self) -> bool:
        has_changed = False
        updated = time.monotonic()
        self._is_reading = True
        try:
            for batch in self._follower.batches():
                with self.lock:
                    self._run.take(batch.to_pandas())
                has_changed = True
                if time.monotonic() - updated > UPDATE_SECONDS:
                    self._update_state()
                    updated = time.monotonic()
            for batch in self._follower.batches("modules"):
                with self.lock:
                    self._run.take_modules(batch.to_pandas())
                has_changed = True
        finally:
            self._is_reading = False
        return has_changed

    def _update_state(self) -> None:
        with self.lock:
            run = self._run
            run.metadata, run.ended = self._follower.metadata, self._ended
            self.page.update_state()
            if run.evidence.steps is not None:
                found = run.judgement
                self._judged = {
                    "headline": found.headline if run.ended else found.headline_running,
                    "outcome": found.state,
                    "loss": last_loss(run.last_losses),
                    "losses": self.page.losses(),
                }

    def _seconds_silent(self) -> float | None:
        written = self._follower.last_written
        return None if written is None else max(time.time() - written, 0.0)

    def _status(self) -> Json:
        return {
            "folder": str(self.path),
            "samples": self._run.evidence.steps is not None,
            "seconds_silent": self._seconds_silent(),
            "is_reading": self._is_reading,
            # As the headline has it: what the follower knows, the next state shows.
            "end": None if self._run.ended == "not closed" else self._run.ended,
            "problem": self.problem,
        }


class LiveRuns:
    """Follows the run of a folder, or all runs that it holds, in a thread of its own."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        is_one = not self.folder.is_dir() or is_run(folder_of_run(self.folder))
        self.is_list = not is_one and bool(runs_below(self.folder))
        self._runs: list[LiveRun] = [] if self.is_list else [LiveRun(self.folder)]
        self._searched: float | None = None
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="guardbit-live", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join(timeout=5)

    def look(self) -> None:
        """Reads what is new of the open runs, and then for some time of the others, in turn."""
        until: float | None = None
        since = time.monotonic() - (self._searched or -SEARCH_SECONDS)
        if self.is_list and since >= SEARCH_SECONDS:
            known = {run.path for run in self._runs}
            new = [path for path in runs_below(self.folder) if path not in known]
            names = [str(path.relative_to(self.folder)) for path in new]
            self._runs += map(partial(LiveRun, is_open=False), new, names)
            self._searched = time.monotonic()
        for run in sorted(self._runs, key=lambda run: (not run.is_open, run.looked_at)):
            if not run.is_open:
                until = until or time.monotonic() + LOOK_SECONDS
                if time.monotonic() > until:
                    break
            try:
                run.look()
                run.problem = ""
            # One broken run must not hide the others, and the page must survive a lost folder.
            except Exception as error:
                problem = str(error) or type(error).__name__
                if problem != run.problem:
                    log.warning("cannot read %s: %r", run.path, error)
                run.problem = problem

    def rows(self) -> Json:
        rows = [{"id": number, **run.row()} for number, run in enumerate(list(self._runs))]
        return {"folder": str(self.folder), "runs": rows}

    def opened(self, number: int = 0) -> LiveRun:
        """Returns a run, whose samples are kept from now on."""
        if not 0 <= number < len(self._runs):
            raise LookupError(f"there is no run {number} in the list")
        self._runs[number].is_open = True
        return self._runs[number]

    def overlay(self, numbers: Sequence[int]) -> Json:
        return {"runs": [{"id": number, **self.opened(number).largest()} for number in numbers]}

    def _follow(self) -> None:
        said = ""
        while not self._stop.is_set():
            try:
                self.look()
            # The list must survive a lost folder.
            except Exception as error:
                if repr(error) != said:
                    log.warning("cannot look for runs in %s: %s", self.folder, repr(error))
            self._stop.wait(LOOK_SECONDS)


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

    def of_run(question: Question, respond: Callable[[Any], Response] = _json_response) -> Answer:
        # The only run of a page has no number in its address.
        def answer(request: Request) -> Response:
            run = runs.opened(request.path_params.get("number", 0))
            with run.lock:
                return respond(question(run, request.query_params))

        return answer

    def overlay(request: Request) -> Response:
        named = request.query_params.get("runs", "").split(",")
        return _json_response(runs.overlay([int(part) for part in named if part]))

    routes: list[BaseRoute] = [
        Route("/", of_run(lambda run, _: run.page.main(run.name), HTMLResponse))
    ]
    routes += [Route(f"/{name}", of_run(question)) for name, question in QUESTIONS.items()]
    if runs.is_list:
        routes = [
            Route("/", lambda _: HTMLResponse(rendered("list.html", overlays=OVERLAYS))),
            Route("/runs", lambda _: _json_response(runs.rows())),
            Route("/overlay", overlay),
            Mount("/run/{number:int}", routes=routes),
        ]
    hosts = Middleware(TrustedHostMiddleware, allowed_hosts=list(ALLOWED_HOSTS), www_redirect=False)
    refusals = {LookupError: _refused(404), ValueError: _refused(400), 404: _refused(404, _REFUSAL)}
    below = Mount(f"/{token}", routes=routes)
    served = Starlette(routes=[below], middleware=[hosts], exception_handlers=refusals)
    served.router.redirect_slashes = False
    return served


#: What the page of a run asks.
QUESTIONS: dict[str, Question] = {
    "state": lambda run, asked: run.state(int(asked.get("since", -1))),
    "map": lambda run, asked: run.page.map_at(int(asked.get("step", -1))),
    "head": lambda run, asked: run.page.head(
        int(asked.get("layer", -1)), int(asked.get("head", -1))
    ),
    "curves": lambda run, asked: run.page.curves(asked.get("indicator", "")),
}


def _json_response(content: Json) -> Response:
    text = json.dumps(content, separators=(",", ":"), allow_nan=False)
    return Response(text, media_type="application/json")


def _refused(status: int, why: str = "") -> Callable[[Request, Exception], Response]:
    return lambda request, error: Response(why or str(error), status, media_type="text/plain")
