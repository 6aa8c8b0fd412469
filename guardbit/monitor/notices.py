"""Logs and records, once each, what a user must know of a run besides its samples."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from guardbit.catalog import NONFINITE
from guardbit.kernels.engines.proof import proofs
from guardbit.monitor import ranks
from guardbit.monitor.actions import SwitchReports
from guardbit.monitor.coverage import Coverage
from guardbit.monitor.exchange import Exchange
from guardbit.monitor.journal import Journal
from guardbit.monitor.sites import Instrumentation, kernel_of
from guardbit.monitor.stages import log
from guardbit.records import Alarm, Event, Sample

_FORWARD = ("q", "k", "v", "O")
# Two orders of additions round a part of the numbers to the other side: by two half units in the
# last place at most, and of few of them. A race changes more.
_OF_ORDER = 2.0

_WHENCE = {
    "q": "it came into attention with the queries, from the layer's input or its weights",
    "k": "it came into attention with the keys, from the layer's input or its weights",
    "v": "it came into attention with the values, from the layer's input or its weights",
    "O": "attention made it in its forward, as q, k and v are finite",
    "dO": "it came with the gradient of the output, from what follows attention or from the loss",
    "dQ": "attention made it in its backward, as q, k, v, O and dO are finite",
    "dK": "attention made it in its backward, as q, k, v, O, dO and dQ are finite",
    "dV": "attention made it in its backward, as q, k, v, O, dO, dQ and dK are finite",
}


class Notices:
    """Reports unseen attention, switches that did not run and NaN, each once; passes alarms on."""

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
        self._switch_reports = SwitchReports(instrumentation)
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
        """Stops noting which modules run."""
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
        """Looks out for attention outside the model, until `report_outside`."""
        self._coverage.begin_sampled_step()

    def abandon_sampled_step(self) -> None:
        """Forgets what was seen since `begin_sampled_step`."""
        self._coverage.abandon_sampled_step()

    def report_outside(self, step: int) -> None:
        """Reports, once, attention that a sampled step called outside the model."""
        why = self._coverage.end_sampled_step()
        if why is not None:
            self._exchange.record(Event(step, "monitor_error", "", (), why))

    def report_unseen(self, step: int) -> None:
        """Reports attention that nothing watches, and notes once how much is watched."""
        for why in self._coverage.check():
            self._exchange.record(Event(step, "monitor_error", "", (), why))
            self._journal.note({"unseen": self._coverage.unseen})
        if self._coverage.table and self.first("coverage"):
            self._journal.note({"coverage": self._coverage.table})

    def none_called(self, step: int, why: str, what: str = "none called") -> None:
        """Reports, once, a sampled step without attention; notes how many there were."""
        if not self._num_without:
            self._first_without = step
        if self.first(what):
            self._exchange.record(Event(step, "monitor_error", "", (), why))
        self._num_without += 1
        self._journal.note(
            {"without_attention": {"samples": self._num_without, "first": self._first_without}}
        )

    def note_missed(self, why_passed_by: Callable[[str], str | None]) -> None:
        """Notes how much is watched, once modules are known that sampled steps pass by."""
        if self._coverage.table and self._coverage.count_again(why_passed_by):
            self._journal.note({"coverage": self._coverage.table})

    def report_runs(self, step: int, is_last: bool = False) -> None:
        """Reports heads that did not run what they are switched to."""
        for event in self._switch_reports.check(step, is_last):
            self._exchange.record(event)
            if ranks.rank() > 0:  # only rank 0 logs events
                log.warning("rank %d, step %d: %s: %s", ranks.rank(), step, event.site, event.why)

    def report_proofs(self) -> None:
        """Records the proofs of engines once heads are switched, and logs those that failed."""
        if len(proofs()) == self._told_proofs or not self._instrumentation.switched:
            return
        for proof in proofs()[max(self._told_proofs, self._earlier_proofs) :]:
            if proof.failure and ranks.rank() == 0:
                log.warning("an attention kernel cannot be given an exact delta: %s", proof)
        self._told_proofs = len(proofs())
        self._journal.note({"proofs": [str(proof) for proof in proofs()]})

    def report_samples(self, step: int, samples: Sequence[Sample], loss_scale: float) -> None:
        """Reports the first NaN, and backwards that do not repeat.

        With a scale of the loss, gradients overflow now and then and the scaler skips such steps:
        NaN in gradients is then left out.
        """
        sites = self._instrumentation.sites
        found = first_nonfinite(samples)
        if found and (loss_scale == 1.0 or found[1] in _FORWARD) and self.first("nonfinite"):
            self._record(_nonfinite(step, *found, kernel_of(sites.get(found[0].site))))
        for kind, (largest, sample) in _worst_repeats(samples).items():
            if self.first(kind):
                kernel = kernel_of(sites.get(sample.site))
                self._record(_not_repeated(step, kind, largest, sample, kernel))

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


def first_nonfinite(samples: Iterable[Sample]) -> tuple[Sample, str, tuple[int, ...]] | None:
    """Returns the module, tensor and heads that a sampled step's first NaN or infinity is in."""
    found = sorted(
        (sample for sample in samples if sample.indicator == "nonfinite"),
        key=lambda sample: sample.layer,
    )
    forward = sum(NONFINITE[name] for name in _FORWARD)
    with_forward = [one for one in found if any(code & forward for code in _codes(one))]
    sample = with_forward[0] if with_forward else found[-1] if found else None
    if sample is None:
        return None
    codes = _codes(sample)
    for name, number in NONFINITE.items():
        heads = tuple(head for head, code in enumerate(codes) if code & number)
        if heads:
            return sample, name, heads
    return None


def _codes(sample: Sample) -> list[int]:
    return [int(value) if value == value else 0 for value in sample.values]


def _nonfinite(
    step: int, sample: Sample, tensor: str, heads: tuple[int, ...], kernel: str
) -> Event:
    made_here = tensor in ("O", "dQ", "dK", "dV") and kernel
    why = (
        f"NaN or infinity, of this sampled step first in {tensor}: {_WHENCE[tensor]}"
        f"{f' ({kernel})' if made_here else ''}; it may be older than this step, as those between"
        " samples are not looked at"
    )
    return Event(step, "advisory", sample.site, heads, why, rule="nonfinite")


def _worst_repeats(samples: Iterable[Sample]) -> dict[str, tuple[float, Sample]]:
    """The largest differences that are a race, and that are an order of additions."""
    worst: dict[str, tuple[float, Sample]] = {}
    for sample in samples:
        if sample.indicator == "repeat_difference":
            largest = max((value for value in sample.values if value == value), default=0.0)
            kind = "race" if largest > _OF_ORDER else "order"
            if largest > 0 and largest > worst.get(kind, (0.0, sample))[0]:
                worst[kind] = largest, sample
    return worst


def _not_repeated(step: int, kind: str, largest: float, sample: Sample, kernel: str) -> Event:
    least = _OF_ORDER if kind == "race" else 0.0
    heads = tuple(h for h, value in enumerate(sample.values) if value > least)
    what = (
        "more than another order of additions can: it is a race; let `guardbit doctor` examine the"
        " kernel, and use another"
        if kind == "race"
        else "as another order of additions makes it (atomics): the run does not repeat to the bit,"
        " and no more"
    )
    why = (
        f"two backwards on the same tensors differ{f' in {kernel}' if kernel else ''}, at worst by"
        f" {largest:.2g} half units in the last place, {what}"
    )
    return Event(step, "advisory", sample.site, heads, why, rule="repeatability")
