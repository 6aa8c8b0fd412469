"""The stages of a monitor: an error in one turns it off, and never reaches training."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TypeVar

log = logging.getLogger("guardbit")

T = TypeVar("T")


class FailedElsewhereError(RuntimeError):
    """Raised where a stage has failed on another rank."""


class Stages:
    """Runs the stages of a monitor, each until it fails.

    Args:
        strict: Raise errors, instead of logging them and going on without the stage.
        on_failure: Is told of a stage that has failed, once it is off.

    Attributes:
        strict: The argument.
        off: Names of the stages that have failed.
    """

    def __init__(self, strict: bool, on_failure: Callable[[str, Exception], None]) -> None:
        self.strict = strict
        self.off: set[str] = set()
        self._on_failure = on_failure

    def attempt(self, stage: str, function: Callable[[], T]) -> T | None:
        """Runs a function of a stage; returns None if the stage is off or the function fails."""
        if stage in self.off:
            return None
        try:
            return function()
        except Exception as error:
            self.fail(stage, error)
            return None

    def fail(self, stage: str, error: Exception) -> None:
        """Turns a stage off for the rest of the run; says so once, or raises if `strict`."""
        if self.strict:
            raise error
        if stage in self.off:
            return
        self.off.add(stage)
        log.warning(
            "the stage '%s' failed and is off for the rest of the run, which goes on: %s",
            stage,
            error,
            # The system's errors say themselves where they come from.
            exc_info=not isinstance(error, FailedElsewhereError | OSError),
        )
        self._on_failure(stage, error)
