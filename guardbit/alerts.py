"""Tells people of alarms and of the end of a run, and disturbs nothing whatever becomes of that."""

import json
import logging
import os
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait

from guardbit.records import Alarm, Event, line_of, printable

log = logging.getLogger("guardbit")

#: Environment variable that holds the address of a webhook for each run.
VARIABLE = "GUARDBIT_WEBHOOK"
WEBHOOK_TIMEOUT_SECONDS = 10.0
MOST_CHARACTERS = 600


class Webhook:
    """Posts lines as Slack or Discord takes them, one JSON object each, from a thread of its own.

    The first that fails is logged, and the next is tried all the same. A request without a message
    tries the address at once, because the first message may be the end of the run.
    """

    def __init__(self, url: str) -> None:
        parts = urllib.parse.urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"the webhook is {url!r}; it must be like https://host/path")
        self._url = url
        self._host = parts.hostname
        # Discord takes what Slack takes, too, at an address that says so.
        is_discord = f".{self._host}".endswith((".discord.com", ".discordapp.com"))
        self._field = "content" if is_discord and not parts.path.endswith("/slack") else "text"
        self._thread = ThreadPoolExecutor(1, "guardbit-webhook")
        self._is_failing = False
        self._thread.submit(self._post, None)

    def tell(self, name: str, alarms: Sequence[Alarm | Event]) -> None:
        """Sends a line about new alarms of a run; returns at once."""
        self.send(message(name, alarms))

    def end(self, name: str, how: str, headline: str) -> None:
        """Sends how a run ended, and waits a moment for what is still to be sent."""
        self.send(printable(f"GuardBit: run {how}. {headline}; {name}"))
        self.close()

    def send(self, text: str) -> Future[None]:
        """Sends a text; returns at once."""
        return self._thread.submit(self._post, text[:MOST_CHARACTERS])

    def close(self) -> None:
        """Waits until all is sent, or for `WEBHOOK_TIMEOUT_SECONDS`; nothing is sent any more."""
        wait([self._thread.submit(int)], WEBHOOK_TIMEOUT_SECONDS)
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _post(self, text: str | None) -> None:
        """Posts a text; None only asks whether somebody answers, with whatever status."""
        # Discord refuses the name that urllib gives itself.
        headers = {"Content-Type": "application/json", "User-Agent": "GuardBit"}
        content = None if text is None else json.dumps({self._field: text}).encode()
        request = urllib.request.Request(self._url, content, headers)  # with content it is a POST
        try:
            urllib.request.urlopen(request, timeout=WEBHOOK_TIMEOUT_SECONDS).close()
            self._is_failing = False
        # Whatever happens here is no reason to disturb anybody.
        except Exception as error:
            if text is None and isinstance(error, urllib.error.HTTPError):
                return
            if not self._is_failing:
                what = "does not answer" if text is None else "did not take a message"
                # Not the whole address: it is a secret of whoever may post there.
                log.warning("the webhook at %s %s: %r", self._host, what, error)
            self._is_failing = True


def webhook_of_run() -> Webhook | None:
    """The webhook that the environment names, if it names one."""
    url = os.environ.get(VARIABLE)
    try:
        return Webhook(url) if url else None
    except ValueError:  # which quotes the address, mostly a secret
        log.warning("%s is no address like https://host/path: it gets no alarms", VARIABLE)
        return None


def message(name: str, alarms: Sequence[Alarm | Event]) -> str:
    """One line about new alarms of a run."""
    first, *others = alarms
    more = f" (and {len(others)} more)" if others else ""
    return f"{line_of(first)}{more}; {printable(name)}"
