"""Knows what heads are asked to run and what they run, and carries out decisions."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

from guardbit.monitor.policy import Policy
from guardbit.monitor.sites import Instrumentation
from guardbit.records import Alarm, Decision, Event

#: Name of an attention module -> one stabilizer a head.
Stabilizers = dict[str, list[str]]


class Switching:
    """Switches heads by hand or as a policy decides, and records it.

    Attributes:
        refusals: Module, of any rank -> why none of its calls could be switched so far, or None.
        asked_elsewhere: What heads are asked to run in modules that only other ranks hold.
    """

    def __init__(
        self,
        instrumentation: Instrumentation,
        policy: Policy | None,
        dry_run: bool,
        record: Callable[[Event], None],
    ) -> None:
        self._instrumentation = instrumentation
        self._policy = policy
        self._dry_run = dry_run
        self._record = record
        self.refusals: dict[str, str | None] = {}
        self.asked_elsewhere: Stabilizers = {}
        # Modules that are absent: not called yet, or no longer instrumented.
        self._loaded: Stabilizers = {}
        self._left_running: Stabilizers = {}

    def asked(self) -> Stabilizers:
        """Returns what the heads are asked to run."""
        # A module's heads are known only once it has been called.
        own = self._instrumentation.asked()
        return {**self._loaded, **self.asked_elsewhere, **own}

    def running(self) -> Stabilizers:
        """Returns what the heads really ran in the latest step."""
        return {**self._left_running, **self._instrumentation.stabilizers()}

    def switched(self) -> Stabilizers:
        """Returns what is asked for in the modules that have a switched head."""
        return {name: list(names) for name, names in self.asked().items() if set(names) != {"none"}}

    def remember(self) -> None:
        """Keeps both, because the instrumentation is about to leave the model."""
        self._loaded, self._left_running = self.asked(), self.running()

    def load(self, stabilizers: Stabilizers, is_of_parts: bool = False) -> None:
        """Asks for the stabilizers of a checkpoint.

        Args:
            stabilizers: The stabilizers of all modules.
            is_of_parts: Whether some of the modules may be on other ranks.

        Raises:
            ValueError: If the model has no such module.
        """
        modules = set(self._instrumentation.modules)
        self._instrumentation.load_stabilizers(
            {name: s for name, s in stabilizers.items() if name in modules or not is_of_parts}
        )
        self._loaded = stabilizers

    def switch(
        self, site: str, stabilizer: str, heads: Sequence[int] | None, why: str, step: int
    ) -> None:
        """Switches heads by hand, see `MonitorSession.switch`."""
        before = self._instrumentation.asked()
        self._instrumentation.switch(site, stabilizer, heads)
        for name, now in self._instrumentation.asked().items():
            # A new switch replaces one that does not fit the heads.
            known = before[name] if len(before[name]) == len(now) else ["none"] * len(now)
            switched = tuple(
                h for h, (old, new) in enumerate(zip(known, now, strict=True)) if old != new
            )
            if switched:
                self._record(Event(step, "switch", name, switched, why, stabilizer=stabilizer))

    def decide(
        self,
        alarms: list[Alarm],
        step: int,
        last_ended: int,
        restless: Mapping[str, Collection[int]],
        way_back: str,
    ) -> None:
        """Lets the policy decide, and carries out its decisions."""
        called = self._instrumentation.sites
        for name, site in called.items():
            switched = tuple(head for head, asked in enumerate(site.asked) if asked != "none")
            if site.mixed_heads is not None and 0 < len(switched) < site.num_heads:
                why = f"switched back: {site.mixed_heads}"
                self._instrumentation.give_back(site)
                self._record(Event(last_ended, "switch", name, switched, why, stabilizer="none"))
        if self._policy is None:
            return
        own = {name: site.asked for name, site in called.items()}
        asked, advice = {**self.asked_elsewhere, **own}, self._policy.advice
        for decision in self._policy.decide(alarms, step, asked, restless):
            self._act(decision, self._policy, last_ended)
        if self._policy.advice != advice:
            why = f"{self._policy.advice}; {way_back} {self._policy.remedy}"
            if self._dry_run:
                why = (
                    "dry run: no head was switched, so it is not known whether that helps; had all"
                    f" alarms come in spite of the switches, the advice would be: {why}"
                )
            self._record(Event(last_ended, "advisory", "", (), why))

    def _act(self, decision: Decision, policy: Policy, step: int) -> None:
        site = self._instrumentation.sites.get(decision.site)  # or other ranks have it
        asked = self.asked_elsewhere[decision.site] if site is None else site.asked
        refusal, heads, why = self.refusals.get(decision.site), decision.heads, decision.why
        if site is not None and site.mixed_heads is not None:
            heads = tuple(range(site.num_heads))
        if decision.stabilizer == "none" and not self._dry_run:
            # Leave heads alone whose switch was refused, or that somebody has switched since.
            ours = {head for head, name in enumerate(asked) if name == policy.stabilizer}
            refusal, heads = None, tuple(head for head in heads if head in ours)
            if not heads:
                return
        refusal = "dry run" if self._dry_run else refusal
        if refusal is None and site is not None:
            self._instrumentation.ask(decision.site, decision.stabilizer, heads)
        elif refusal is None:
            for head in heads:
                asked[head] = decision.stabilizer
        else:
            why = f"not switched to {decision.stabilizer}: {refusal} ({decision.why})"
            if not self._dry_run:
                policy.was_refused(decision.site, heads)
        kind = "refusal" if refusal else "switch"
        self._record(Event(step, kind, decision.site, heads, why, stabilizer=decision.stabilizer))

    def already(self, alarm: Alarm) -> str:
        """Returns a clause on the alarmed heads that are switched already, or ""."""
        names = self.running().get(alarm.site, [])
        switched = [
            f"head {head} runs {names[head]} already"
            for head in alarm.heads
            if head < len(names) and names[head] != "none"
        ]
        return "".join(f"; {text}" for text in switched)

    def events(self, step: int, is_resumed: bool) -> Iterator[Event]:
        """Yields switches that say what is switched, for a run that continues in a new folder."""
        why = "as before the run was resumed" if is_resumed else "before the first step"
        for site, names in self.asked().items():
            for stabilizer in dict.fromkeys(name for name in names if name != "none"):
                heads = tuple(head for head, name in enumerate(names) if name == stabilizer)
                yield Event(step, "switch", site, heads, why, stabilizer=stabilizer)
