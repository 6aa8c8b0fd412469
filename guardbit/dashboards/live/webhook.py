"""Sends alarms to a webhook, and disturbs nothing whatever becomes of that."""

from __future__ import annotations

import json
import logging
import queue
import threading
import urllib.parse
import urllib.request
from collections.abc import Sequence

from guardbit.records import Event, printable

log = logging.getLogger("guardbit")

#: Seconds that a webhook may take.
PATIENCE = 10.0
#: Characters of a message.
MOST_CHARACTERS = 600


class Webhook:
    """Posts one JSON object with a one-line `text` for the new alarms of a run, as Slack takes it.

    Messages are sent from a thread of its own. The first that fails is logged, and the next is
    tried all the same.
    """

    def __init__(self, url: str) -> None:
        parts = urllib.parse.urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"a webhook is an address like https://host/path, got {url!r}")
        self._url = url
        self._host = parts.hostname
        self._waiting: queue.Queue[str] = queue.Queue()
        self._is_failing = False
        threading.Thread(target=self._run, name="guardbit-webhook", daemon=True).start()

    def tell(self, name: str, alarms: Sequence[Event]) -> None:
        """Sends a line about new alarms of a run; returns at once."""
        self._waiting.put(message(name, alarms))

    def join(self) -> None:
        self._waiting.join()

    def _run(self) -> None:
        while True:
            content = json.dumps({"text": self._waiting.get()}).encode()
            headers = {"Content-Type": "application/json"}
            request = urllib.request.Request(self._url, content, headers, method="POST")
            try:
                urllib.request.urlopen(request, timeout=PATIENCE).close()
                self._is_failing = False
            # Whatever happens here is no reason to disturb anybody.
            except Exception as error:
                if not self._is_failing:
                    # Not the whole address: it is a secret of whoever may post there.
                    log.warning("the webhook at %s was not told of an alarm: %r", self._host, error)
                self._is_failing = True
            finally:
                self._waiting.task_done()


def message(name: str, alarms: Sequence[Event]) -> str:
    """One line about new alarms of a run.

    >>> message("runs/a", [Event(50, "alarm", "h.2.attn", (6,), "It grew", rule="head_growth")])
    'GuardBit: runs/a: alarm at step 50 in h.2.attn, head 6 (head_growth): It grew'
    """
    first, *others = alarms
    heads = ", ".join(map(str, first.heads))
    named = f", head{'s' * (len(first.heads) > 1)} {heads}" if first.heads else ""
    more = f" (and {len(others)} more)" if others else ""
    line = (
        f"GuardBit: {name}: alarm at step {first.step:,} in {first.site or 'the whole run'}{named}"
        f" ({first.rule}){more}: {first.why}"
    )
    return printable(line)[:MOST_CHARACTERS]
