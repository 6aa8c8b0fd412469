"""Tells what steps show besides their samples, each once, in the log and in the journal."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from guardbit.kernels.engines.proof import proofs
from guardbit.monitor import ranks
from guardbit.monitor.coverage import Coverage
from guardbit.monitor.exchange import Exchange
from guardbit.monitor.journal import Journal, kernel_of
from guardbit.monitor.oddities import Oddities
from guardbit.monitor.running import Running
from guardbit.monitor.sites import Instrumentation
from guardbit.monitor.stages import log
from guardbit.records import Alarm, Event, Sample


class Telling:
    """Tells what is unseen, what ran, what is odd, and hands alarms to the user's function.

    Args:
        instrumentation: The instrumented model.
        journal: Takes notes.
        exchange: Takes the events of all ranks.
        record: Takes the events that all ranks have alike.
        on_alarm: The user's function, or None.
    """

    def __init__(
        self,
        instrumentation: Instrumentation,
        journal: Journal,
        exchange: Exchange,
        record: Callable[[Event], None],
        on_alarm: Callable[[Alarm], object] | None,
    ) -> None:
        self._instrumentation = instrumentation
        self._journal, self._exchange, self._record = journal, exchange, record
        self._on_alarm = on_alarm
        self._coverage = Coverage(instrumentation)
        self._running = Running(instrumentation)
        self._oddities = Oddities()
        # Of the process: those of before this session, and those that its journal holds.
        self._earlier_proofs, self._told_proofs = len(proofs()), 0
        self._said: set[str] = set()
        # Of the sampled steps without attention, how many there were and the first.
        self._num_without, self._first_without = 0, 0

    def first(self, what: str) -> bool:
        """Whether this is the first time that something is to be said."""
        is_first = what not in self._said
        self._said.add(what)
        return is_first

    def close(self) -> None:
        """Tells what was called after the last step."""
        self._coverage.close()

    @property
    def why_nothing(self) -> str:
        """Why a step had no attention that could be measured."""
        return self._coverage.why_nothing()

    @property
    def coverage(self) -> tuple[int, int]:
        """How many attention modules are watched, and of how many that are known."""
        return self._coverage.share

    def begin_sampled_step(self) -> None:
        """Looks out for attention outside the model, until `what_is_outside`."""
        self._coverage.begin_sampled_step()

    def abandon_sampled_step(self) -> None:
        """Forgets what was seen since `begin_sampled_step`."""
        self._coverage.abandon_sampled_step()

    def what_is_outside(self, step: int) -> None:
        """Tells once of attention that was called outside the model in a sampled step."""
        why = self._coverage.end_sampled_step()
        if why is not None:
            self._exchange.record(Event(step, "monitor_error", "", (), why))

    def what_is_unseen(self, step: int) -> None:
        """Tells which attention of a step nothing watches, and once how much is watched."""
        for why in self._coverage.check():
            self._exchange.record(Event(step, "monitor_error", "", (), why))
            self._journal.note({"unseen": self._coverage.unseen})
        if self._coverage.table and self.first("coverage"):
            self._journal.note({"coverage": self._coverage.table})

    def none_called(self, step: int, why: str, what: str = "none called") -> None:
        """Tells once of a sampled step in which no watched module called attention, and notes all.

        Args:
            step: The step.
            why: What is said of it.
            what: What is said once, see `first`.
        """
        if not self._num_without:
            self._first_without = step
        if self.first(what):
            self._exchange.record(Event(step, "monitor_error", "", (), why))
        self._num_without += 1
        self._journal.note(
            {"without_attention": {"samples": self._num_without, "first": self._first_without}}
        )

    def who_is_passed_by(self, why_passed_by: Callable[[str], str | None]) -> None:
        """Notes how much is watched, once modules are known that sampled steps pass by.

        Args:
            why_passed_by: Returns for a module why sampled steps pass it by, or None.
        """
        if self._coverage.table and self._coverage.count_again(why_passed_by):
            self._journal.note({"coverage": self._coverage.table})

    def what_ran(self, step: int, is_last: bool = False) -> None:
        """Tells where heads of a step did not run what is asked for."""
        for event in self._running.check(step, is_last):
            self._exchange.record(event)
            if ranks.rank() > 0:  # only rank 0 logs events
                log.warning("rank %d, step %d: %s: %s", ranks.rank(), step, event.site, event.why)

    def proofs_of_engines(self) -> None:
        """Records the proofs of engines once heads are switched, and logs those that failed."""
        if len(proofs()) == self._told_proofs or not self._instrumentation.switched:
            return
        for proof in proofs()[max(self._told_proofs, self._earlier_proofs) :]:
            if proof.failure and ranks.rank() == 0:
                log.warning("an attention kernel cannot be given an exact delta: %s", proof)
        self._told_proofs = len(proofs())
        self._journal.note({"proofs": [str(proof) for proof in proofs()]})

    def oddities(self, step: int, samples: Iterable[Sample], loss_scale: float) -> None:
        """Tells the first NaN, and backwards that do not repeat."""
        sites = self._instrumentation.sites
        for event in self._oddities.look(
            step, tuple(samples), loss_scale, lambda name: kernel_of(sites.get(name))
        ):
            self._record(event)

    def announce(self, alarm: Alarm) -> None:
        """Hands an alarm to the user's function, which may fail without ending anything."""
        if self._on_alarm is None or ranks.rank() > 0:
            return
        try:
            self._on_alarm(alarm)
        except Exception as error:
            if self.first("on_alarm"):
                why = f"on_alarm failed, and is called again at the next alarm: {error!r}"
                self._record(Event(alarm.step, "monitor_error", "", (), why))
