"""The rule `common_mode`: a head's keys have so much in common that rounding has taken hold."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import numpy as np

from guardbit.monitor.detectors.rule import (
    Finding,
    Snapshot,
    State,
    Values,
    check_thresholds,
    heads_where,
    smaller_of_last_two,
)
from guardbit.records import Role


@dataclass(frozen=True, slots=True)
class CommonMode:
    """A head has large logits and attends to many keys alike: an advisory, no alarm.

    Softmax does not see what the scores of a row have in common, and in exact arithmetic no
    gradient does. An error of delta does: it is multiplied with the mean of the keys, where the
    true dQ has their differences only. Where many keys share a row (`entropy`), the differences of
    its scores are a few nats. Beyond `logit`, the reciprocal of BF16's rounding error, what is in
    common outweighs the differences by more than delta's rounding makes up for. (FP16 is eight
    times as fine.)

    In 53 of 59 runs of the study at 1.5e-3 without a switch some heads come to be so, by step 7,600
    at the latest, and most of these runs were not seen to fail; in the nine that were corrected
    from the start none ever is. It says where to look, and heads that it names are audited at each
    sampled step from then on, as long as they are few. An additive bias, such as ALiBi's, counts as
    a logit: where it is large by itself, the advisory says nothing.

    Attributes:
        logit: Smallest largest logit, on two samples in a row.
        entropy: Smallest entropy of a row's probabilities, mean over the rows, likewise, nats.
    """

    reads: ClassVar[tuple[str, ...]] = ("max_logit", "attention_entropy")

    role: ClassVar[Role] = Role(is_advisory=True)

    name: str = "common_mode"
    logit: float = 256.0
    entropy: float = 3.5

    def __post_init__(self) -> None:
        check_thresholds(self)

    def examine(self, snapshot: Snapshot, state: State) -> list[Finding]:
        """Returns the heads that are so on two samples in a row."""
        findings = []
        entropies = snapshot.of("attention_entropy")
        for site, logits in snapshot.of("max_logit").items():
            if site not in entropies:
                continue
            high = smaller_of_last_two(state.setdefault("logit", {}), site, np.abs(logits))
            wide = smaller_of_last_two(state.setdefault("entropy", {}), site, entropies[site])
            if heads := heads_where((high >= self.logit) & (wide >= self.entropy)):
                findings.append(Finding(site, heads, partial(_why, high, wide)))
        return findings


def _why(high: Values, wide: Values, heads: tuple[int, ...]) -> str:
    top = max(heads, key=lambda head: high[head])
    return (
        f"rounding may have taken hold: head {top} has logits of {high[top]:.3g} while a row "
        f"attends to {np.exp(wide[top]):.2g} keys, so its keys are probably nearly alike, and an "
        "error of delta does not cancel in dQ"
    )
