"""The stages of a monitor, which are tried again after failures, and the monitor's log."""

import logging
import sys
import threading
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import Any, TypeVar

from guardbit.guard import apart

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
                if not self.logger.hasHandlers():  # Python then prints the bare message
                    text = str(msg) % args if args else str(msg)
                    msg, args = f"{'GuardBit: ' * (not text.startswith('GuardBit'))}{text}", ()
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
    """Returns an error's text, or its name: some, such as MemoryError, have none; and its notes."""
    notes = getattr(error, "__notes__", ())
    return ", ".join((str(error) or type(error).__name__, *map(str, notes)))


log = _Log(logging.getLogger("guardbit"))


class FailedElsewhereError(RuntimeError):
    """Raised when a stage has failed on another rank."""


# For how many samples a stage rests after each failure, before it is tried again.
_RESTS = (0, 3, 15)

#: The stage of everything outside other stages; if it fails, nothing more is watched.
WATCHING = "watching"

# What has tries of its own, or what nothing can follow.
_LASTING = frozenset({WATCHING, "ranks", "store", "state", "close"})

#: How an event ends by which a stage is off for good, and how one that will be tried again.
FOR_GOOD, FOR_NOW = "it is off for the rest of the run", "it is tried again at later samples"


class Stages:
    """Runs the stages of a monitor; one that fails is tried again at later samples."""

    def __init__(
        self,
        strict: bool,
        on_failure: Callable[[str, str], None],
        on_recovery: Callable[[str], None] = lambda _: None,
    ) -> None:
        self.strict = strict
        self.off: set[str] = set()  # have failed and do not run for now
        self._ailing: set[str] = set()  # have not succeeded since they failed
        self._ran: set[str] = set()  # ailing ones that succeeded in the current sample
        self._failures: dict[str, int] = {}
        self._rests: dict[str, int] = {}  # samples before the next try, unless off for good
        self._on_failure, self._on_recovery = on_failure, on_recovery

    def attempt(self, stage: str, function: Callable[[], T]) -> T | None:
        """Runs a function of a stage; returns None if the stage is off or the function fails."""
        return None if stage in self.off else self.always(stage, function)

    def run(self, stages: Iterable[tuple[str, Callable[[], object]]]) -> None:
        """Runs some stages one after the other, each as `attempt` does."""
        for stage, function in stages:
            self.attempt(stage, function)

    def always(self, stage: str, function: Callable[[], T]) -> T | None:
        """Like `attempt`, but also runs a stage that is off, as closing must always be tried."""
        try:
            found = apart(function)
        except Exception as error:
            self.fail(stage, error)
            return None
        if stage in self._ailing - self.off:
            self._ran.add(stage)
        return found

    def begin_sample(self) -> None:
        """Lets stages whose rest is over be tried again."""
        self.end_sample()
        self.off -= self.rested
        self._rests = {stage: rest - 1 for stage, rest in self._rests.items() if rest > 0}

    def end_sample(self) -> None:
        """Reports stages that were tried again and did not fail."""
        recovered, self._ran = self._ran - self.off, set()
        self._ailing -= recovered
        for stage in sorted(recovered):
            with suppress(Exception):
                self._on_recovery(stage)

    @property
    def rested(self) -> set[str]:
        """Stages that are off and are tried again at the next sample."""
        return {stage for stage, rest in self._rests.items() if rest == 0}

    def fail(self, stage: str, error: Exception) -> None:
        """Turns a stage off for some samples or for good, or raises if `strict`."""
        if self.strict:
            raise error
        if stage in self.off:
            return
        self.off.add(stage)
        is_elsewhere = isinstance(error, FailedElsewhereError)  # where its tries are counted
        num_failures = self._failures.get(stage, 0) + (not is_elsewhere)
        self._failures[stage] = num_failures
        is_last = stage in _LASTING or num_failures > len(_RESTS)
        if not is_last:
            self._rests[stage] = 0 if is_elsewhere else _RESTS[num_failures - 1]
        if stage in self._ailing and not is_last:
            return
        self._ailing.add(stage)
        means = " (telemetry is not kept from here on; alarms and switches go on)"
        log.warning(
            "the stage '%s' failed and %s; the run goes on%s: %s",
            stage,
            (FOR_GOOD if is_last else FOR_NOW).removeprefix("it "),
            means if stage == "store" else "",
            text_of(error),
            # Errors of the system name their file or address themselves.
            exc_info=not isinstance(error, FailedElsewhereError | OSError),
        )
        with suppress(Exception):
            until = "" if stage in _LASTING else f"; {FOR_GOOD if is_last else FOR_NOW}"
            self._on_failure(stage, text_of(error) + until)
