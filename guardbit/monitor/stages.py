"""The stages of a monitor, each of which runs until it fails, and the monitor's log."""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import Any, TypeVar

T = TypeVar("T")


def beside_bars() -> AbstractContextManager[None]:
    """Takes tqdm's progress bars off the console while something is printed."""
    tqdm = getattr(sys.modules.get("tqdm"), "tqdm", None)
    # In other threads, whoever holds tqdm's lock may wait for what is printed.
    if tqdm is None or threading.current_thread() is not threading.main_thread():
        return nullcontext()
    return tqdm.external_write_mode(nolock=True)  # a log handler may take the lock


class _Log(logging.LoggerAdapter[logging.Logger]):
    """GuardBit's logger; errors of the user's log handlers do not reach training."""

    def log(self, level: int, msg: object, *args: object, **kwargs: Any) -> None:
        with suppress(Exception):
            if self.isEnabledFor(level):
                with beside_bars():
                    super().log(level, msg, *args, **{"stacklevel": 2, **kwargs})

    def tell(self, message: str) -> None:
        """Logs at INFO what every user should see."""
        with suppress(Exception):
            if self.logger.hasHandlers() or self.logger.level or logging.lastResort is None:
                self.info("%s", message)
            else:
                record = (self.logger.name, logging.INFO, __file__, 0, message, (), None)
                with beside_bars():
                    logging.lastResort.handle(self.logger.makeRecord(*record))

    def unwatched(self, error: Exception) -> None:
        """Warns that a run goes on without GuardBit, after an error that is being handled."""
        line = "GuardBit could not be set up: the run goes on, UNWATCHED and unguarded: %s"
        self.warning(line, text_of(error), exc_info=True)


def text_of(error: Exception) -> str:
    """Returns an error's text, or its name: some, such as MemoryError, have no text."""
    return str(error) or type(error).__name__


log = _Log(logging.getLogger("guardbit"))


class FailedElsewhereError(RuntimeError):
    """Raised when a stage has failed on another rank."""


class Stages:
    """Runs the stages of a monitor, each until it fails."""

    def __init__(self, strict: bool, on_failure: Callable[[str, Exception], None]) -> None:
        self.strict = strict
        self.off: set[str] = set()  # those that have failed
        self._on_failure = on_failure

    def attempt(self, stage: str, function: Callable[[], T]) -> T | None:
        """Runs a function of a stage; returns None if the stage is off or the function fails."""
        return None if stage in self.off else self.always(stage, function)

    def always(self, stage: str, function: Callable[[], T]) -> T | None:
        """Like `attempt`, but also runs a stage that is off, as closing must always be tried."""
        try:
            return function()
        except Exception as error:
            self.fail(stage, error)
            return None

    def fail(self, stage: str, error: Exception) -> None:
        """Turns a stage off until the run ends; reports it once, or raises if `strict`."""
        if self.strict:
            raise error
        if stage in self.off:
            return
        self.off.add(stage)
        means = " (telemetry is not kept from here on; alarms and switches go on)"
        log.warning(
            "the stage '%s' failed and is off for the rest of the run, which goes on%s: %s",
            stage,
            means if stage == "store" else "",
            text_of(error),
            # Errors of the system name their file or address themselves.
            exc_info=not isinstance(error, FailedElsewhereError | OSError),
        )
        with suppress(Exception):
            self._on_failure(stage, error)
