"""Which attention of a model is watched, which is not seen, and which sampled steps pass by."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from guardbit.monitor import interception, ranks
from guardbit.monitor.sites import Instrumentation, Site
from guardbit.monitor.stages import log
from guardbit.monitor.unseen import looks_like_attention, unseen_implementation

_HOW_TO_SHOW = (
    "Attention that is written out in PyTorch has no rounded delta, so nothing in it needs a"
    " correction; to have it watched, or a kernel of its own, show it by guardbit.observe or"
    " guardbit.watch_attention"
)

_FUNCTIONS = (
    "F.scaled_dot_product_attention, varlen_attn, flex_attention, a function of flash_attn or"
    " guardbit.flash_attention"
)

#: How many sampled steps have to pass a module by. Of layers that are dropped at random, a few do
#: so now and then.
PATIENCE = 3

#: How many modules of each kind are named.
_NAMED = 3


class Coverage:
    """Compares the modules that ran, and look like attention, with those that called it.

    Attributes:
        unseen: Names of the modules that look like attention and were not seen to call it.
        table: For the run's metadata: function that was called -> number of its modules, how many
            of them are watched, and why the others are not; "never seen" -> modules that called
            none.
    """

    def __init__(self, instrumentation: Instrumentation) -> None:
        self._instrumentation = instrumentation
        self._is_noting = True
        self._outside: interception.OutsideCalls | None = None
        if not instrumentation.is_selection:  # calls elsewhere are then left alone on purpose
            self._outside = interception.OutsideCalls()
        self._unseen: list[Site] = []
        self.unseen: list[str] = []
        self.table: dict[str, dict[str, Any]] = {}
        interception.entries.start()

    def check(self) -> Iterator[str]:
        """Yields a sentence for each thing that is not watched; once, when attention was called."""
        called = self._instrumentation.sites if self._is_noting else {}
        if not called:
            return
        unseen = self._unseen = _unseen(self._instrumentation.candidates, called)
        self.close()
        self.unseen = [site.name for site in unseen]
        self.table = _table(list(called.values()), unseen)
        watched, total = self.share
        which = " that `sites` selects" if self._instrumentation.is_selection else ""
        verb = "is" if watched == 1 else "are"
        share = f"{watched} of {total} attention modules{which} {verb} watched"
        if ranks.rank() == 0:
            log.tell(f"GuardBit: {share}: {', '.join(self.table)}")
        yield from replaced(called)
        if unseen:
            yield (
                f"{_counted(unseen, 'module')} that {_looks(unseen)} like attention ran and"
                f" {'was' if len(unseen) == 1 else 'were'} not seen to call it, so nothing of"
                f" {'it' if len(unseen) == 1 else 'them'} is watched or switched: {_kinds(unseen)};"
                f" {share}. {'. '.join([_HOW_TO_SHOW, *interception.left_alone()])}"
            )
        sharded = [site for site in called.values() if site.sharded]
        if sharded:
            yield (
                f"nothing is measured of the heads of {_counted(sharded, 'attention module')}, and"
                f" none of them can be switched: {_kinds(sharded)}: {sharded[0].sharded}"
            )

    def begin_sampled_step(self) -> None:
        """Counts from now on the calls of attention outside all modules, until one is told."""
        if self._outside is not None:
            self._outside.start()

    def abandon_sampled_step(self) -> None:
        """Ends that, and forgets the calls."""
        if self._outside is not None:
            self._outside.stop()

    def end_sampled_step(self) -> str | None:
        """Ends that; returns a sentence about the calls that were counted, once, or None."""
        if self._outside is None:
            return None
        self._outside.stop()
        count, where = self._outside.count, self._outside.where
        if not count:
            return None
        self._outside = None
        return (
            f"attention was called outside the modules of the watched model, {count} time"
            f"{'' if count == 1 else 's'} in this step (first {where}), and nothing of that is"
            " watched or switched: call it within the forward of a module of the model, or give the"
            " model that calls it a monitor of its own"
        )

    def count_again(self, why_passed_by: Callable[[str], str | None]) -> bool:
        """Counts the modules that were called since, too; returns whether the table has changed."""
        before, called = self.table, self._instrumentation.sites
        unseen = [site for site in self._unseen if site.name not in called]
        self.table = _table(list(called.values()), unseen, why_passed_by)
        return self.table != before

    @property
    def share(self) -> tuple[int, int]:
        """How many attention modules are watched, and of how many that are known."""
        rows = self.table.values()
        return sum(row["watched"] for row in rows), sum(row["modules"] for row in rows)

    def why_nothing(self) -> str:
        """Returns reasons why no call of attention may have been seen, the likeliest first."""
        lost = self._instrumentation.lost()
        if lost:
            named = _named([site.name for site in lost])
            return (
                f"the modules that called attention are no longer in the model ({named}), and"
                " nothing of what has replaced them is watched: give the model as it is now a"
                " monitor of its own"
            )
        candidates = list(self._instrumentation.candidates.values())
        if (others := [*replaced({}), *interception.left_alone()]) == [] and not any(
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

    def close(self) -> None:
        """Stops recording which modules run, and counting what is called outside them."""
        self.abandon_sampled_step()
        if self._is_noting:
            self._is_noting = False
            interception.entries.stop()


class MissedModules:
    """Finds the modules that are called between sampled steps and not in them.

    Where two networks take turns, G in even steps and D in odd ones, each multiple of an even
    cadence is a step of G.
    """

    def __init__(self, cadence: int) -> None:
        self._other_cadence = cadence + 1
        self._met: set[str] = set()
        # Module -> how many sampled steps have passed it by, since the last one that met it.
        self._missed: dict[str, int] = {}
        self._previous: int | None = None
        self._never_met: set[str] = set()  # once the run is over
        # What stood in the place of attention functions when a module was last met.
        self._replaced = set(replaced({}))

    def take(self, sites: Mapping[str, Site], now: int) -> str | None:
        """Takes a sampled step that has ended."""
        previous, self._previous = self._previous, now
        # Where nothing is watched anyway, as in calls that a CUDA graph replays, none is missed.
        called = {n: site.trained_in for n, site in sites.items() if site.unwatched is None}
        called = {name: latest for name, latest in called.items() if latest >= 0}
        between = []
        for name, latest in called.items():
            if latest == now:
                self._met.add(name)
                self._missed.pop(name, None)
            elif latest > (-1 if previous is None else previous):
                # Only steps around which it was called: a module that is done with misses nothing.
                between.append(name)
                self._missed[name] = self._missed.get(name, 0) + 1
        others = list(replaced({}))
        if not called or now in called.values():
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
        if self._previous is not None:
            called = {name for name, site in sites.items() if site.trained_in >= 0}
            self._never_met = called - self._met
        return bool(self._never_met)

    def why_passed_by(self, name: str) -> str | None:
        """Why nothing is measured in a module's calls, if sampled steps pass it by, or None."""
        if self._missed.get(name, 0) >= PATIENCE:
            why = f"{PATIENCE} sampled steps have passed it by, while it was called between them"
        elif name in self._never_met:
            why = "it was called, and in no sampled step"
        else:
            return None
        return f"{why}; where networks take turns, try every_n_train_steps={self._other_cadence}"


def replaced(called: Mapping[str, Site]) -> Iterator[str]:
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


def _looks(sites: Sequence[Site]) -> str:
    return "looks" if len(sites) == 1 else "look"
