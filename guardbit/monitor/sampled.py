"""What becomes of a sampled step once its numbers have come: stages, and what a resumed run needs.

`judge` lists the stages after the exchange of samples. Each may fail alone; those that act wait
until no step goes on.

What ranks exchange after a sampled step, in this order (in quotes, its name for
`ranks.gathered`): whether stages are on, and which modules were not called ("agree"); weights that
are sharded, as norms are taken; codes of weights, switches and events, and samples ("known"); the
sums of calls; and, if codes of events differ, the events ("events").
"""

import math
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

from torch.distributed.tensor import DTensor

from guardbit.alerts import webhook_of_run
from guardbit.judgement import PRECISE, SHARES, nothing_to_correct
from guardbit.monitor import ranks
from guardbit.monitor.actions import Clipping, Switching
from guardbit.monitor.detectors import Detectors
from guardbit.monitor.journal import Journal
from guardbit.monitor.measure import Burst, Measurement, Sent, largest
from guardbit.monitor.measure.measurement import AttentionMetric, KnownSite, joined_tables
from guardbit.monitor.notices import Notices
from guardbit.monitor.replay import graded, normalised_sites
from guardbit.monitor.schedule import Schedule
from guardbit.monitor.settings import Settings
from guardbit.monitor.sites import Instrumentation
from guardbit.monitor.snapshots import Snapshots
from guardbit.monitor.stages import WATCHING, FailedElsewhereError, Stages, log
from guardbit.records import Alarm, Event, Sample, event_of, place_of

#: What the run's metadata says where ranks hold different modules.
PARTS = (
    "ranks hold different attention modules, as in pipeline parallelism: each measures and switches"
    " its own, and rank 0 records all"
)

_OTHER_WEIGHTS = (
    "ranks hold modules of the same names with different weights, as pipeline stages numbered from"
    " 0 each do, or Megatron's tensor parallelism: only rank 0's weights are recorded, and heads of"
    " the other ranks are NOT guarded; stages need names of their own, tensor parallelism DTensors"
)
_OTHER_SWITCHES = (
    "ranks have switched heads differently, so some of what they compute may not be corrected: load"
    " states and call `switch` on all ranks alike, not in `on_alarm`, which only rank 0 calls"
)
# Largest relative difference, in the sum of W_Q's norms, of ranks with the same weights, which
# differ by FP32's rounding. Stages differ by 1e-3 and more.
_SAME_WEIGHTS = 1e-4


# Of a state. Raise it when states that were taken before no longer fit.
_FORMAT = 9


@dataclass
class Judged:
    """A sampled step, which the stages fill in."""

    step: int
    samples: list[Sample]
    scalars: dict[str, float] = field(default_factory=dict)
    found: list[Alarm] = field(default_factory=list)  # alarms and advisories
    news: list[Alarm] = field(default_factory=list)  # of a rule or head that had not alarmed before
    unheeded: list[Alarm] = field(default_factory=list)  # what the policy must act on

    @property
    def alarms(self) -> list[Alarm]:
        return [alarm for alarm in self.found if not alarm.role.is_advisory]


class SampledSteps:
    """Judges sampled steps and acts on them, on all ranks alike."""

    def __init__(
        self,
        instrumentation: Instrumentation,
        settings: Settings,
        stages: Stages,
        journal: Journal,
        notices: Notices,
        measurement: Measurement,
        burst: Burst,
        schedule: Schedule,
    ) -> None:
        self._instrumentation, self._stages, self._journal = instrumentation, stages, journal
        self._notices, self._measurement, self._burst = notices, measurement, burst
        self._schedule, self._findings = schedule, journal.findings
        self.policy, self.dry_run = settings.policy, settings.dry_run
        self.detectors = Detectors(settings.rules)
        self.switching = Switching(instrumentation, settings, journal.record)
        self._clipping = Clipping(self.policy, self.dry_run, journal.record)
        self.snapshots = Snapshots(instrumentation, settings, measurement.directions, journal.note)
        self.exchange = Exchange(instrumentation, stages, journal)
        self.webhook = webhook_of_run() if ranks.rank() == 0 else None
        self.name = str(settings.dirpath or "a run without a folder")
        self._unheeded: list[Alarm] = []  # alarms of a checkpoint that no policy acted on
        # Whether a sample has shown which switches are needless; ranks, to act alike, do not wait.
        self._is_informed = self.policy is None or ranks.world_size() > 1

    # --- a sampled step --------------------------------------------------------------------------

    def judge(
        self,
        step: int,
        sent: Sent | None,
        show: Callable[[Judged], None],
        after_step: Callable[..., None],
    ) -> list[Alarm]:
        """Judges what was sent of a step, None if that failed, and acts on it after the step.

        `show` gets it before anybody is told of its alarms, which are returned. All ranks do alike.
        """
        samples = self._samples_of_all_ranks(step, sent)
        judged = Judged(step, samples)
        self._journal.add(samples)
        attempt = self._stages.attempt
        judged.scalars = attempt("scalars", partial(largest, samples)) or {}
        attempt("burst", partial(self._burst.note, samples))
        found = attempt("detectors", partial(self.detectors.update, samples)) or []
        judged.found = attempt("judgement", partial(graded, found, self._journal.evidence)) or found
        show(judged)
        attempt("alarms", partial(self._record_alarms, judged))
        if self.webhook is not None and judged.news:
            attempt("alerts", partial(self.webhook.tell, self.name, judged.news))
        attempt("burst", partial(self._begin_bursts, judged))
        self._unheeded = [*self._unheeded, *judged.alarms]
        if self._is_informed:  # else this sample failed, and its alarms wait for the next one
            judged.unheeded, self._unheeded = self._unheeded, []
            after_step(partial(self._act, judged))
        is_measuring, last_ended = self._burst.is_on, self._schedule.last_ended or 0
        attempt("verdict", partial(self._journal.report_verdict, last_ended, is_measuring))
        return judged.alarms

    def _samples_of_all_ranks(self, step: int, sent: Sent | None) -> list[Sample]:
        """Returns the samples of all ranks; every rank calls it."""
        attempt = self._stages.attempt
        own = sent and attempt("samples", partial(self._measurement.receive, sent))
        sent = None if own is None else sent
        facts = attempt("metrics", self._notices.site_facts)
        # A rank that has nothing, and may have failed, takes part all the same.
        add_up = partial(self._measurement.of_all_ranks, sent)
        known, metric = self.exchange.share(step, own or [], facts, sent, add_up)
        self.switching.asked_elsewhere = known.asked
        attempt("metrics", partial(self.record_facts, known.metadata))
        samples = known.samples
        if sent:
            add = partial(self._measurement.add, sent, metric, known.table, samples)
            samples = attempt("metrics", add) or samples
        if sent and not self._instrumentation.sites and not any(one.site for one in samples):
            attempt("metrics", partial(self._notices.report_nothing, sent.step))
        return samples

    def record_facts(self, facts: dict[str, dict[str, Any]]) -> None:
        """Records what is known of the modules of all ranks, if it has changed."""
        if facts != self._journal.metadata.get("sites"):
            self._record_new_facts(facts)
        self._is_informed |= "capture" not in self._stages.off

    def _record_new_facts(self, facts: dict[str, dict[str, Any]]) -> None:
        # A batch whose calls cannot be switched is no reason not to switch the next ones.
        self.switching.refusals = {site: facts[site]["not_switchable"] for site in facts}
        self._notices.report_nothing_to_correct(facts)
        self.switching.needless = self._journal.needless = {
            site: nothing_to_correct({"sites": {site: module}}) for site, module in facts.items()
        }
        self.detectors.normalised = normalised_sites({"sites": facts})
        self._journal.describe(facts)

    def record_never_met(self) -> None:
        """Records, at the end, which modules no sampled step has met."""
        if self._notices.end_samples():
            # Of other ranks, what they said last.
            known = self._journal.metadata.get("sites", {})
            self.record_facts(known | self._notices.site_facts())

    # --- stages, in their order ------------------------------------------------------------------

    def _record_alarms(self, judged: Judged) -> None:
        """Records alarms and advisories; their heads are audited at each sampled step from now."""
        for alarm in judged.found:
            if alarm.role.judges == "head":
                self._measurement.audits.suspects.setdefault(alarm.site, set()).update(alarm.heads)
            is_new = self._findings.add(alarm)
            self.snapshots.alarm(alarm.site, alarm.heads)
            already = self.switching.already(alarm)
            is_switched = len(already) == len(alarm.heads) > 0
            self._journal.record(event_of(alarm, "".join(already)), is_switched)
            if not alarm.role.is_advisory:
                self._notices.announce(alarm)
                judged.news += [alarm] if is_new else []

    def _begin_bursts(self, judged: Judged) -> None:
        are_wanted = self._measurement.plan.wanted.issuperset(SHARES)
        if are_wanted and not nothing_to_correct(self._journal.metadata, PRECISE):
            for alarm in judged.found:
                if alarm.site:
                    self._burst.want(alarm.site, alarm.heads, not alarm.role.is_advisory)
        self.follow_bursts()

    def _act(self, judged: Judged) -> None:
        """Switches and clips, between two steps."""
        self._stages.attempt("policy", partial(self._decide, judged))
        clip = partial(self._clipping.act, self._instrumentation.sites, judged.samples)
        self._stages.attempt("clip", clip)

    def _decide(self, judged: Judged) -> None:
        now, restless = self._schedule.last_ended or 0, self.detectors.restless()
        self.switching.decide(judged.unheeded, judged.step, now, restless, self._findings.way_back)

    def follow_bursts(self) -> None:
        """Listens to optimizers while heads are measured, and records why one was not."""
        if self._burst.is_on:
            self._burst.listen(partial(self._stages.attempt, "burst"))
        why = self._burst.why_not
        if why != self._journal.metadata.get("rounding_unmeasured", ""):
            self._journal.note({"rounding_unmeasured": why})

    # --- state -----------------------------------------------------------------------------------

    def state_dict(self, switched: dict[str, list[str]]) -> dict[str, Any]:
        return {
            "format": _FORMAT,
            "last_step": self._schedule.last_ended,
            "detectors": self.detectors.state_dict(),
            # None until it has acted on a checkpoint's alarms: the run that resumes must do so.
            "policy": self.policy.state_dict() if self.policy and not self._unheeded else None,
            "dry_run": self.dry_run,
            "stabilizers": switched,
            "is_of_parts": bool(self.switching.asked_elsewhere),
            "measurement": self._stages.attempt("samples", self._measurement.state_dict),
            "burst": self._burst.state_dict(),
            "why_no_share": self._burst.why_not,
            "shares": [row for one in self._journal.evidence.latest_shares() for row in one.rows()],
            **self._findings.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if "stabilizers" not in state:
            raise ValueError(
                "the state is not GuardBit's; it must be what `state_dict` of a session returned"
            )
        (state,) = state.get("all", (state,))
        stabilizers = state["stabilizers"]
        if state.get("format") != _FORMAT:
            self.switching.load(stabilizers, state.get("is_of_parts", False))
            log.warning(
                "the state is incomplete or of another version of GuardBit: the heads it has"
                " switched stay switched (%s), detectors and sums begin anew",
                ", ".join(stabilizers) or "none",
            )
            return
        self.detectors.load_state_dict(state["detectors"])
        # The decisions of a dry run were not carried out, so the policy starts afresh.
        known = state["policy"] if state["dry_run"] == self.dry_run else None
        if self.policy and known is not None:
            self.policy.load_state_dict(known)
        self.switching.load(stabilizers, state["is_of_parts"])
        stay = [f"{place_of(e)} to {e.stabilizer}" for e in self.switching.events(0, True)]
        if stay and ranks.rank() == 0:
            log.warning("heads stay switched as the state says: %s", "; ".join(stay))
        self._schedule.last_ended = state["last_step"]
        if state["measurement"] is not None:
            self._measurement.load_state_dict(state["measurement"])
        self._findings.load_state_dict(state)
        self._unheeded = self._findings.alarms if known is None else []
        self._burst.why_not = state["why_no_share"]
        for site, heads in state["burst"].items():
            self._burst.want(site, heads)
        self._journal.evidence.add(
            Sample(step, site, layer, name, (*[math.nan] * head, value))
            for step, site, layer, head, name, value in state["shares"]
        )
        self._stages.attempt("burst", self.follow_bursts)


class Known(NamedTuple):
    """What a rank knows of its part of the model, or all ranks of the whole; by module."""

    samples: list[Sample]  # of weights, and of the run
    metadata: dict[str, dict[str, Any]]  # what the run's metadata says
    table: list[KnownSite]  # whose calls were measured
    wanted: list[str]  # indicators
    asked: dict[str, list[str]]  # of the whole: in the modules that this rank does not hold
    modules: Sequence[str] = ()  # that could call attention
    heads: dict[str, range] | None = None  # of this rank


class Exchange:
    """Puts together what the ranks know of their parts of the model."""

    def __init__(self, instrumentation: Instrumentation, stages: Stages, journal: Journal) -> None:
        self._instrumentation, self._stages, self._journal = instrumentation, stages, journal
        # What the run's metadata says of this rank's attention modules.
        self._metadata: dict[str, dict[str, Any]] = {}
        self._are_compared, self._told = False, set[str]()

    def agree(self) -> bool:
        """Turns stages off that are off on some rank; returns whether all go on watching.

        Marks modules that some rank did not call, whose weights none may gather.
        """
        here = self._instrumentation.candidates

        def find() -> list[str]:
            outermost = next((site.enclosing[-1][1] for site in here.values()), None)
            parameters = outermost.parameters() if outermost and ranks.world_size() > 1 else ()
            are_shared = any(isinstance(p, DTensor) for p in parameters)
            return [name for name, site in here.items() if are_shared and not site.was_called]

        # After an error this rank still takes part: the others would wait for it.
        uncalled = self._stages.attempt("metrics", find) or []
        stages = (WATCHING, "capture", "metrics", "samples")
        are_off = [stage in self._stages.off for stage in stages]
        lists, of_ranks = ranks.exchanged("agree", uncalled, uncalled, *are_off)
        of_any = set().union(*lists)
        for name, site in here.items():
            site.is_uncalled_elsewhere = name in of_any
        for stage, *off in zip(stages, *of_ranks, strict=True):
            if any(off):
                self._stages.fail(stage, FailedElsewhereError("the stage failed on another rank"))
        return WATCHING not in self._stages.off

    def share(
        self,
        step: int,
        samples: list[Sample],
        facts: dict[str, dict[str, Any]] | None,
        sent: Sent | None,
        add_up: Callable[[list[KnownSite]], AttentionMetric | None],
    ) -> tuple[Known, AttentionMetric | None]:
        """Returns what the ranks know, and what they measured in calls, if all did, and alike.

        Records what they met or do differently. All call it.
        """
        attempt, instrumentation = self._stages.attempt, self._instrumentation
        self._metadata = self._metadata if facts is None else facts
        table, wanted = (sent.table, sent.wanted) if sent else ([], [])
        is_whole = sent is not None and sent.is_whole
        mine = Known(samples, self._metadata, table, wanted, {})

        def of_calls(table: list[KnownSite], are_whole: bool) -> AttentionMetric | None:
            is_any = are_whole and len(table) > 0
            return self._stages.always("metrics", partial(add_up, table)) if is_any else None

        if ranks.world_size() == 1:
            return mine, of_calls(table, is_whole)

        asked = attempt("stabilizers", instrumentation.asked)
        modules = sorted(instrumentation.candidates)
        sites = instrumentation.sites
        heads = attempt("ranks", lambda: {name: site.own_heads for name, site in sites.items()})
        mine = mine._replace(asked=asked or {}, modules=modules, heads=heads)
        # Not why: each rank may have its own reason, as with the name of its device.
        unfound = [n for n, known in self._metadata.items() if known["weights_unavailable"]]
        values = (s.values for s in samples if s.indicator == "w_q_spectral_norm")
        norms = [norm for of_heads in values for norm in of_heads if math.isfinite(norm)]
        switched = [(name, of) for name, of in sorted((asked or {}).items()) if {*of} - {"none"}]
        code = 0 if asked is None else zlib.crc32(repr(switched).encode())
        own, self._journal.own = self._journal.own, []
        met = zlib.crc32(repr(own).encode())
        part = heads, unfound, table, wanted
        numbers = is_whole, sum(norms), len(norms), code, met
        parts, of_ranks = ranks.exchanged("known", mine, part, *numbers)
        are_whole = all(of[0] for of in of_ranks) and all(one.wanted == wanted for one in parts)
        of_all = joined_tables([part.table for part in parts])
        # At once: the others would wait for a rank on which something else fails before.
        metric = of_calls(of_all, are_whole)
        samples_of_all = joined([part.samples for part in parts])
        whole = mine._replace(samples=samples_of_all, metadata={}, table=of_all, asked={})
        for part in reversed(parts):
            whole.metadata.update(part.metadata)
            whole.asked.update({n: a for n, a in part.asked.items() if n not in mine.metadata})
        for name, known in whole.metadata.items():
            whys = {part.metadata.get(name, known)["weights_unavailable"] for part in parts}
            if None in whys and len(whys) > 1:
                known["weights_unavailable"] = f"on some ranks: {min(whys - {None})}"
        names = {tuple(part.modules) for part in parts}, {tuple(part.metadata) for part in parts}
        if not self._are_compared and min(map(len, names)) > 1:
            if ranks.rank() == 0:
                log.info("%s; those of rank 0: %s", PARTS, ", ".join(parts[0].metadata) or "none")
            self._journal.note({"parallel": PARTS})
        self._are_compared = True
        # Ranks that hold different modules do not compare their weights.
        if len({repr(part.heads) for part in parts}) == 1:
            self.compare(step, [of[1:4] for of in of_ranks])
        if len({of[4] for of in of_ranks}) > 1:
            of_all_ranks = ranks.of_each_part("events", own, own)
            for event in dict.fromkeys(event for events in of_all_ranks for event in events):
                if event not in own:
                    self._journal.record(event)
        return whole, metric

    def compare(self, step: int, numbers: Sequence[tuple[float, ...]]) -> None:
        """Records, once, whether ranks of the same modules have other weights or switches.

        `numbers` are each rank's sum and number of W_Q's norms, and the code of its switches.
        """
        sums, counts, switched = zip(*numbers, strict=True)
        # The sum of a rank that could not take all norms says nothing, nor does one after an error.
        are_all = min(counts) == max(counts)
        are_other = are_all and max(sums) - min(sums) > _SAME_WEIGHTS * max(sums)
        told = {_OTHER_WEIGHTS: are_other, _OTHER_SWITCHES: len({*switched} - {0}) > 1}
        for why in [why for why, is_so in told.items() if is_so and why not in self._told]:
            self._told.add(why)
            self._journal.record(Event(step, "monitor_error", "", (), why))


def joined(parts: Sequence[Sequence[Sample]]) -> list[Sample]:
    samples: dict[tuple[int, str, str], Sample] = {}
    for sample in (sample for part in parts for sample in part):
        key = sample.step, sample.site, sample.indicator
        first = samples.setdefault(key, sample)
        if first is not sample and len(first.values) == len(sample.values):
            values = tuple(
                other if math.isnan(value) else value
                for value, other in zip(first.values, sample.values, strict=True)
            )
            samples[key] = replace(first, values=values)
    return list(samples.values())
