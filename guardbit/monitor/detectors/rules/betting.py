"""A sequential test of a bounded mean: bets that lose in the long run unless the mean is large."""

from __future__ import annotations

import numpy as np

from guardbit.monitor.detectors.values import State, Values

#: Evidence is cut here, above any threshold in use.
MOST_WEALTH = 1e300


def bet(
    state: State, site: str, outcome: Values, tolerated: float, stakes: tuple[float, ...]
) -> Values:
    """Plays one round a head, and returns the heads' evidence.

    The null hypothesis is that the mean of the outcome, given the past, is at most `tolerated`.
    M = (M + 1) (1 + stake (outcome / tolerated - 1)), averaged over the stakes, is an e-detector of
    the Shiryaev-Roberts kind (Shin, Ramdas and Rinaldo, arXiv 2203.03532; bets on a bounded mean:
    Waudby-Smith and Ramdas, arXiv 2010.09686): who fires at M >= A makes a false alarm no sooner
    than after A rounds of a head on average, whatever the outcomes' distribution and dependence.

    Args:
        state: What is remembered, plain JSON values; updated.
        site: The attention module.
        outcome: One value a head, 0 or more; NaN where a head does not play.
        tolerated: The largest mean that is called healthy, above 0.
        stakes: From 0 to 1, the share of the wealth that is at risk in a round.

    Returns:
        M, one value a head, as it was where a head does not play.
    """
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
