"""What a user must know of a run besides its samples, each reported once.

That is attention that is not watched, sampled steps that no watched attention was called in,
switched heads that run something else, engines without a proof, the first NaN, and backwards that
do not repeat.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from guardbit.judgement import delta_not_rounded, nothing_to_correct
from guardbit.judgement.evidence import FORWARD, Nonfinite, first_nonfinite
from guardbit.kernels.engines.proof import proofs
from guardbit.monitor import interception, ranks
from guardbit.monitor.actions import SwitchReports
from guardbit.monitor.exchange import Exchange
from guardbit.monitor.journal import Journal
from guardbit.monitor.sites import Instrumentation, Site, kernel_of
from guardbit.monitor.stages import log
from guardbit.monitor.unseen import looks_like_attention, unseen_implementation
from guardbit.records import Alarm, Event, Sample

_HOW_TO_SHOW = (
    "Attention that is written out in PyTorch has no rounded delta, so nothing in it needs a"
    " correction; to have it watched, or a kernel of its own, show it by guardbit.observe or"
    " guardbit.watch_attention"
)

_FUNCTIONS = (
    "F.scaled_dot_product_attention, varlen_attn, flex_attention, a function of flash_attn,"
    " TransformerEngine's FusedAttnFunc or guardbit.flash_attention"
)

#: How many sampled steps have to pass a module by. Of layers that are dropped at random, a few do
#: so now and then.
PATIENCE = 3

#: How many modules of each kind are named.
_NAMED = 3


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
    """Reports what a user must know, once; passes alarms on to the user's function."""

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
        # Calls elsewhere are left alone on purpose where modules were selected.
        self._said = {"outside"} if instrumentation.is_selection else set[str]()
        # The modules that look like attention and were not seen to call it, and how much is
        # watched: both are known once attention was called.
        self._unseen: list[Site] = []
        self._table: dict[str, dict[str, Any]] = {}
        self._outside = interception.OutsideCalls()
        self._switch_reports = SwitchReports(instrumentation)
        # Of the process: those of before this session, and those that its journal holds.
        self._earlier_proofs, self._told_proofs = len(proofs()), 0

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
            named = _named([site.name for site in lost])
            return (
                f"the modules that called attention are no longer in the model ({named}), and"
                " nothing of what has replaced them is watched: give the model as it is now a"
                " monitor of its own"
            )
        candidates = list(self._instrumentation.candidates.values())
        if (others := [*_replaced({}), *interception.left_alone()]) == [] and not any(
            map(_is_attention, candidates)
        ):
            return (
                "no attention was found in this model, so nothing is watched: no module of it has"
                f" called {_FUNCTIONS}, and none is called attention; if it has attention under"
                " another name and in a kernel of its own, show it by guardbit.observe or"
                " guardbit.watch_attention"
            )
        ran = [site for site in candidates if interception.ran(site.number, site.module)]
        innermost = _innermost([site for site in ran if _is_attention(site)])
        named = f" ({_kinds(innermost)} ran)" if innermost else ""
        reasons = [
            *others,
            f"its attention is written out, or in a kernel of its own{named}: {_HOW_TO_SHOW}",
            "it is a Hugging Face model whose attn_implementation is none of 'sdpa', 'eager',"
            " 'flex_attention' and the installed flash_attn's",
            "the instrumented model is not the one that trains, which may be a copy of it",
        ]
        if not ran:
            reasons = [f"{reasons[-1]}: none of its modules ran", *reasons[:-1]]
        listed = "; ".join(f"({i}) {reason}" for i, reason in enumerate(reasons, 1))
        return (
            "the model has called no attention that GuardBit sees so far, so nothing is watched."
            f" Likely: {listed}"
        )

    # --- attention that is not watched -----------------------------------------------------------

    def begin_sampled_step(self) -> None:
        """Counts the calls of attention outside all modules, until `report_outside`."""
        self._outside.start()

    def abandon_sampled_step(self) -> None:
        """Forgets what was counted since `begin_sampled_step`."""
        self._outside.stop()

    def report_outside(self, step: int) -> None:
        """Reports, once, attention that a sampled step called outside the model."""
        outside = self._outside
        outside.stop()
        if outside.count and self.first("outside"):
            self._tell(
                step,
                f"attention was called outside the modules of the watched model, {outside.count}"
                f" time{'' if outside.count == 1 else 's'} in this step (first {outside.where}),"
                " and nothing of that is watched or switched: call it within the forward of a"
                " module of the model, or give the model that calls it a monitor of its own",
            )

    def report_unseen(self, step: int) -> None:
        called = {} if self._table else self._instrumentation.sites
        if not called:
            return
        self._unseen = _unseen(self._instrumentation.candidates, called)
        self._table = _table(list(called.values()), self._unseen)
        watched, total = self.coverage
        which = " that `sites` selects" if self._instrumentation.is_selection else ""
        verb = "is" if watched == 1 else "are"
        share = f"{watched} of {total} attention modules{which} {verb} watched"
        if ranks.rank() == 0:
            log.tell(f"GuardBit: {share}: {', '.join(self._table)}")
        sentences = list(_replaced(called))
        if self._unseen:
            sentences.append(_why_unseen(self._unseen, share))
        sharded = [site for site in called.values() if site.sharded]
        if sharded:
            sentences.append(
                f"nothing is measured of the heads of {_counted(sharded, 'attention module')}, and"
                f" none of them can be switched: {_kinds(sharded)}: {sharded[0].sharded}"
            )
        for why in sentences:
            self._tell(step, why)
        if sentences:
            self._journal.note({"unseen": [site.name for site in self._unseen]})
        self._journal.note({"coverage": self._table})

    def note_missed(self, why_passed_by: Callable[[str], str | None]) -> None:
        """Notes how much is watched, once modules are known that sampled steps pass by."""
        if not self._table:
            return
        before, called = self._table, self._instrumentation.sites
        unseen = [site for site in self._unseen if site.name not in called]
        self._table = _table(list(called.values()), unseen, why_passed_by)
        if self._table != before:
            self._journal.note({"coverage": self._table})

    def none_called(self, step: int, why: str, what: str = "none called") -> None:
        """Reports, once, a sampled step without attention; notes how many there were."""
        if self.first(what):
            self._tell(step, why)
        before = self._journal.metadata.get("without_attention", {"samples": 0, "first": step})
        self._journal.note({"without_attention": {**before, "samples": before["samples"] + 1}})

    def _tell(self, step: int, why: str) -> None:
        self._exchange.record(Event(step, "monitor_error", "", (), why))

    # --- what ran --------------------------------------------------------------------------------

    def report_runs(self, step: int, is_last: bool = False) -> None:
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

    def report_nothing_to_correct(
        self, facts: Mapping[str, Mapping[str, Any]], precision: list[str]
    ) -> None:
        """Says, once, that attention's delta is not rounded, if it runs like that."""
        why = nothing_to_correct({"precision": precision})
        if why:
            why += ", which rounds next to nothing"
        why = why or delta_not_rounded({"sites": facts})
        if why and ranks.rank() == 0 and self.first("nothing to correct"):
            log.tell(f"GuardBit: {why}: nothing to correct here")

    def report_samples(self, step: int, samples: Sequence[Sample], loss_scale: float) -> None:
        """Reports the first NaN, and backwards that do not repeat."""
        sites = self._instrumentation.sites
        # Where the loss is scaled, gradients overflow now and then, and the scaler skips the step.
        found = first_nonfinite(samples)
        if found and (loss_scale == 1.0 or found.tensor in FORWARD) and self.first("nonfinite"):
            self._record(_nonfinite(found, kernel_of(sites.get(found.site))))
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


class MissedModules:
    """Finds the modules that are called between sampled steps and not in them.

    Where two networks take turns, G in even steps and D in odd ones, each multiple of an even
    cadence is a step of G.
    """

    def __init__(self, cadence: int) -> None:
        self._other_cadence = cadence + 1
        self._met: set[str] = set()
        # Module -> how many sampled steps have passed it by, since the last one that met it.
        self._missed: Counter[str] = Counter()
        self._previous = -1
        self._never_met: set[str] = set()  # once the run is over
        # What stood in the place of attention functions when a module was last met.
        self._replaced = set(_replaced({}))

    def take(self, sites: Mapping[str, Site], now: int) -> str | None:
        """Takes a sampled step that has ended; says why it called no attention, if it did not."""
        previous, self._previous = self._previous, now
        # Where nothing is watched anyway, as in calls that a CUDA graph replays, none is missed.
        called = {n: site.trained_in for n, site in sites.items() if site.unwatched is None}
        called = {name: latest for name, latest in called.items() if latest >= 0}
        met = {name for name, latest in called.items() if latest == now}
        # Only steps around which it was called: a module that is done with misses nothing.
        between = {name for name, latest in called.items() if latest > previous} - met
        self._met |= met
        for name in met:
            del self._missed[name]
        self._missed.update(between)
        others = list(_replaced({}))
        if met or not called:
            self._replaced = set(others)
            return None
        new = [sentence for sentence in others if sentence not in self._replaced]
        return self._why_none(new, was_called_between=bool(between))

    def _why_none(self, new: list[str], was_called_between: bool) -> str:
        none = (
            "no watched module called attention in this sampled step, so at most weights were"
            " measured"
        )
        if new:
            return f"{none}: {'; '.join(new)}"
        reasons = [
            "another model object trains now, such as a copy or a reloaded one, and needs a"
            " monitor of its own",
            "attention runs in other steps than the sampled ones, which"
            f" every_n_train_steps={self._other_cadence} may meet",
        ]
        likely = reasons[::-1] if was_called_between else reasons
        return f"{none}. Likely: (1) {likely[0]}; (2) {likely[1]}"

    def end(self, sites: Mapping[str, Site]) -> bool:
        """Ends the run; returns whether a module was called and never met, in spite of samples."""
        if self._previous >= 0:
            called = {name for name, site in sites.items() if site.trained_in >= 0}
            self._never_met = called - self._met
        return bool(self._never_met)

    def why_passed_by(self, name: str) -> str | None:
        """Why nothing is measured in a module's calls, if sampled steps pass it by, or None."""
        if self._missed[name] >= PATIENCE:
            why = f"{PATIENCE} sampled steps have passed it by, while it was called between them"
        elif name in self._never_met:
            why = "it was called, and in no sampled step"
        else:
            return None
        return f"{why}; where networks take turns, try every_n_train_steps={self._other_cadence}"


def _replaced(called: Mapping[str, Site]) -> Iterator[str]:
    """Yields a sentence for each attention function in whose place another one stands."""
    for name, other in interception.replaced().items():
        watches = any(site.entry == name for site in called.values())
        yield (
            f"{name} is not PyTorch's: `{other}` replaced it; GuardBit"
            f" {'watches' if watches else 'does not watch'} its calls"
        )


def _unseen(candidates: Mapping[str, Site], called: Mapping[str, Site]) -> list[Site]:
    """The innermost modules that ran and look like attention, and called none."""
    # A module counts as seen if it, a part of it, or an attention module around it called
    # attention.
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
    why_passed_by: Callable[[str], str | None] = lambda _: None,
) -> dict[str, dict[str, Any]]:
    rows: dict[str, dict[str, Any]] = {}
    for entry in dict.fromkeys(site.entry for site in called):
        sites = [site for site in called if site.entry == entry]
        left = {s.name: s.unwatched or s.sharded or why_passed_by(s.name) for s in sites}
        left = {name: why for name, why in left.items() if why}
        rows[entry] = _row(len(sites), left)
    if unseen:
        why = "it was not seen to call attention"
        rows["never seen"] = _row(len(unseen), {site.name: why for site in unseen})
    return rows


def _row(modules: int, left: Mapping[str, str]) -> dict[str, Any]:
    by_reason: dict[str, list[str]] = {}
    for name, why in left.items():
        by_reason.setdefault(why, []).append(name)
    texts = [f"{_named(names)}: {why}" for why, names in by_reason.items()]
    return {
        "modules": modules,
        "watched": modules - len(left),
        "not_watched": "; ".join(texts) or None,
    }


def _is_attention(site: Site) -> bool:
    return looks_like_attention(site.module, site.name)


def _kinds(sites: Sequence[Site]) -> str:
    """The first names of each class, how many more there are, and how they compute attention."""
    kinds: dict[tuple[str, str | None], list[str]] = {}
    for site in sites:
        kind = (type(site.module).__name__, unseen_implementation(site.module))
        kinds.setdefault(kind, []).append(site.name)
    texts = []
    for (kind, implementation), names in kinds.items():
        how = f", attn_implementation='{implementation}'" if implementation else ""
        texts.append(f"{_named(names)} ({kind}{how})")
    return "; ".join(texts)


def _named(names: Sequence[str]) -> str:
    more = [f"{len(names) - _NAMED} more"] if len(names) > _NAMED else []
    return ", ".join([*names[:_NAMED], *more])


def _counted(sites: Sequence[Site], noun: str) -> str:
    return f"{len(sites)} {noun}{'' if len(sites) == 1 else 's'}"


def _why_unseen(unseen: Sequence[Site], share: str) -> str:
    looks, was, them = ("looks", "was", "it") if len(unseen) == 1 else ("look", "were", "them")
    return (
        f"{_counted(unseen, 'module')} that {looks} like attention ran and {was} not seen"
        f" to call it, so nothing of {them} is watched or switched: {_kinds(unseen)}; {share}."
        f" {'. '.join([_HOW_TO_SHOW, *interception.left_alone()])}"
    )


def _nonfinite(found: Nonfinite, kernel: str) -> Event:
    made_here = found.tensor in ("O", "dQ", "dK", "dV") and kernel
    why = (
        f"NaN or infinity, of this sampled step first in {found.tensor}: {_WHENCE[found.tensor]}"
        f"{f' ({kernel})' if made_here else ''}; it may be older than this step, as those between"
        " samples are not looked at"
    )
    return Event(found.step, "advisory", found.site, found.heads, why, rule="nonfinite")


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
