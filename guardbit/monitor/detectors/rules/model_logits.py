"""The rule `model_logits`: the logits of all layers run away at once."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from guardbit.monitor.detectors.rule import Finding, Snapshot, State, check_thresholds, heads_where
from guardbit.records import Role


@dataclass(frozen=True, slots=True)
class ModelLogits:
    """The logits of the whole model run away: the learning rate's work, not one head's.

    Rounding fails in a single layer (section 3.2); at too high a rate all layers go at once. The
    statistic is the lower quartile over the layers of the largest logit, on two samples in a row:
    `growth` times what it was at first, or beyond `saturated`, also where the monitor came when it
    was too late to see it grow. From there on FP32 scores are coarser than the tolerance that
    counts as a tie, 2^-10: a limit of the arithmetic, whatever the model.

    Largest quartile in the stable runs 135 (in any three of their layers, taken for a model, 495),
    in the failing run 123; the learning-rate runs pass 1,024, which is 64 times 16, at step 1,000,
    8,192 at steps 2,600 and 3,000, and end at 21,000 and 85,000.

    Attributes:
        growth: Smallest ratio to the first quartile seen.
        flat: A first quartile below this counts as this, see `head_growth`.
        saturated: Smallest quartile that fires without having grown.
        sites: Smallest number of attention modules that is judged: of two, one is no majority.
    """

    reads: ClassVar[tuple[str, ...]] = ("max_logit",)

    role: ClassVar[Role] = Role("model")

    name: str = "model_logits"
    growth: float = 64.0
    flat: float = 16.0
    saturated: float = 8192.0
    sites: int = 3

    def __post_init__(self) -> None:
        check_thresholds(self)

    def examine(self, snapshot: Snapshot, state: State) -> list[Finding]:
        """Returns the high heads of every measured module, where the quartile is too high."""
        measured = snapshot.of("max_logit")
        if not measured or len(snapshot.latest["max_logit"]) < self.sites:
            return []
        # NaN is a head that was not measured.
        tops = [float(np.fmax.reduce(logits)) for logits in snapshot.latest["max_logit"].values()]
        tops = sorted(top for top in tops if not math.isnan(top))
        if not tops:
            return []
        quartile = tops[(len(tops) - 1) // 4]
        first = state.setdefault("first", max(quartile, self.flat))
        lasting = min(state.get("last", 0.0), quartile)
        state["last"] = quartile
        bound = min(self.growth * first, self.saturated)
        if lasting < bound:
            return []
        why = (
            f"three of four attention modules reach logits of {lasting:.3g} "
            f"(threshold {bound:.3g}), where they began at {first:.3g} or less"
        )
        high = {site: heads_where(logits >= bound) for site, logits in measured.items()}
        return [Finding(site, heads, why) for site, heads in high.items() if heads]
