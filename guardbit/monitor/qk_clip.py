"""QK clip: scales a head's W_Q and W_K so that its largest logit comes back to a bound.

The rule is MuonClip's (arXiv 2507.20534): after an optimizer step a head whose largest logit S is
above the bound has its logits scaled by bound / S, by the square root of that in W_Q and in W_K.
Unlike a stabilizer it changes the weights, and so the run. An optimizer that keeps copies of the
weights in FP32, and writes them back, undoes it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

import torch

from guardbit.monitor.layouts import LayoutUnavailable
from guardbit.monitor.sites import Site
from guardbit.records import Event, Sample

#: A head that is clipped again and again is told once in so many steps.
TOLD_EVERY = 1000


def clip(site: Site, max_logits: Sequence[float], bound: float) -> dict[int, float]:
    """Scales the heads of an attention module that are above the bound, in place.

    Where query heads share a key head, the key is scaled for the one that needs it most; the
    queries of the others make up for that, so that their logits stay.

    Args:
        site: The module; between optimizer steps.
        max_logits: The largest logit of each query head, after softmax's scale; NaN where it is
            unknown.
        bound: The largest logit that is left alone.

    Returns:
        Head -> by how much its logits were scaled; empty if no head is above the bound.

    Raises:
        LayoutUnavailable: If the module's weights cannot be scaled, with the reason; nothing is
            changed then.
    """
    scales = [bound / s if bound < s < float("inf") else 1.0 for s in max_logits]
    clipped = {head: scale for head, scale in enumerate(scales) if scale < 1}
    if clipped:
        site.scale_logits(torch.tensor(scales, dtype=torch.float64))
    return clipped


class Clipping:
    """Clips the heads that sampled steps find above a bound, and records it.

    Args:
        is_dry_run: Whether to record what would be clipped, and to scale nothing.
        record: Takes the events.
    """

    def __init__(self, is_dry_run: bool, record: Callable[[Event], None]) -> None:
        self._is_dry_run, self._record = is_dry_run, record
        # (attention module, head) -> step of the event that told it; (module, -1): a refusal.
        self._told: dict[tuple[str, int], int] = {}

    def act(
        self, sites: Mapping[str, Site], samples: Iterable[Sample], bound: float, why: str
    ) -> None:
        """Clips by the samples of one step; called between steps.

        Args:
            sites: The attention modules on this rank.
            samples: What the step measured, of all ranks.
            bound: See `clip`.
            why: Why heads are clipped at all, a clause.
        """
        logits = [sample for sample in samples if sample.indicator == "max_logit"]
        # All ranks see the same samples, so all of them refuse, or none.
        are_parts = any(sample.site not in sites for sample in logits)
        for sample in logits:
            above = tuple(head for head, s in enumerate(sample.values) if s > bound)
            if not above:
                continue
            refusal = self._refusal(None if are_parts else sites[sample.site], sample, bound)
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

    def _refusal(self, site: Site | None, sample: Sample, bound: float) -> str | None:
        """Clips a module's heads; returns why not where that did not happen."""
        if self._is_dry_run:
            return "dry run"
        if site is None:
            return "ranks hold different parts of the model"
        try:
            clip(site, sample.values, bound)
        except LayoutUnavailable as unavailable:
            return str(unavailable)
        return None

    def _is_new(self, step: int, site: str, heads: Sequence[int]) -> bool:
        new = [h for h in heads if step - self._told.get((site, h), -TOLD_EVERY) >= TOLD_EVERY]
        self._told.update({(site, head): step for head in new})
        return bool(new)
