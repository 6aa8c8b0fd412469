"""The rules on audits: the queries of a head train on rounding error, or may."""

from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import numpy as np

from guardbit.monitor.detectors.rule import (
    Checked,
    Finding,
    Snapshot,
    State,
    Values,
    growth_of_model,
    heads_where,
)
from guardbit.records import Role

#: Evidence is cut here, above any threshold in use.
MOST_WEALTH = 1e300


def bet(
    state: State, site: str, outcome: Values, tolerated: float, stakes: tuple[float, ...]
) -> Values:
    """Plays one round per head, and returns the heads' evidence."""
    kept = state.get(site, [])
    wealth = np.array(kept + [[0.0] * len(stakes)] * (len(outcome) - len(kept)))
    played = (wealth + 1.0) * (1.0 + np.array(stakes) * (outcome[:, None] / tolerated - 1.0))
    # Without a limit it would overflow, and reach a threshold that nothing should reach.
    np.copyto(wealth, np.minimum(played, MOST_WEALTH), where=~np.isnan(outcome)[:, None])
    state[site] = wealth.tolist()
    return wealth.sum(1) / len(stakes)


#: Mean entropy of attention, in nats, below which a head is saturated. The largest P of a row is at
#: least 1 minus its entropy, so BF16 rounds that to 1: the exact dQ has vanished, and its error,
#: as a part of it, says nothing. Heads of the failing runs come to this after their first alarm.
SATURATED = 2.0**-9

#: Growth of the whole model's logits from which on no audit counts. At twice the study's rate
#: audits are large too, in up to ten layers of twelve, from a growth of 23 on, and correction does
#: not help; `model_logits` says so at 64. In the runs at its rate the growth is at most 13.
MODEL_GROWTH = 32.0


def counted_errors(snapshot: Snapshot, state: State) -> dict[str, Values]:
    """Returns site -> the sizes of the audited errors of dQ, up to 1; NaN where none counts."""
    counted, audited = {}, snapshot.of_trained("dq_coherent_error")
    is_models = bool(audited) and growth_of_model(state, snapshot) >= MODEL_GROWTH
    for site, errors in audited.items():
        entropy = snapshot.last_of("attention_entropy", site, len(errors))
        counts = ~(entropy < SATURATED) & snapshot.has_moved(site, len(errors)) & (not is_models)
        counted[site] = np.where(counts, np.minimum(np.abs(errors), 1.0), np.nan)
    return counted


@dataclass(frozen=True, slots=True)
class GradientError(Checked):
    """The rounding error of a head's dQ adds up along the top direction of its W_Q.

    The sign of `dq_coherent_error` is that of the direction, so arbitrary, and its size counts, up
    to 1: the whole gradient. It does not count where attention is saturated, see `SATURATED`,
    where the whole model's logits run away, see `MODEL_GROWTH`, in heads that do not train, and in
    those whose logits and W_Q are what they were when the run began: a checkpoint's level.

    `tolerated`: in the sound runs no head's mean is above 0.007. Half of it would warn by up to
    5,000 steps earlier in five of twelve runs, and alarm 20 instead of 12 of 70 runs in heads that
    were corrected late, where saturated softmax makes small errors large. Errors of 1 fire in the
    fifth audit, of 0.5 in the seventh.

    Attributes:
        tolerated: Mean size of the coherent error still called healthy; 0 to 1.
        audits_to_false_alarm: Mean number of audits of a head to a false alarm, at least.
        stakes: See `bet`.
    """

    reads: ClassVar[tuple[tuple[str, ...], ...]] = (("dq_coherent_error",),)

    role: ClassVar[Role] = Role(measures_cause=True)

    name: str = "gradient_error"
    tolerated: float = 0.1
    audits_to_false_alarm: float = 1e4
    stakes: tuple[float, ...] = (0.2, 0.5, 0.9)

    def __post_init__(self) -> None:
        Checked.__post_init__(self)
        if not self.stakes or max(self.stakes) > 1 or self.tolerated == 0:
            raise ValueError(
                f"{self.name} has the stakes {self.stakes} and tolerates {self.tolerated}; it takes"
                " at least one stake, none above 1, and a mean above 0"
            )

    def examine(self, snapshot: Snapshot, state: State) -> list[Finding]:
        """Returns the audited heads whose errors are large beyond reasonable doubt."""
        findings = []
        wealth = state.setdefault("wealth", {})
        for site, sizes in counted_errors(snapshot, state).items():
            evidence = bet(wealth, site, sizes, self.tolerated, self.stakes)
            fired = (evidence >= self.audits_to_false_alarm) & ~np.isnan(sizes)
            if heads := heads_where(fired):
                for head in heads:  # named again only by new evidence
                    wealth[site][head] = [0.0] * len(self.stakes)
                findings.append(Finding(site, heads, partial(self._why, sizes)))
        return findings

    def _why(self, sizes: Values, heads: tuple[int, ...]) -> str:
        top = max(heads, key=lambda head: sizes[head])
        return (
            f"rounding makes dQ of head {top} wrong by {100 * sizes[top]:.3g} % along W_Q's top"
            f" direction, and by more than {100 * self.tolerated:g} % in the mean (one false alarm"
            f" in {self.audits_to_false_alarm:,g} audits of a head)"
        )


@dataclass(frozen=True, slots=True)
class LargeError(Checked):
    """One audit finds half the mean error that `gradient_error` tolerates: an advisory, no alarm.

    The head is audited at every sampled step from then on, so that `gradient_error` need not wait
    for its turn, and what rounding does to its W_Q is measured. What counts as an error is said
    there. In the sound runs two audits of 81,507 are so large, 0.152 and 0.052; in all of the study
    that had every head audited and no correction, the first comes at steps 1,200 to 2,600, but for
    one at 6,800.

    Attributes:
        tolerated: Size of a coherent error of dQ above which a head is named.
    """

    reads: ClassVar[tuple[tuple[str, ...], ...]] = (("dq_coherent_error",),)

    role: ClassVar[Role] = Role(is_advisory=True)

    name: str = "large_error"
    tolerated: float = 0.05

    def examine(self, snapshot: Snapshot, state: State) -> list[Finding]:
        """Returns the heads whose audit at this step shows a large error."""
        return [
            Finding(site, heads, partial(_why_large, sizes))
            for site, sizes in counted_errors(snapshot, state).items()
            if (heads := heads_where(sizes > self.tolerated))
        ]


def _why_large(sizes: Values, heads: tuple[int, ...]) -> str:
    top = max(heads, key=lambda head: sizes[head])
    return (
        f"dQ of head {top} is wrong by {100 * sizes[top]:.3g} % along W_Q's top direction; it is"
        " audited at each sample from now on"
    )
