"""The rule `gradient_error`: the queries of a head train on rounding error."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
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
)
from guardbit.records import Role

#: Evidence is cut here, above any threshold in use.
MOST_WEALTH = 1e300


def bet(
    state: State, site: str, outcome: Values, tolerated: float, stakes: tuple[float, ...]
) -> Values:
    """Plays one round a head, and returns the heads' evidence."""
    kept = state.get(site, [])
    wealth = np.array(kept + [[0.0] * len(stakes)] * (len(outcome) - len(kept)))
    played = (wealth + 1.0) * (1.0 + np.array(stakes) * (outcome[:, None] / tolerated - 1.0))
    # Without a limit it would overflow, and a threshold that nothing is to reach would be reached.
    np.copyto(wealth, np.minimum(played, MOST_WEALTH), where=~np.isnan(outcome)[:, None])
    state[site] = wealth.tolist()
    return wealth.sum(1) / len(stakes)


def settle(state: State, site: str, heads: tuple[int, ...]) -> None:
    """Lets heads begin anew, so that they are named again only by new evidence."""
    for head in heads:
        state[site][head] = [0.0] * len(state[site][head])


#: Mean entropy of attention, in nats, below which a head is saturated. The largest P of a row is at
#: least 1 minus its entropy, so BF16 rounds that to 1: the exact dQ has vanished, and its error,
#: as a part of it, says nothing. Heads of the failing runs come to this after their first alarm.
SATURATED = 2.0**-9


@dataclass(frozen=True, slots=True)
class GradientError:
    """The rounding error of a head's dQ adds up along the top direction of its W_Q.

    The audit computes dQ once more in FP32. Its `dq_coherent_error` is the error along the top
    direction, summed over the rows with its sign, as a part of the sum of the sizes of dQ along it.
    The sign is that of the direction, which is arbitrary, so the size counts, up to 1: the whole
    gradient. Where it is measured, `w_q_push` counts as well, with its sign: a smaller error that
    keeps pushing the norm up. The rule measures the cause, whatever the logits, and needs no peers.
    The size does not count where attention is saturated, see `SATURATED`.

    `tolerated`: in the sound runs no audit finds more than 0.019, and no head's mean is above
    0.007. A head is audited in turn, one of its module at a sampled step, at every sampled step
    once it is under suspicion. Errors of 1 fire in the fifth audit, of 0.5 in the seventh, or in
    the eighth where the push is measured. The push is cut at 1 in size, and 1 fires in the 19th
    audit, beside errors that do not. In the recorded runs no head's mean push over five audits or
    more is above 0.024, also where heads diverge: rows cancel in what dQ does to W_Q, and the push
    is held against their sizes. So what has fired was the size.

    Attributes:
        tolerated: Mean size of the coherent error, and mean push, still called healthy; 0 to 1.
        audits_to_false_alarm: Mean number of audits of a head to a false alarm, at least. Where
            the push is measured the rule makes two tests, and each must find twice as much.
        stakes: See `bet`.
    """

    reads: ClassVar[tuple[tuple[str, ...], ...]] = (("dq_coherent_error", "w_q_push"),)

    role: ClassVar[Role] = Role(measures_cause=True)

    name: str = "gradient_error"
    tolerated: float = 0.1
    audits_to_false_alarm: float = 1e4
    stakes: tuple[float, ...] = (0.2, 0.5, 0.9)

    def __post_init__(self) -> None:
        check_thresholds(self)
        if not self.stakes or max(self.stakes) > 1 or self.tolerated == 0:
            raise ValueError(
                f"{self.name} has the stakes {self.stakes} and tolerates {self.tolerated}; it takes"
                " at least one stake, none above 1, and a mean above 0"
            )

    def examine(self, snapshot: Snapshot, state: State) -> list[Finding]:
        """Returns the audited heads whose errors are large beyond reasonable doubt."""
        sizes = {}
        for site, errors in snapshot.of("dq_coherent_error").items():
            is_saturated = snapshot.last_of("attention_entropy", site, len(errors)) < SATURATED
            sizes[site] = np.where(is_saturated, np.nan, np.minimum(np.abs(errors), 1.0))
        # From -1..1 to 0..1, as bets need it.
        pushes = {
            site: (np.clip(values, -1.0, 1.0) + 1.0) / 2.0
            for site, values in snapshot.of("w_q_push").items()
        }
        # Two tests that each fire at twice the evidence make no more false alarms than one.
        needed = self.audits_to_false_alarm * (2 if sizes and pushes else 1)
        size, push = (state.setdefault(name, {}) for name in ("size", "push"))
        fair = (1.0 + self.tolerated) / 2.0
        return [
            *self._test(size, sizes, self.tolerated, needed, self._why_size),
            *self._test(push, pushes, fair, needed, self._why_push),
        ]

    def _test(
        self,
        state: State,
        outcomes: Mapping[str, Values],
        tolerated: float,
        needed: float,
        why: Callable[[Values, tuple[int, ...]], str],
    ) -> Iterator[Finding]:
        for site, outcome in outcomes.items():
            evidence = bet(state, site, outcome, tolerated, self.stakes)
            fired = (evidence >= needed) & ~np.isnan(outcome)
            if heads := heads_where(fired):
                settle(state, site, heads)
                yield Finding(site, heads, partial(why, outcome))

    def _why_size(self, sizes: Values, heads: tuple[int, ...]) -> str:
        top = max(heads, key=lambda head: sizes[head])
        return (
            f"rounding makes {sizes[top]:.2g} of dQ along the top direction of the W_Q of head "
            f"{top} now, and more than {self.tolerated:g} in the mean {self._odds}"
        )

    def _why_push(self, pushes: Values, heads: tuple[int, ...]) -> str:
        top = max(heads, key=lambda head: pushes[head])
        return (
            f"rounding pushes the W_Q spectral norm of head {top} up, by "
            f"{2 * pushes[top] - 1:+.2g} of what dQ does to it now, and by more than "
            f"{self.tolerated:g} in the mean {self._odds}"
        )

    @property
    def _odds(self) -> str:
        return f"(one false alarm in {self.audits_to_false_alarm:g} audits of a head)"
