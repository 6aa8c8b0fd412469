"""The rule `head_growth`: a head's query weights and logits outgrow the model's."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import ClassVar, NamedTuple

import numpy as np

from guardbit.monitor.detectors.rule import (
    FLAT,
    OVERFLOW,
    Checked,
    Finding,
    Snapshot,
    State,
    Values,
    from_plain,
    heads_where,
    smaller_of_last_two,
    to_plain,
)


class Lead(NamedTuple):
    """How far the heads of one attention module are ahead, one value per head."""

    # Logarithm of the factor by which the head has outrun what it was allowed; 0 or more, NaN where
    # it has not been measured yet.
    lead: Values
    log: Values  # logarithm of the head's value
    since: Values  # step at which the lead began
    growth: Values  # logarithm of the factor by which the head has grown since then
    typical: Values  # the same of the typical head


# Kept of a head: its logarithm, clock and step, of its last sample and of its lead's first.
_COLUMNS = 6


def outrun(
    state: State, step: int, values: Mapping[str, Values], over_peers: float, drift: float
) -> dict[str, Lead]:
    """Adds one sample to the leads of all heads."""
    clock, sites = state.setdefault("clock", 0.0), state.setdefault("sites", {})
    if not values:
        return {}
    # All heads of the model side by side: (columns, heads).
    past = np.concatenate(
        [
            [from_plain(column, len(of_site)) for column in sites.get(site, [[]] * _COLUMNS)]
            for site, of_site in values.items()
        ],
        axis=1,
    )
    last, first = past[:3], past[3:]
    sizes = np.concatenate(list(values.values()))
    log = np.log(np.where(sizes > 0, sizes, np.nan))
    # A module that was not measured for some samples has grown in all that the clock holds.
    change = log - last[0] - (clock - last[1])
    if grown := np.sort(change[~np.isnan(change)]).tolist():
        clock += max(0.0, grown[(len(grown) - 1) // 2])
    state["clock"] = clock
    allowed = over_peers * (clock - first[1]) + drift * (step - first[2]) / 1000
    lead = log - first[0] - allowed
    known = ~np.isnan(log)
    begins = known & ~(lead > 0)  # also where nothing was known
    now = np.stack([log, np.full_like(log, clock), np.full_like(log, step)])
    first = np.where(begins, now, first)
    after = np.concatenate([np.where(known, now, last), first])
    growth, typical, _ = now - first
    ahead = np.stack([np.where(begins, 0.0, lead), log, first[2], growth, typical])
    leads, end = {}, 0
    for site, of_site in values.items():
        start, end = end, end + len(of_site)
        sites[site] = [to_plain(column) for column in after[:, start:end]]
        leads[site] = Lead(*ahead[:, start:end])
    return leads


def restart(state: State, site: str, heads: tuple[int, ...]) -> None:
    """Sets the leads of heads to 0, so that they are named again only if they go on growing."""
    last, first = (state["sites"].get(site, [[]] * _COLUMNS)[i : i + 3] for i in (0, 3))
    for head in heads:
        # A head that came later may not have been measured by this state's indicator since.
        if head < len(last[0]):
            for now, begun in zip(last, first, strict=True):
                begun[head] = now[head]


#: Growth over the typical head's, from which on it counts as a lead.
OVER_PEERS = 2.5
#: E-folds in 1,000 steps that are no lead.
NORM_DRIFT = 0.05
#: The same of logits, which are single rows' extremes and walk further by themselves.
LOGIT_DRIFT = 0.3


@dataclass(frozen=True, slots=True)
class HeadGrowth(Checked):
    """A head's query weights, its logits or both outgrow the model's other heads.

    Rounding errors of delta that add up push the spectral norm of a head's W_Q, and with it its
    logits (arXiv 2510.04212, section 3.2, figures 3 and 11). In the runs we have it begins in heads
    whose norm is small. So growth counts from wherever it begins, see `outrun`, and no level does.
    The peers are the clock: in a young run, or at a high rate, all heads grow fast. Heads whose
    weights stand still do not count. A head is named again once it has grown by as much again.

    Either may be bounded, or not known. So each counts by itself, and both together for less. The
    norm says nothing if queries are normalised after W_Q, or while logits are noise: in a model of
    Llama's kind all W_Q of the first layer grew ten- to twentyfold where scores do not see it. A
    largest logit is one extreme row's: of two samples in a row the smaller one counts.

    In the sound runs, the stable ones, the shifted one and a compensated one at 3e-3 the largest
    lead of a norm is 0.31, of logits 1.92, and of both, as parts of what each must be, 0.59: half
    the thresholds spares them all. The failing runs reach one between steps 2,000 and 6,200.

    Attributes:
        norm: Smallest lead of a W_Q norm that fires, e-folds: a factor of 1.9.
        logit: Smallest lead of the largest logit that fires, e-folds: a factor of 47.
        together: Smallest sum of both, each as a part of what it must be alone, that fires.
    """

    reads: ClassVar[tuple[tuple[str, ...], ...]] = (("w_q_spectral_norm", "max_logit"),)

    name: str = "head_growth"
    norm: float = 0.63
    logit: float = 3.85
    together: float = 1.2

    def examine(self, snapshot: Snapshot, state: State) -> list[Finding]:
        """Returns the heads that have outgrown the others by enough."""
        last, norm_state, logit_state = (
            state.setdefault(name, {}) for name in ("last", "norm", "logit")
        )
        called: list[str] = state.setdefault("called", [])
        for site, values in snapshot.latest.get("max_logit", {}).items():
            if site not in called and not np.isnan(values).all():
                called.append(site)
        norms = {
            site: values
            for site, values in snapshot.of_trained("w_q_spectral_norm").items()
            # A teacher, or an average of weights, is never called in a backward.
            if site not in snapshot.normalised and (not called or site in called)
        }
        logits = {
            site: np.maximum(smaller_of_last_two(last, site, np.abs(values)), FLAT)
            for site, values in snapshot.of_trained("max_logit").items()
        }
        by_norm = outrun(norm_state, snapshot.step, norms, OVER_PEERS, NORM_DRIFT)
        by_logit = outrun(logit_state, snapshot.step, logits, OVER_PEERS, LOGIT_DRIFT)
        findings = []
        for site in dict.fromkeys([*by_norm, *by_logit]):
            of_norm = _part(by_norm.get(site), self.norm)
            if site in logits:
                # What the norm gained does not reach the scores.
                of_norm = np.where(logits[site] <= FLAT, 0.0, of_norm)
            of_logit = _part(by_logit.get(site), self.logit)
            fired = (of_norm >= 1) | (of_logit >= 1) | (of_norm + of_logit >= self.together)
            if heads := heads_where(fired):
                for its_state in (norm_state, logit_state):
                    restart(its_state, site, heads)
                tell = partial(_why, of_norm + of_logit, by_norm.get(site), by_logit.get(site))
                findings.append(Finding(site, heads, tell))
        return findings


def _part(ahead: Lead | None, needed: float) -> Values:
    """A lead as a part of what it must be; 0 if unknown."""
    if ahead is None:
        return np.zeros(1)
    lead = np.nan_to_num(ahead.lead, nan=0.0)
    return lead / needed if needed > 0 else np.where(np.isnan(ahead.lead), 0.0, math.inf)


def _why(parts: Values, by_norm: Lead | None, by_logit: Lead | None, heads: tuple[int, ...]) -> str:
    top = max(heads, key=lambda head: parts[head])
    clauses = [
        f"{name} to infinity"
        if math.exp(ahead.log[top]) > 0.99 * OVERFLOW
        else f"{name} by a factor of {math.exp(ahead.growth[top]):.3g} since step "
        f"{ahead.since[top]:.0f}, to {math.exp(ahead.log[top]):.3g}, that of the typical head by "
        f"{math.exp(ahead.typical[top]):.3g}"
        for name, ahead in (("W_Q spectral norm", by_norm), ("largest logit", by_logit))
        if ahead is not None and ahead.lead[top] > 0
    ]
    return f"head {top} outgrows the others: " + "; ".join(clauses)
