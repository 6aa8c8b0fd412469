"""The rules of the whole run, `model_logits` and `loss_departure`: its logits, and its loss."""

import math
import statistics
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from guardbit.monitor.detectors.rule import (
    OVERFLOW,
    Checked,
    Finding,
    Snapshot,
    State,
    growth_of_model,
    heads_where,
)
from guardbit.records import Role


@dataclass(frozen=True, slots=True)
class ModelLogits(Checked):
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


@dataclass(frozen=True, slots=True)
class LossDeparture(Checked):
    """The loss has left its best level: whatever the cause, the run is failing.

    It is no early sign. The statistic is the median loss of the last `steps` steps less the
    smallest such median so far. What is not finite, -inf too, counts as the largest number.

    Largest rise in the stable runs 0.33 nats (all at step 6,440, over the same hard batches), in
    the failing run 0.34; the learning-rate runs rise by 2.5 and 2.9, most of it before step 2,000.
    Over only 8 steps, a sound ViT that sees 16 images a step rose by 1.1 for a moment.

    Attributes:
        rise: Smallest rise that fires, in nats.
        spread: Smallest rise that fires, in units of the losses' own spread (their median
            absolute deviation scaled to a standard deviation) when they were at their best.
        samples: Smallest number of losses in a median, and to decide whether the loss is finite.
        steps: Number of steps that a median covers.
    """

    reads: ClassVar[tuple[str, ...]] = ("loss",)

    role: ClassVar[Role] = Role("loss")

    smallest: ClassVar[dict[str, int]] = {"samples": 1, "steps": 1}

    name: str = "loss_departure"
    rise: float = 1.0
    spread: float = 3.0
    samples: int = 8
    steps: int = 160

    def examine(self, snapshot: Snapshot, state: State) -> list[Finding]:
        """Returns one finding without heads, at site "", where the loss has risen."""
        findings = []
        for site, (loss, *_) in snapshot.of("loss").items():
            recent = state.setdefault("recent", [])
            recent.append([snapshot.step, float(loss) if abs(loss) < OVERFLOW else OVERFLOW])
            while len(recent) > self.samples and recent[0][0] <= snapshot.step - self.steps:
                del recent[0]
            if len(recent) < self.samples:
                continue
            losses = [value for _, value in recent]
            is_lost = statistics.median(losses[-self.samples :]) >= OVERFLOW / 2
            median = OVERFLOW if is_lost else statistics.median(losses)
            if median <= state.get("best", math.inf):
                deviation = statistics.median(abs(value - median) for value in losses)
                state.update(best=median, spread=1.4826 * deviation)
            rise = median - state["best"]
            if is_lost or rise >= max(self.rise, self.spread * state["spread"]):
                why = (
                    "the loss is not finite"
                    if is_lost
                    else f"the loss has risen to {median:.3g}, {rise:.2g} nats above its best "
                    f"(threshold {self.rise:g})"
                )
                findings.append(Finding(site, (), why))
        return findings
