"""What ranks that hold different parts of a model report to each other after a sampled step."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

from guardbit.monitor import ranks
from guardbit.monitor.journal import Journal
from guardbit.monitor.measure import Received
from guardbit.monitor.sites import Instrumentation
from guardbit.monitor.stages import Stages, log
from guardbit.records import Event, Sample

#: What the run's metadata says where ranks hold different modules.
PARTS = (
    "ranks hold different attention modules, as in pipeline parallelism: each measures and switches"
    " its own, and rank 0 records all"
)

#: The stages that go on while they do on all ranks. Without the first, nothing is exchanged.
AGREED = ("watching", "capture", "metrics", "samples")

_OTHER_WEIGHTS = (
    "ranks hold modules of the same names with different weights, as pipeline stages do that each"
    " number their layers from 0: their rows are added up as if they were one module, and only the"
    " weights of rank 0 are recorded, so the heads of the other ranks are NOT guarded one by one;"
    " give the modules of each stage names of their own"
)
# Largest relative difference of ranks with the same weights, in the sum of W_Q's norms. Replicas
# differ by FP32's rounding, stages by their random weights, 1e-3 and more.
_SAME_WEIGHTS = 1e-4


class Part(NamedTuple):
    """What a rank knows of its part of the model, or all ranks of the whole; by module."""

    samples: list[Sample]  # of weights, and of the run
    refusals: dict[str, str | None]  # why no call so far could be switched, or None
    asked: dict[str, list[str]]  # of the whole: in the modules that this rank does not hold
    metadata: dict[str, dict[str, Any]]  # what the run's metadata says
    # Events of this rank alone since the last sampled step: attention that it did not see, and what
    # its switched heads ran.
    recorded: list[Event]


class Known(NamedTuple):
    """What all ranks have found out together about a sampled step."""

    failed: list[str]  # the stages of `AGREED` that have failed on some rank
    whole: Part
    received: Received | None = None  # what has come to the host
    error: Exception | None = None  # why nothing has


class Exchange:
    """Puts together what the ranks know of their parts of the model."""

    def __init__(self, instrumentation: Instrumentation, stages: Stages, journal: Journal) -> None:
        self._instrumentation, self._stages, self._journal = instrumentation, stages, journal
        # What the run's metadata says of this rank's attention modules.
        self.metadata: dict[str, dict[str, Any]] = {}
        self._lacking: set[tuple[str, str]] = set()
        # Whether ranks hold different parts, and other weights by the same names; None: not known.
        self.are_parts: bool | None = None
        self._are_other = False

    def log_what_is_lacking(self) -> None:
        """Logs which weights this rank cannot read; what rank 0 lacks, the journal says."""
        for name, known in self.metadata.items() if ranks.rank() > 0 else ():
            why = known["weights_unavailable"]
            if why and (name, why) not in self._lacking:
                self._lacking.add((name, why))
                log.warning("rank %d: %s", ranks.rank(), why)

    def begin(self, step: int, receive: Callable[[bool], Received | None]) -> Callable[[], Known]:
        """Begins what ranks exchange of a sampled step that has ended; all ranks call it.

        Several ranks do it beside training, so that none waits for the device or for another rank
        before the result is asked for.

        Args:
            step: The step.
            receive: Returns what this rank has measured, or all, which then all call it.
        """
        attempt, sites = self._stages.attempt, self._instrumentation.sites

        def of_sites(attribute: str) -> dict[str, Any]:
            return {name: getattr(site, attribute) for name, site in sites.items()}

        several = ranks.world_size() > 1
        refusals = attempt("refusals", lambda: of_sites("lasting_refusal"))
        asked = attempt("stabilizers", self._instrumentation.asked) if several else {}
        recorded, self._journal.own = self._journal.own, []
        mine = Part([], refusals or {}, asked or {}, self.metadata, recorded)
        heads = attempt("ranks", lambda: of_sites("own_heads")) if several else None
        names = sorted(self._instrumentation.candidates), list(sites)
        exchange = partial(self._exchange, step, set(self._stages.off), mine, heads, names, receive)
        return ranks.beside_training(exchange).result if several else exchange

    def _exchange(
        self,
        step: int,
        off: set[str],
        mine: Part,
        heads: object,
        names: tuple[list[str], list[str]],
        receive: Callable[[bool], Received | None],
    ) -> Known:
        are_on = ranks.all_agree(off.isdisjoint(AGREED), AGREED)
        failed = [] if are_on else [x for x in AGREED if not ranks.all_agree(x not in off, x)]
        if "watching" in failed:
            return Known(failed, mine._replace(recorded=[]))
        if self.are_parts is None:
            same = [ranks.all_agree(True, some) for some in names]
            self.are_parts = not any(same)
        received = error = None
        try:
            received = None if "samples" in failed else receive("metrics" not in failed)
        except Exception as raised:  # the other ranks wait for this one all the same
            error = raised
        mine = mine._replace(samples=received.samples if received else [])
        parts = ranks.of_each_part(mine, heads)
        whole = Part(joined([part.samples for part in parts]), {}, {}, {}, [])
        for part in reversed(parts):
            whole.refusals.update(part.refusals)
            whole.metadata.update(part.metadata)
            whole.asked.update({n: a for n, a in part.asked.items() if n not in mine.asked})
        others = dict.fromkeys(event for part in parts[1:] for event in part.recorded)
        whole.recorded.extend(event for event in others if event not in parts[0].recorded)
        if ranks.world_size() > 1 and len(parts) == 1 and self._finds_other_weights(mine.samples):
            whole.recorded.append(Event(step, "monitor_error", "", (), _OTHER_WEIGHTS))
        return Known(failed, whole, received, error)

    def _finds_other_weights(self, samples: list[Sample]) -> bool:
        """Whether it now turns out that modules of the same names have different weights."""
        values = (s.values for s in samples if s.indicator == "w_q_spectral_norm")
        norms = [norm for of_heads in values for norm in of_heads if math.isfinite(norm)]
        sums, counts = zip(*ranks.gathered("norms", sum(norms), len(norms)), strict=True)
        # The sum of a rank that could not take all norms says nothing.
        are_all = min(counts) == max(counts)
        before = self._are_other
        self._are_other |= are_all and max(sums) - min(sums) > _SAME_WEIGHTS * max(sums)
        return self._are_other and not before


def joined(parts: Sequence[Sequence[Sample]]) -> list[Sample]:
    """Joins the samples of ranks with different parts of a model."""
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
