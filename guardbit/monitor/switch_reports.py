"""Reports what switched heads really run if that is not what was asked for."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from guardbit.monitor.interception import StepCalls
from guardbit.monitor.sites import Instrumentation, Site
from guardbit.records import Event

#: Steps that a change must last before it is reported, from a module's third change on. Otherwise
#: alternating calls would fill the journal.
LASTING = 100


@dataclass
class _Reported:
    """What was reported of an attention module.

    Attributes:
        asked: What its heads were asked to run at the last check.
        names: What its heads run according to the reports.
        turns: How often a change was reported.
        lasting: Number of steps for which the module has differed from the reports.
        some: Whether it was reported that only some of the calls can be switched.
    """

    asked: tuple[str, ...] = ()
    names: tuple[str, ...] = ()
    turns: int = 0
    lasting: int = 0
    some: bool = False

    def ask(self, asked: tuple[str, ...]) -> set[int]:
        """Takes what the heads are asked to run; returns the heads that were switched meanwhile."""
        known = len(self.asked) == len(asked)
        new = {h for h, name in enumerate(asked) if not known or self.asked[h] != name}
        self.names = tuple(
            name if head in new else self.names[head] for head, name in enumerate(asked)
        )
        self.asked = asked
        return new


class SwitchReports:
    """Compares what is asked for with what ran, step by step."""

    def __init__(self, instrumentation: Instrumentation) -> None:
        self._instrumentation = instrumentation
        self._reported: dict[str, _Reported] = {}

    def check(self, step: int, is_last: bool = False) -> Iterator[Event]:
        """Yields the reports of a step that has ended; free while nothing is switched."""
        switched = self._instrumentation.switched
        if not switched and not self._reported:
            return
        for name in self._reported.keys() - {site.name for site in switched}:
            del self._reported[name]
        for site in switched:
            calls = site.latest_calls
            if calls is None:
                continue
            if calls.step < self._instrumentation.latest_step:  # not called in this step
                if site in self._instrumentation.lost():
                    yield from self._gone(site, step, "its module is no longer in the model")
            elif site.sharded is not None:
                yield from self._gone(site, step, site.sharded)
            else:
                yield from self._compare(site, calls, step, is_last)

    def _gone(self, site: Site, step: int, why: str) -> Iterator[Event]:
        """Undoes a switch that can never take effect again."""
        heads = _switched_heads(site)
        self._instrumentation.give_back(site)
        self._reported.pop(site.name, None)
        yield Event(step, "switch", site.name, heads, f"switched back: {why}", stabilizer="none")

    def _compare(self, site: Site, calls: StepCalls, step: int, is_last: bool) -> Iterator[Event]:
        asked = tuple(site.outgrown or site.asked)
        refusal = calls.refusal
        if refusal is None and site.outgrown is not None:
            refusal = f"it has {site.num_heads} heads now, and the switch was made for {len(asked)}"
        runs = tuple(site.stabilizers) if refusal is None else ("none",) * len(asked)
        reported = self._reported.setdefault(site.name, _Reported())
        new = reported.ask(asked)
        changed = {head for head, name in enumerate(runs) if name != reported.names[head]}
        is_turn = not changed <= new
        reported.lasting = reported.lasting + 1 if is_turn else 0
        earlier = site.substituted_in(calls.step)
        reason = refusal or calls.bypass or site.substituted or earlier
        is_mixed = refusal is None and (calls.bypass or (earlier and runs == asked))
        if not reported.some and reason and (is_mixed or (is_turn and reported.turns >= 2)):
            reported.some = True
            why = (
                f"heads {list(_switched_heads(site))} of {site.name} run what they are switched to"
                f" in some calls only: {reason}"
            )
            yield Event(step, "monitor_error", "", (), why)
        if is_turn and reported.turns >= 2 and reported.lasting < LASTING and not is_last:
            changed &= new
        elif changed and (is_turn or not reported.turns):
            reported.turns, reported.lasting = reported.turns + 1, 0
        reported.names = tuple(
            runs[head] if head in changed else name for head, name in enumerate(reported.names)
        )
        by_names: dict[tuple[str, bool], list[int]] = {}
        for head in sorted(changed):
            by_names.setdefault((runs[head], runs[head] == asked[head]), []).append(head)
        for (name, is_asked), heads in by_names.items():
            wanted = list(dict.fromkeys(asked[head] for head in heads))
            missing = f"{' and '.join(wanted)} {'does' if len(wanted) == 1 else 'do'} not run"
            if is_asked:
                why = "its calls can be switched again"
            elif refusal is not None:
                why = (
                    f"{missing}: {refusal}; the heads are not stabilized until its calls can be"
                    " switched again"
                )
            elif name == "none":
                why = f"{missing}, and the heads are not stabilized: {site.substituted}"
            else:
                why = site.substituted  # which says what runs
            yield Event(step, "switch", site.name, tuple(heads), why, stabilizer=name)


def _switched_heads(site: Site) -> tuple[int, ...]:
    names = site.outgrown or site.asked
    return tuple(head for head, name in enumerate(names) if name != "none")
