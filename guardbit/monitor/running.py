"""Tells what switched heads really run: PyTorch's kernel, where their calls cannot be switched."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from guardbit.monitor.interception import StepCalls
from guardbit.monitor.sites import Instrumentation, Site
from guardbit.records import Event

#: Steps that a site has to stay as it is, before its third turn and later ones are told: calls
#: that alternate would fill the journal.
LASTING = 100


@dataclass
class _Told:
    """What was told of a site.

    Attributes:
        is_native: Whether, by what was told, its switched heads run PyTorch's kernel.
        turns: How often this was told to have changed.
        lasting: For how many steps it has been otherwise.
        heads: Those that were told to run PyTorch's kernel.
        some: Whether it was told that some calls can be switched and some not.
    """

    is_native: bool = False
    turns: int = 0
    lasting: int = 0
    heads: tuple[int, ...] = ()
    some: bool = False


class Running:
    """Compares what is asked for with what ran, step by step.

    Args:
        instrumentation: The instrumented model.
    """

    def __init__(self, instrumentation: Instrumentation) -> None:
        self._instrumentation = instrumentation
        self._told: dict[str, _Told] = {}

    def check(self, step: int) -> Iterator[Event]:
        """Yields what is to be told once a step is over; costs nothing while nothing is switched.

        Args:
            step: The optimizer step.
        """
        switched = self._instrumentation.switched
        if not switched and not self._told:
            return
        for name in self._told.keys() - {site.name for site in switched}:
            del self._told[name]
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
                yield from self._compare(site, calls, step)

    def _gone(self, site: Site, step: int, why: str) -> Iterator[Event]:
        """Takes back a switch that can never be in force again."""
        heads = _switched_heads(site)
        self._instrumentation.give_back(site)
        self._told.pop(site.name, None)
        yield Event(step, "switch", site.name, heads, f"switched back: {why}", stabilizer="none")

    def _compare(self, site: Site, calls: StepCalls, step: int) -> Iterator[Event]:
        told = self._told.setdefault(site.name, _Told())
        heads, refusal = _switched_heads(site), calls.refusal
        names = site.outgrown or site.asked
        if refusal is None and site.outgrown is not None:
            refusal = f"it has {site.num_heads} heads now, and the switch is of {len(names)}"
        is_native = refusal is not None
        is_turn = is_native != told.is_native
        told.lasting = told.lasting + 1 if is_turn else 0
        bypass = refusal or calls.bypass
        if not told.some and bypass and (not is_native or (is_turn and told.turns >= 2)):
            told.some = True
            why = (
                f"heads {list(heads)} of {site.name} are switched in some calls only, in others"
                f" PyTorch's kernel runs: {bypass}"
            )
            yield Event(step, "monitor_error", "", (), why)
        if is_turn and (told.turns < 2 or told.lasting >= LASTING):
            told.is_native, told.lasting = is_native, 0
            told.turns += 1
        elif is_native and told.is_native:  # heads that were switched meanwhile
            heads = tuple(head for head in heads if head not in told.heads)
        else:
            return
        told.heads = (*told.heads, *heads) if is_native else ()
        by_name: dict[str, list[int]] = {}
        for head in heads:
            by_name.setdefault(names[head], []).append(head)
        if is_native:
            if not heads:
                return
            why = (
                f"PyTorch's kernel runs instead of {', '.join(by_name)}: {refusal}; the heads"
                " are not stabilized until calls come again that can be switched"
            )
            yield Event(step, "switch", site.name, heads, why, stabilizer="none")
        else:
            for name, some in by_name.items():
                why = "its calls can be switched again"
                yield Event(step, "switch", site.name, tuple(some), why, stabilizer=name)


def _switched_heads(site: Site) -> tuple[int, ...]:
    names = site.outgrown or site.asked
    return tuple(head for head, name in enumerate(names) if name != "none")
