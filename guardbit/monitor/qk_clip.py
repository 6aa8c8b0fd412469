"""QK clip: scales a head's W_Q and W_K so that its largest logit comes back to a bound.

The rule is MuonClip's (arXiv 2507.20534): after an optimizer step a head whose largest logit S is
above the bound has its logits scaled by bound / S, by the square root of that in W_Q and in W_K.
S is of scale q k alone: no clip lowers what a mask or a position bias adds. Unlike a stabilizer a
clip changes the weights, and so the run. An optimizer that keeps copies of the weights in FP32, and
writes them back, undoes it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

import torch

from guardbit.monitor.layouts import LayoutUnavailable
from guardbit.monitor.sites import Site
from guardbit.records import Event, Sample

#: A head that is clipped again and again is told once in so many steps.
TOLD_EVERY = 1000
#: So many clips in a row, of which the next sample shows nothing, are enough.
MOST_IN_VAIN = 2


class _Clipped(NamedTuple):
    """The head of an attention module that a clip scaled most.

    Attributes:
        head: Its number.
        logit: Its largest logit, before the clip.
        scale: By how much its logits were scaled.
        norm: Spectral norm of its W_Q before the clip; NaN if unknown.
        in_vain: How many clips before it, in a row, lowered W_Q and not the logits.
    """

    head: int
    logit: float
    scale: float
    norm: float
    in_vain: int

    def in_vain_now(self, logit: float, norm: float) -> int:
        """Returns `in_vain` with this clip, from what the next sample shows."""
        if self.in_vain == MOST_IN_VAIN:
            return self.in_vain
        # Less than half of the way, in logarithms; W_Q has the square root of the scale.
        is_as_large = logit > self.logit * self.scale**0.5
        is_scaled = norm < self.norm * self.scale**0.25
        return self.in_vain + 1 if is_as_large and is_scaled else 0


def clip(site: Site, max_logits: Sequence[float], bound: float) -> dict[int, float]:
    """Scales the heads of an attention module that are above the bound, in place."""
    scales = [bound / s if bound < s < float("inf") else 1.0 for s in max_logits]
    clipped = {head: scale for head, scale in enumerate(scales) if scale < 1}
    if clipped:
        site.scale_logits(torch.tensor(scales, dtype=torch.float64))
    return clipped


class Clipping:
    """Clips the heads that sampled steps find above a bound, and records it."""

    def __init__(self, is_dry_run: bool, record: Callable[[Event], None]) -> None:
        self._is_dry_run, self._record = is_dry_run, record
        # (attention module, head) -> step of the event that told it; (module, -1): a refusal.
        self._told: dict[tuple[str, int], int] = {}
        self._clipped: dict[str, _Clipped] = {}

    def act(
        self, sites: Mapping[str, Site], samples: Iterable[Sample], bound: float, why: str
    ) -> None:
        """Clips by the samples of one step; called between steps."""
        samples = list(samples)
        logits = [sample for sample in samples if sample.indicator == "max_logit"]
        norms = {s.site: s.values for s in samples if s.indicator == "w_q_spectral_norm"}
        # All ranks see the same samples, so all of them refuse, or none.
        are_parts = any(sample.site not in sites for sample in logits)
        for sample in logits:
            above = tuple(head for head, s in enumerate(sample.values) if s > bound)
            if not above:
                continue
            site = None if are_parts else sites[sample.site]
            refusal = self._refusal(site, sites, sample, norms.get(sample.site), bound)
            if refusal is not None:
                if self._is_new(sample.step, sample.site, (-1,)):
                    sentence = f"not clipped: {refusal} ({why})"
                    self._record(Event(sample.step, "refusal", sample.site, above, sentence))
            elif self._is_new(sample.step, sample.site, above):
                largest = max(sample.values[head] for head in above)
                sentence = (
                    f"W_Q and W_K were scaled so that logits end at {bound:,g}; the largest was"
                    f" {largest:,.0f} ({why})"
                )
                self._record(Event(sample.step, "clip", sample.site, above, sentence))

    def _refusal(
        self,
        site: Site | None,
        sites: Mapping[str, Site],
        sample: Sample,
        norms: Sequence[float] | None,
        bound: float,
    ) -> str | None:
        """Clips a module's heads; returns why not where that did not happen."""
        if self._is_dry_run:
            return "dry run"
        if site is None:
            return "ranks hold different parts of the model"
        norms = norms or [math.nan] * len(sample.values)
        in_vain = 0
        last = self._clipped.get(sample.site)
        if last is not None:
            in_vain = last.in_vain_now(sample.values[last.head], norms[last.head])
            if in_vain == MOST_IN_VAIN:
                self._clipped[sample.site] = last._replace(in_vain=in_vain)
                return f"{in_vain} clips of head {last.head} lowered W_Q and not the logits"
        try:
            if (shared := _sharing(site, sites)) is not None:
                return (
                    f"its W_Q or W_K is that of '{shared}', too, which a clip would scale as well"
                )
            clipped = clip(site, sample.values, bound)
        except LayoutUnavailable as unavailable:
            return str(unavailable)
        if clipped:
            head = min(clipped, key=clipped.__getitem__)
            self._clipped[sample.site] = _Clipped(
                head, sample.values[head], clipped[head], norms[head], in_vain
            )
        return None

    def _is_new(self, step: int, site: str, heads: Sequence[int]) -> bool:
        new = [h for h in heads if step - self._told.get((site, h), -TOLD_EVERY) >= TOLD_EVERY]
        self._told.update({(site, head): step for head in new})
        return bool(new)


def _sharing(site: Site, sites: Mapping[str, Site]) -> str | None:
    """Returns the name of another module that has some of the weights that a clip scales."""
    scaled = set(map(id, site.scaled_parameters()))
    for name, other in sites.items():
        if other is not site and not scaled.isdisjoint(map(id, other.module.parameters())):
            return name
    return None
