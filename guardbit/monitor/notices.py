"""What a user must know of a run besides its samples, each reported once."""

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from guardbit.judgement import nothing_to_correct
from guardbit.kernels.engines.proof import proofs
from guardbit.monitor import interception, ranks
from guardbit.monitor.actions import SwitchReports
from guardbit.monitor.journal import Journal
from guardbit.monitor.settings import Settings
from guardbit.monitor.sites import Instrumentation, Site, metadata_of, shown
from guardbit.monitor.stages import log
from guardbit.monitor.unseen import looks_like_attention
from guardbit.records import Alarm, Event

_HOW_TO_SHOW = (
    "attention written out in PyTorch needs no correction; to watch it, or your own kernel, put"
    " q, k, v = guardbit.observe(q, k, v) before it"
)

_FUNCTIONS = (
    "F.scaled_dot_product_attention, varlen_attn, flex_attention, a function of flash_attn,"
    " TransformerEngine's FusedAttnFunc or guardbit.flash_attention"
)

#: Sampled steps in a row without a call of a module before that is reported.
MISSED_SAMPLES = 3


class Notices:
    """Reports what a user must know, once; passes alarms on to the user's function."""

    def __init__(
        self, instrumentation: Instrumentation, journal: Journal, settings: Settings
    ) -> None:
        self._instrumentation, self._journal = instrumentation, journal
        self._on_alarm, self._is_strict = settings.on_alarm, settings.strict
        self._other_cadence = settings.every_n_train_steps + 1
        # The latest sampled steps; the modules that were called in one, and module -> the latest
        # one that it was called in, or the one before its first call.
        self._sampled, self._ever_sampled = deque([-1], maxlen=MISSED_SAMPLES), set[str]()
        self._last_sampled: dict[str, int] = {}
        self._is_over = False
        # Whether any call was measured; until then, the latest sampled steps that had calls.
        self._had_backward, self._without_backward = False, list[int]()
        # Calls elsewhere are left alone on purpose where modules were selected.
        self._said = {"outside"} if instrumentation.is_selection else set[str]()
        self._unseen: list[Site] = []  # that look like attention and were not seen to call it
        self._table: dict[str, dict[str, Any]] = {}
        self.outside = interception.OutsideCalls()  # calls outside all modules, since its start
        self._switch_reports = SwitchReports(instrumentation)
        self._told_proofs = len(proofs())  # those of this process before this session among them

    def first(self, what: str) -> bool:
        is_first = what not in self._said
        self._said.add(what)
        return is_first

    @property
    def coverage(self) -> tuple[int, int]:
        rows = self._table.values()
        return sum(row["watched"] for row in rows), sum(row["modules"] for row in rows)

    @property
    def why_nothing(self) -> str:
        """Reasons why no call of attention may have been seen, the likeliest first."""
        lost = self._instrumentation.lost()
        if lost:
            named = shown([site.name for site in lost])
            return (
                f"the modules that called attention are no longer in the model ({named}): give the"
                " model as it is now a monitor of its own, to have what replaced them watched"
            )
        candidates = self._instrumentation.candidates.values()
        others = [*_replaced({}), *interception.left_alone()]
        if not others and not any(map(_is_attention, candidates)):
            return (
                f"no attention was found in this model: no module of it has called {_FUNCTIONS};"
                " before a kernel of your own put q, k, v = guardbit.observe(q, k, v)"
            )
        ran = [site for site in candidates if interception.ran(site.number, site.module)]
        innermost = _innermost([site for site in ran if _is_attention(site)])
        named = f" ({_kinds(innermost)} ran)" if innermost else ""
        reasons = [
            *others,
            f"its attention is written out, or a kernel of its own{named}: {_HOW_TO_SHOW}",
            "it is a Hugging Face model whose attn_implementation is none of 'sdpa', 'eager',"
            " 'flex_attention' and the installed flash_attn's",
            "the instrumented model is not the one that trains, which may be a copy of it",
        ]
        if not ran:
            reasons = [f"{reasons[-1]}: none of its modules ran", *reasons[:-1]]
        likely = _listed(reasons)
        return f"the model has called no attention that GuardBit sees so far. Likely: {likely}"

    # --- attention that is not watched -----------------------------------------------------------

    def report_outside(self, step: int) -> None:
        """Reports, once, attention that a sampled step called outside the model as it began."""
        outside = self.outside
        outside.stop()
        if outside.count and not self._instrumentation.lost() and self.first("outside"):
            self._tell(
                step,
                "attention called outside the modules that the model had when the monitor began is"
                f" not watched (calls in this step: {outside.count}, first {outside.where}): call"
                " it within one of them, or give the model that calls it a monitor of its own",
            )

    def report_unseen(self, step: int) -> None:
        """Reports, once attention was called, how much is watched, and which modules are not."""
        called = {} if self._table else self._instrumentation.sites
        if not called:
            return
        unseen = self._unseen = _unseen(self._instrumentation.candidates, called)
        self._table = _table(list(called.values()), unseen)
        watched, total = self.coverage
        which = " that `sites` selects" if self._instrumentation.is_selection else ""
        share = f"GuardBit watches {watched} of {total} attention modules{which}"
        if ranks.rank() == 0:
            log.tell(f"{share}: {', '.join(self._table)}")
        sentences = list(_replaced(called))
        if unseen:
            sentences.append(
                "modules that look like attention ran and were not seen to call it, so they are"
                f" not watched: {_kinds(unseen)}; {share};"
                f" {'; '.join([_HOW_TO_SHOW, *interception.left_alone()])}"
            )
        if sharded := [site for site in called.values() if site.record.sharded]:
            sentences.append(
                f"no head can be measured or switched at {_kinds(sharded)}:"
                f" {sharded[0].record.sharded}"
            )
        for why in sentences:
            self._tell(step, why)
        if sentences:
            self._journal.note({"unseen": [site.name for site in unseen]})
        self._journal.note({"coverage": self._table})

    def end_sampled_step(self, step: int, had_backward: bool | None) -> None:
        """Reports modules that were lost or not in a sampled step that has ended.

        `had_backward`: whether a backward of any call came; None if nobody takes calls any more.
        """
        if self._instrumentation.lost() and self.first("lost"):
            self._tell(step, self.why_nothing)
        if had_backward is None:
            self._count_without_attention(step)
            return
        sites, now = self._instrumentation.sites, self._instrumentation.clock.done
        # Calls that are not watched anyway, e.g. replayed by a CUDA graph, are not missed.
        last_called = {n: s.trained_in for n, s in sites.items() if s.calls.unwatched is None}
        called_now = {name for name, at in last_called.items() if at == now}
        self._ever_sampled |= called_now
        begun = {name: self._sampled[-1] for name, at in last_called.items() if at >= 0}
        self._last_sampled = begun | self._last_sampled | dict.fromkeys(called_now, now)
        self._sampled.append(now)
        if called_now or not begun:
            self._had_backward |= had_backward
            if last_called and not self._had_backward:
                self._report_no_backward(step)
            return
        reasons = [
            *_replaced({}),
            "another model object trains now, such as a copy or a reloaded one, and needs a"
            " monitor of its own",
            "attention runs in other steps than the sampled ones, which"
            f" every_n_train_steps={self._other_cadence} may meet",
            "its layers are dropped at random, and this step dropped all of them",
        ]
        why = (
            "no watched module called attention in this sampled step, so at most weights were"
            f" measured. Possible reasons: {_listed(reasons)}"
        )
        self._none_called(step, why, "none called")

    def _report_no_backward(self, step: int) -> None:
        # One step may be a generator's in the discriminator's turn, or have lost its backward.
        self._without_backward = [*self._without_backward, step][-MISSED_SAMPLES - 1 :]
        why = (
            f"no backward of watched attention came in {MISSED_SAMPLES} sampled steps, so at most"
            " weights were measured: run the backward within the step, or, if networks take turns,"
            f" try every_n_train_steps={self._other_cadence}"
        )
        if (count := len(self._without_backward)) >= MISSED_SAMPLES:
            for one in self._without_backward if count == MISSED_SAMPLES else [step]:
                self._none_called(one, why, "no backward")

    def end_samples(self) -> bool:
        """Ends the run; returns whether a module was called, but in no sampled step."""
        self._is_over = self._sampled[-1] >= 0
        called = self._instrumentation.sites.values()
        return any(
            self._why_passed_by(site) for site in called if site.name not in self._ever_sampled
        )

    def _why_passed_by(self, site: Site) -> str | None:
        """Why nothing is measured in a module's calls, if sampled steps miss them, or None."""
        name, called = site.name, site.trained_in
        # Only steps around which it was called: a module that is done with misses nothing.
        is_missed = self._last_sampled.get(name, called) < self._sampled[0] < called
        is_never_met = self._is_over and name not in self._ever_sampled and called >= 0
        if not is_missed and not is_never_met:
            return None
        return (
            "it was called between samples; later ones meet it if layers are dropped at random; if"
            f" networks take turns, try every_n_train_steps={self._other_cadence}"
        )

    def site_facts(self) -> dict[str, dict[str, Any]]:
        """What the run's metadata says of this rank's modules; notes how much is watched."""
        sites = self._instrumentation.sites
        if before := self._table:
            unseen = [site for site in self._unseen if site.name not in sites]
            self._table = _table(list(sites.values()), unseen, self._why_passed_by)
            if self._table != before:
                self._journal.note({"coverage": self._table})
        return metadata_of(sites, self._why_passed_by)

    def report_nothing(self, step: int) -> None:
        """Reports once that no attention was seen so far; a strict session raises it instead."""
        # A step may call no attention: one that was skipped, or that of a discriminator.
        if self._is_strict:
            raise RuntimeError(self.why_nothing)
        if self._instrumentation.lost():
            self._none_called(step, self.why_nothing, "lost")
        elif self.first("unseen"):
            self._journal.record(Event(step, "monitor_error", "", (), self.why_nothing))

    def _none_called(self, step: int, why: str, what: str) -> None:
        """Reports, once, a sampled step without attention; notes how many there were."""
        if self.first(what):
            self._tell(step, why)
        self._count_without_attention(step)

    def _count_without_attention(self, step: int) -> None:
        before = self._journal.metadata.get("without_attention", {"samples": 0, "first": step})
        self._journal.note({"without_attention": {**before, "samples": before["samples"] + 1}})

    def _tell(self, step: int, why: str) -> None:
        self._journal.record_own(Event(step, "monitor_error", "", (), why))

    # --- what ran --------------------------------------------------------------------------------

    def report_runs(self, step: int, is_last: bool = False) -> None:
        for event in self._switch_reports.check(step, is_last):
            self._journal.record_own(event)
            if ranks.rank() > 0:  # only rank 0 logs events
                log.warning("rank %d, step %d: %s: %s", ranks.rank(), step, event.site, event.why)

    def report_proofs(self) -> None:
        """Logs, once heads are switched, which kernels cannot be given an exact delta."""
        if not self._instrumentation.switched:
            return
        new, self._told_proofs = proofs()[self._told_proofs :], len(proofs())
        for proof in new:
            # Other lengths have other proofs in the same words.
            why = proof.failure or proof.no_residual
            if why and ranks.rank() == 0 and self.first(str(proof)):
                ours = "gives no exact delta itself, so GuardBit computes it"
                what = "cannot be given an exact delta" if proof.failure else ours
                log.warning("an attention kernel %s: %s", what, proof)

    def report_nothing_to_correct(self, facts: Mapping[str, Mapping[str, Any]]) -> None:
        """Says, once, that attention's delta is not rounded, if it runs like that."""
        why = nothing_to_correct({"sites": facts})
        if why and ranks.rank() == 0 and self.first("nothing to correct"):
            log.tell(f"GuardBit: {why}: nothing to correct here")

    def announce(self, alarm: Alarm) -> None:
        """Hands an alarm to the user's function, which may fail without ending anything."""
        if self._on_alarm is None or ranks.rank() > 0:
            return
        try:
            self._on_alarm(alarm)
        except Exception as error:
            if self.first("on_alarm"):
                why = f"on_alarm failed, and is called again at the next alarm: {error!r}"
                self._journal.record(Event(alarm.step, "monitor_error", "", (), why))


def _replaced(called: Mapping[str, Site]) -> Iterator[str]:
    """Yields a sentence for each attention function that another one replaces."""
    for name, other in interception.replaced().items():
        watches = any(site.record.entry == name for site in called.values())
        yield (
            f"{name} is not PyTorch's: `{other}` replaced it; GuardBit"
            f" {'watches' if watches else 'does not watch'} its calls"
        )


def _unseen(candidates: Mapping[str, Site], called: Mapping[str, Site]) -> list[Site]:
    """The innermost modules that ran and look like attention, and called none."""
    # A module counts as seen if it, a part of it, or an attention module around it called.
    seen = {part for s in called.values() if _is_attention(s) for part in s.module.modules()}
    callers = {site.module for site in called.values()}
    parts = {part for caller in callers for part in caller.modules()}
    found = [
        site
        for site in candidates.values()
        if _is_attention(site)
        and site.module not in seen
        # A part that only the model calls attention may be the projections of what calls it.
        and (site.module not in parts or looks_like_attention(site.module))
        and callers.isdisjoint(site.module.modules())
        and interception.ran(site.number, site.module)
    ]
    return _innermost(found)


def _innermost(sites: Sequence[Site]) -> list[Site]:
    """Returns the sites whose modules hold none of the others."""
    modules = {site.module for site in sites}
    return [site for site in sites if modules.isdisjoint(list(site.module.modules())[1:])]


def _table(
    called: Sequence[Site],
    unseen: Sequence[Site],
    why_passed_by: Callable[[Site], str | None] = lambda _: None,
) -> dict[str, dict[str, Any]]:
    """How much is watched of what calls each function, as the run's metadata holds it."""
    rows: dict[str, dict[str | None, list[str]]] = {}
    whys = {s.name: s.limits.unwatched or s.record.sharded or why_passed_by(s) for s in called}
    whys |= {site.name: "it was not seen to call attention" for site in unseen}
    entries = [(site.record.entry, site.name) for site in called]
    for entry, name in [*entries, *(("never seen", site.name) for site in unseen)]:
        rows.setdefault(entry, {}).setdefault(whys[name], []).append(name)
    return {
        entry: {
            "modules": sum(map(len, names.values())),
            "watched": len(names.pop(None, [])),
            "not_watched": "; ".join(f"{shown(n)}: {why}" for why, n in names.items()) or None,
        }
        for entry, names in rows.items()
    }


def _is_attention(site: Site) -> bool:
    return looks_like_attention(site.module, site.name)


def _kinds(sites: Sequence[Site]) -> str:
    """The first names of each class, and how many more there are."""
    kinds: dict[str, list[str]] = {}
    for site in sites:
        kinds.setdefault(type(site.module).__name__, []).append(site.name)
    return "; ".join(f"{shown(names)} ({kind})" for kind, names in kinds.items())


def _listed(reasons: Sequence[str]) -> str:
    return "; ".join(f"({i}) {reason}" for i, reason in enumerate(reasons, 1))
