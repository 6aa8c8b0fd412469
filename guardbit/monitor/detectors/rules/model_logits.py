"""The rule `model_logits`: the logits of all layers run away at once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from guardbit.monitor.detectors.rule import (
    Finding,
    Snapshot,
    State,
    check_thresholds,
    growth_of_model,
    heads_where,
)
from guardbit.records import Role


@dataclass(frozen=True, slots=True)
class ModelLogits:
    """The logits of the whole model run away: the learning rate's work, not one head's.

    Rounding fails in a single layer (section 3.2); at too high a rate all layers go at once. The
    statistic is the lower quartile, over the layers that train, of the largest logit over its first
    value, on two samples in a row. First logits below 16 count as 16, see `FLAT`. Logits that a
    checkpoint brings along are a level: however large, they alarm nobody.

    Largest quartile in the stable runs 135 (in any three of their layers, taken for a model, 495),
    in the failing run 123; the learning-rate runs pass 1,024, which is 64 times 16, at step 1,000,
    and end at 21,000 and 85,000.

    Attributes:
        growth: Smallest growth that fires.
    """

    reads: ClassVar[tuple[str, ...]] = ("max_logit",)

    role: ClassVar[Role] = Role("model")

    name: str = "model_logits"
    growth: float = 64.0

    def __post_init__(self) -> None:
        check_thresholds(self)

    def examine(self, snapshot: Snapshot, state: State) -> list[Finding]:
        """Returns the heads that have grown so far, where most modules have."""
        measured = snapshot.of_trained("max_logit")
        if not measured:
            return []
        growth = growth_of_model(state, snapshot)
        lasting = min(state.get("last", 0.0), growth)
        state["last"] = growth
        if lasting < self.growth:
            return []
        why = (
            f"in three of four attention modules the largest logit has grown {lasting:.3g}-fold or"
            f" more since it was first measured (threshold {self.growth:g})"
        )
        first = state["first"]
        high = {
            site: heads_where(np.abs(logits) >= self.growth * first[site])
            for site, logits in measured.items()
            if site in first
        }
        return [Finding(site, heads, why) for site, heads in high.items() if heads]
