"""What ranks that hold different parts of a model report to each other after a sampled step.

In this order: which modules were not called ("uncalled"), whether stages are on ("agree"); weights
that are sharded, as norms are taken; the modules measured ("sites", "agree") and, if all ranks
measured theirs, the sums of calls ("state of"), then samples ("known"); at last codes of weights,
switches and events ("end") and, if codes of events differ, the events ("events").
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Sequence
from dataclasses import replace
from operator import attrgetter
from typing import Any, NamedTuple

from torch.distributed.tensor import DTensor

from guardbit.monitor import ranks
from guardbit.monitor.journal import Journal
from guardbit.monitor.sites import Instrumentation
from guardbit.monitor.stages import WATCHING, FailedElsewhereError, Stages, log
from guardbit.records import Event, Sample

#: What the run's metadata says where ranks hold different modules.
PARTS = (
    "ranks hold different attention modules, as in pipeline parallelism: each measures and switches"
    " its own, and rank 0 records all"
)

_OTHER_WEIGHTS = (
    "ranks hold modules of the same names with different weights, as pipeline stages do that each"
    " number their layers from 0, or Megatron's tensor parallelism: their rows are added up as if"
    " they were one module, and only the weights of rank 0 are recorded, so the heads of the other"
    " ranks are NOT guarded one by one; stages need names of their own, tensor parallelism DTensors"
)
_OTHER_SWITCHES = (
    "ranks have switched heads differently, so some of what they compute may not be corrected: load"
    " states and call `switch` on all ranks alike, not in `on_alarm`, which only rank 0 calls"
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
    modules: list[str]  # that could call attention
    heads: dict[str, range] | None  # of this rank


class Exchange:
    """Puts together what the ranks know of their parts of the model."""

    def __init__(self, instrumentation: Instrumentation, stages: Stages, journal: Journal) -> None:
        self._instrumentation, self._stages, self._journal = instrumentation, stages, journal
        # What the run's metadata says of this rank's attention modules.
        self._metadata: dict[str, dict[str, Any]] = {}
        self._are_compared, self._told = False, set[str]()
        # Of this rank, if all have the same modules: sum and number of W_Q's norms, and a code of
        # what is switched, or 0 if it is not known.
        self._numbers = 0.0, 0, 0

    def agree(self) -> bool:
        """Turns stages off that are off on some rank; returns whether all go on watching."""
        self._agree_on_weights()
        stages = (WATCHING, "capture", "metrics", "samples")
        are_on = ranks.all_agree(self._stages.off.isdisjoint(stages), stages)
        for stage in () if are_on else stages:
            if not ranks.all_agree(stage not in self._stages.off, stage):
                self._stages.fail(stage, FailedElsewhereError("the stage failed on another rank"))
        return WATCHING not in self._stages.off

    def _agree_on_weights(self) -> None:
        """Marks the modules that some rank has not called; all ranks call it.

        Ranks that share weights gather them together, so none may gather such a module's weights.
        """
        here = self._instrumentation.candidates

        def find() -> list[str]:
            outermost = next((site.enclosing[-1][1] for site in here.values()), None)
            parameters = outermost.parameters() if outermost and ranks.world_size() > 1 else ()
            are_shared = any(isinstance(p, DTensor) for p in parameters)
            return [name for name, site in here.items() if are_shared and not site.was_called]

        # After an error this rank still takes part: the others would wait for it.
        uncalled = self._stages.attempt("metrics", find) or []
        of_any = set().union(*ranks.of_each_part("uncalled", uncalled, uncalled))
        for name, site in here.items():
            site.is_uncalled_elsewhere = name in of_any

    def share(self, samples: list[Sample], facts: dict[str, dict[str, Any]] | None) -> Part:
        """Returns what the ranks know; all ranks call it."""
        attempt, several = self._stages.attempt, ranks.world_size() > 1
        self._metadata = self._metadata if facts is None else facts
        instrumentation = self._instrumentation

        def of_sites(what: str) -> dict[str, Any]:
            return {n: attrgetter(what)(site) for n, site in instrumentation.sites.items()}

        refusals = attempt("refusals", lambda: of_sites("limits.not_switchable"))
        asked = attempt("stabilizers", instrumentation.asked) if several else {}
        modules = sorted(instrumentation.candidates)
        heads = attempt("ranks", lambda: of_sites("own_heads")) if several else None
        mine = Part(samples, refusals or {}, asked or {}, self._metadata, modules, heads)
        # Not why: each rank may have its own reason, as with the name of its device.
        unfound = [n for n, known in self._metadata.items() if known["weights_unavailable"]]
        parts = ranks.of_each_part("known", mine, (heads, unfound))
        whole = Part(joined([part.samples for part in parts]), {}, {}, {}, [], None)
        for part in reversed(parts):
            whole.refusals.update(part.refusals)
            whole.metadata.update(part.metadata)
            whole.asked.update({n: a for n, a in part.asked.items() if n not in mine.refusals})
        if not several:
            return whole
        for name, known in whole.metadata.items():
            whys = {part.metadata.get(name, known)["weights_unavailable"] for part in parts}
            if None in whys and len(whys) > 1:
                known["weights_unavailable"] = f"on some ranks: {min(whys - {None})}"
        names = {tuple(part.modules) for part in parts}, {tuple(part.refusals) for part in parts}
        if not self._are_compared and min(map(len, names)) > 1:
            if ranks.rank() == 0:
                log.info("%s; those of rank 0: %s", PARTS, ", ".join(parts[0].refusals) or "none")
            self._journal.note({"parallel": PARTS})
        self._are_compared = True
        values = (s.values for s in samples if s.indicator == "w_q_spectral_norm")
        norms = [norm for of_heads in values for norm in of_heads if math.isfinite(norm)]
        switched = [(name, of) for name, of in sorted((asked or {}).items()) if {*of} - {"none"}]
        code = 0 if asked is None else zlib.crc32(repr(switched).encode())
        is_divided = any(part.heads != heads for part in parts)
        self._numbers = (0.0, 0, 0) if is_divided else (sum(norms), len(norms), code)
        return whole

    def tell(self, step: int) -> None:
        """Records what other ranks met in a sampled step, and whether ranks have parted.

        They part if their weights or switches differ. All ranks call it, also after an error.
        """
        if ranks.world_size() == 1:
            return
        own, self._journal.own = self._journal.own, []
        found = ranks.gathered("end", *self._numbers, zlib.crc32(repr(own).encode()))
        sums, counts, switched, met = zip(*found, strict=True)
        # The sum of a rank that could not take all norms says nothing, nor does one after an error.
        are_all = min(counts) == max(counts)
        are_other = are_all and max(sums) - min(sums) > _SAME_WEIGHTS * max(sums)
        told = {_OTHER_WEIGHTS: are_other, _OTHER_SWITCHES: len({*switched} - {0}) > 1}
        for why in [why for why, is_so in told.items() if is_so and why not in self._told]:
            self._told.add(why)
            self._journal.record(Event(step, "monitor_error", "", (), why))
        of_ranks = ranks.of_each_part("events", own, own) if len({*met}) > 1 else []
        for event in dict.fromkeys(event for events in of_ranks for event in events):
            if event not in own:
                self._journal.record(event)


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
