"""What is done about alarms: heads are switched, what they really run is reported, logits clipped.

QK clip is MuonClip's rule (arXiv 2507.20534): after an optimizer step a head whose largest logit S
is above the bound has its logits scaled by bound / S, by the square root of that in W_Q and in W_K.
S is of scale q k only: no clip lowers what a mask or a position bias adds. Unlike a stabilizer a
clip changes the weights. An optimizer that writes back copies of them in FP32 undoes it.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from guardbit.monitor.interception import StepCalls
from guardbit.monitor.layouts import LayoutUnavailable
from guardbit.monitor.policy import Policy
from guardbit.monitor.settings import Settings
from guardbit.monitor.sites import Instrumentation, Site
from guardbit.records import Alarm, Decision, Event, Sample, named

#: Name of an attention module -> one stabilizer per head.
Stabilizers = dict[str, list[str]]

#: Steps that a module's third and later changes must last before they are reported.
TURN_STEPS = 100

#: What to do about a head that grows where no rounding can be corrected.
OTHERWISE = "a lower learning rate, QK norm or qk_clip bounds its growth"

#: Steps between two reports of a head that is clipped again and again.
REPORT_STEPS = 1000


class Switching:
    """Switches heads by hand or as a policy decides, and records it."""

    def __init__(
        self, instrumentation: Instrumentation, settings: Settings, record: Callable[[Event], None]
    ) -> None:
        self._instrumentation, self._record = instrumentation, record
        self._policy, self._dry_run = settings.policy, settings.dry_run
        # Module, of any rank -> why none of its calls could be switched so far, or None.
        self.refusals: dict[str, str | None] = {}
        self.needless: dict[str, str] = {}  # module -> why there is nothing to correct, or ""
        self.asked_elsewhere: Stabilizers = {}  # in modules that only other ranks hold
        self._loaded: Stabilizers = {}  # in modules not called yet, or no longer instrumented

    def asked(self) -> Stabilizers:
        """What the heads are asked to run; a module's are known only once it has been called."""
        return {**self._loaded, **self.asked_elsewhere, **self._instrumentation.asked()}

    def switched(self) -> Stabilizers:
        """What is asked for in the modules that have a switched head."""
        return {name: list(names) for name, names in self.asked().items() if set(names) != {"none"}}

    def remember(self) -> None:
        """Keeps what is asked for, because the instrumentation is about to leave the model."""
        self._loaded = self.asked()

    def load(self, stabilizers: Stabilizers, is_of_parts: bool = False) -> None:
        """Asks for the stabilizers of a checkpoint; some may belong to other ranks' modules."""
        modules = self._instrumentation.candidates
        self._instrumentation.load_stabilizers(
            {name: s for name, s in stabilizers.items() if name in modules or not is_of_parts}
        )
        self._loaded = stabilizers

    def switch(
        self, site: str, stabilizer: str, heads: Sequence[int] | None, why: str, step: int
    ) -> None:
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
        if self._policy is None:
            return
        own = {name: site.asked for name, site in self._instrumentation.sites.items()}
        asked, advice = {**self.asked_elsewhere, **own}, self._policy.advice
        for decision in self._policy.decide(alarms, step, asked, restless):
            self._act(decision, self._policy, last_ended)
        if self._policy.advice != advice:
            why = f"{self._policy.advice}; {way_back} {self._policy.remedy}"
            if self._dry_run:
                despite = "had all alarms come despite switches, the advice would be"
                why = f"dry run: no head was switched; {despite}: {why}"
            self._record(Event(last_ended, "advisory", "", (), why))

    def _act(self, decision: Decision, policy: Policy, step: int) -> None:
        site = self._instrumentation.sites.get(decision.site)  # or other ranks have it
        asked = self.asked_elsewhere[decision.site] if site is None else site.asked
        refusal = self.refusals.get(decision.site)
        if needless := self.needless.get(decision.site):
            refusal = f"{needless}: nothing to correct; {OTHERWISE}"
        heads, why = decision.heads, decision.why
        if site is not None and site.limits.mixed_heads is not None:
            heads = tuple(range(site.num_heads))
        if decision.stabilizer == "none" and not self._dry_run:
            # Leave heads alone whose switch was refused, or that somebody has switched since.
            ours = {head for head, name in enumerate(asked) if name == policy.stabilizer}
            refusal, heads = None, tuple(head for head in heads if head in ours)
            if not heads:
                return
        refusal = "dry run" if self._dry_run else refusal
        if refusal is None:
            for head in heads:
                asked[head] = decision.stabilizer
            if decision.site in self._instrumentation.candidates:  # also if not called here yet
                self._instrumentation.load_stabilizers({decision.site: asked})
        else:
            why = f"not switched to {decision.stabilizer}: {refusal} ({decision.why})"
            if not self._dry_run:
                policy.was_refused(decision.site, heads)
        kind = "refusal" if refusal else "switch"
        self._record(Event(step, kind, decision.site, heads, why, stabilizer=decision.stabilizer))

    def already(self, alarm: Alarm) -> list[str]:
        """Returns a clause for each alarmed head that is switched already."""
        names = self._instrumentation.stabilizers().get(alarm.site, [])
        return [
            f"; head {head} runs {names[head]} already"
            for head in alarm.heads
            if head < len(names) and names[head] != "none"
        ]

    def events(self, step: int, is_resumed: bool) -> Iterator[Event]:
        """Yields switches that say what is switched, for a run that continues in a new folder."""
        why = "as before the run was resumed" if is_resumed else "before the first step"
        for site, names in self.asked().items():
            for stabilizer in dict.fromkeys(name for name in names if name != "none"):
                heads = tuple(head for head, name in enumerate(names) if name == stabilizer)
                yield Event(step, "switch", site, heads, why, stabilizer=stabilizer)


@dataclass
class _Reported:
    asked: tuple[str, ...] = ()  # what its heads were asked to run at the last check
    names: tuple[str, ...] = ()  # what its heads run according to the reports
    turns: int = 0  # how often a change was reported
    lasting: int = 0  # for how many steps the module has differed from the reports
    some: bool = False  # whether it was reported that only some of the calls can be switched


class SwitchReports:
    """Reports what switched heads really run if that is not what was asked for, step by step."""

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
            calls = site.calls
            if calls.step < self._instrumentation.clock.done:  # not called in this step
                if site in self._instrumentation.lost():
                    yield from self._gone(site, step, "its module is no longer in the model")
            elif why := site.record.sharded or ("none" in site.asked and site.limits.mixed_heads):
                yield from self._gone(site, step, why)
            else:
                yield from self._compare(site, calls, step, is_last)

    def _gone(self, site: Site, step: int, why: str) -> Iterator[Event]:
        """Undoes a switch that can never take effect again."""
        heads = _switched_heads(site.outgrown or site.asked)
        self._instrumentation.ask({site.number: None})
        self._reported.pop(site.name, None)
        yield Event(step, "switch", site.name, heads, f"switched back: {why}", stabilizer="none")

    def _compare(self, site: Site, calls: StepCalls, step: int, is_last: bool) -> Iterator[Event]:
        asked = tuple(site.outgrown or site.asked)
        refusal = calls.refusal
        if refusal is None and site.outgrown is not None:
            refusal = f"it has {site.num_heads} heads now, and the switch was made for {len(asked)}"
        runs = tuple(site.stabilizers) if refusal is None else ("none",) * len(asked)
        reported = self._reported.setdefault(site.name, _Reported())
        is_known = len(reported.asked) == len(asked)
        newly_asked = {
            h for h, name in enumerate(asked) if not is_known or reported.asked[h] != name
        }
        # What a reader of the reports so far expects of each head.
        expected = [name if h in newly_asked else reported.names[h] for h, name in enumerate(asked)]
        reported.asked = asked
        changed = {head for head, name in enumerate(runs) if name != expected[head]}
        is_turn = not changed <= newly_asked
        reported.lasting = reported.lasting + 1 if is_turn else 0
        at_step, because = site.state.last_substituted
        earlier = because if at_step == calls.step else ""
        reason = refusal or calls.bypass or site.substituted or earlier
        is_mixed = refusal is None and (calls.bypass or (earlier and runs == asked))
        if not reported.some and reason and (is_mixed or (is_turn and reported.turns >= 2)):
            reported.some = True
            why = (
                f"{named(_switched_heads(asked))} of {site.name} run what they are switched to"
                f" in some calls only: {reason}"
            )
            yield Event(step, "monitor_error", "", (), why)
        if is_turn and reported.turns >= 2 and reported.lasting < TURN_STEPS and not is_last:
            changed &= newly_asked
        elif changed and (is_turn or not reported.turns):
            reported.turns, reported.lasting = reported.turns + 1, 0
        reported.names = tuple(
            runs[head] if head in changed else name for head, name in enumerate(expected)
        )
        by_names: dict[tuple[str, str], list[int]] = {}
        for head in sorted(changed):
            by_names.setdefault((runs[head], asked[head]), []).append(head)
        for (name, wanted), heads in by_names.items():
            if name == wanted:
                why = "its calls can be switched again"
            elif name == "none":
                because = refusal or site.substituted
                why = f"{wanted} does not run: {because}; the heads are not stabilized until it can"
            else:
                why = site.substituted  # which says what runs
            yield Event(step, "switch", site.name, tuple(heads), why, stabilizer=name)


def _switched_heads(names: Sequence[str]) -> tuple[int, ...]:
    return tuple(head for head, name in enumerate(names) if name != "none")


def clip(site: Site, max_logits: Sequence[float], bound: float) -> None:
    """Scales the heads of an attention module that are above the bound, in place."""
    scales = [bound / s if bound < s < float("inf") else 1.0 for s in max_logits]
    site.scale_logits(torch.tensor(scales, dtype=torch.float64, device="cpu"))


class Clipping:
    """Clips the heads that sampled steps find above a bound, and records it."""

    def __init__(
        self, policy: Policy | None, is_dry_run: bool, record: Callable[[Event], None]
    ) -> None:
        self._policy, self._is_dry_run, self._record = policy, is_dry_run, record
        # (attention module, head) -> step of the event about it; (module, -1): a refusal.
        self._reported: dict[tuple[str, int], int] = {}

    def act(self, sites: Mapping[str, Site], samples: Sequence[Sample]) -> None:
        """Clips by the samples of one step, if it has come to that; called between steps."""
        policy = self._policy
        if policy is None or policy.qk_clip is None or policy.clipping is None:
            return
        bound, (_, why) = policy.qk_clip, policy.clipping
        logits = [sample for sample in samples if sample.indicator == "max_logit"]
        # All ranks see the same samples, so all of them refuse, or none.
        are_parts = any(sample.site not in sites for sample in logits)
        for sample in logits:
            above = tuple(head for head, s in enumerate(sample.values) if s > bound)
            if not above:
                continue
            if self._is_dry_run:
                refusal = "dry run"
            elif are_parts:
                refusal = "ranks hold different parts of the model"
            else:
                refusal = _refused(sites, sample, bound)
            if refusal is None:
                largest = max(sample.values[head] for head in above)
                kind, reported = "clip", above
                sentence = (
                    f"W_Q and W_K were scaled so that logits end at {bound:,g}; the largest was"
                    f" {largest:,.0f} ({why})"
                )
            else:
                kind, reported = "refusal", (-1,)
                sentence = f"not clipped: {refusal} ({why})"
            if self._is_new(sample.step, sample.site, reported):
                self._record(Event(sample.step, kind, sample.site, above, sentence))

    def _is_new(self, step: int, site: str, heads: Sequence[int]) -> bool:
        known = self._reported
        new = [h for h in heads if step - known.get((site, h), -REPORT_STEPS) >= REPORT_STEPS]
        known.update({(site, head): step for head in new})
        return bool(new)


def _refused(sites: Mapping[str, Site], sample: Sample, bound: float) -> str | None:
    """Clips a module's heads; returns why not where that did not happen."""
    site = sites[sample.site]
    try:
        if shared := _sharing(site, sites):
            return f"{shared} shares its W_Q or W_K, and a clip would scale that, too"
        clip(site, sample.values, bound)
    except LayoutUnavailable as unavailable:
        return str(unavailable)
    return None


def _sharing(site: Site, sites: Mapping[str, Site]) -> str:
    """Returns the name of another module that has some of the weights that a clip scales, or ""."""
    scaled = {id(p) for _, parameters in site.plain_rows() for p in parameters}
    for name, other in sites.items():
        if other is not site and not scaled.isdisjoint(map(id, other.module.parameters())):
            return f"'{name}'"
    return ""
