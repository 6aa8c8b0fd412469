"""How far heads have outrun the typical head: the statistic of the rules that watch growth."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from guardbit.monitor.detectors.values import State, Values, from_plain, to_plain


class Lead(NamedTuple):
    """How far the heads of one attention module are ahead, one value a head.

    Attributes:
        lead: Logarithm of the factor by which the head has outrun what it was allowed; 0 or more,
            NaN where the head has not been measured yet.
        log: Logarithm of the head's value.
        since: Step at which the lead began.
        growth: Logarithm of the factor by which the head has grown since then.
        typical: The same of the typical head.
    """

    lead: Values
    log: Values
    since: Values
    growth: Values
    typical: Values


def outrun(
    state: State, step: int, values: Mapping[str, Values], over_peers: float, drift: float
) -> dict[str, Lead]:
    """Adds one sample to the leads of all heads.

    From one sample to the next a head may grow `over_peers` times as much as the typical head,
    which is the lower median over all heads of the model, and by `drift` besides. What it grows
    more is added to its lead, what it grows less is taken off, down to 0. So a lead is the most
    that any stretch of samples up to now shows (Page, Biometrika 41, 1954). Only logarithms of
    ratios enter: units do not matter, nor does the number of samples in a stretch. A typical head
    that shrinks counts as one that stays.

    Args:
        state: What is remembered, plain JSON values; updated.
        step: Of the sample.
        values: Attention module -> one value a head, positive; others count as not measured.
        over_peers: Allowed growth, as a multiple of the typical head's.
        drift: Allowed growth besides, e-folds in 1,000 steps.

    Returns:
        The leads of the modules in `values`.
    """
    clock, sites = state.get("clock", 0.0), state.setdefault("sites", {})
    if not values:
        state["clock"] = clock
        return {}
    # All heads of the model side by side: NumPy takes as long for an array of 12.
    past = _past([(sites.get(site, {}), len(sizes)) for site, sizes in values.items()])
    sizes = np.concatenate(list(values.values()))
    log = np.log(np.where(sizes > 0, sizes, np.nan))
    # A module that was not measured for some samples has grown in all of them, and the clock
    # holds that already.
    change = log - past["log"] - (clock - past["clock"])
    if grown := np.sort(change[~np.isnan(change)]).tolist():
        clock += max(0.0, grown[(len(grown) - 1) // 2])
    state["clock"] = clock
    allowed = over_peers * (clock - past["clock"]) + drift * (step - past["step"]) / 1000
    lead = np.maximum(past["lead"] + log - past["log"] - allowed, 0.0)
    known = ~np.isnan(log)
    lead = np.where(known, np.where(np.isnan(lead), 0.0, lead), past["lead"])
    begins = known & (lead == 0)
    now = {"log": log, "clock": np.full(len(log), clock), "step": np.full(len(log), step)}
    after = {name: np.where(known, value, past[name]) for name, value in now.items()}
    for name, value in now.items():
        after[f"first_{name}"] = np.where(begins, value, past[f"first_{name}"])
    after["lead"] = lead
    plain = {name: to_plain(column) for name, column in after.items()}
    ahead = Lead(
        np.where(known, lead, np.nan),
        log,
        after["first_step"],
        log - after["first_log"],
        clock - after["first_clock"],
    )
    leads, end = {}, 0
    for site, of_site in values.items():
        start, end = end, end + len(of_site)
        sites[site] = {name: column[start:end] for name, column in plain.items()}
        leads[site] = Lead(*(column[start:end] for column in ahead))
    return leads


def restart(state: State, site: str, heads: tuple[int, ...]) -> None:
    """Sets the leads of heads to 0, so that they are named again only if they go on growing."""
    columns = state["sites"].get(site, {"lead": []})
    # A head that came later may not have been measured by this state's indicator since.
    for head in (head for head in heads if head < len(columns["lead"])):
        columns["lead"][head] = 0.0
        for name in ("log", "clock", "step"):
            columns[f"first_{name}"][head] = columns[name][head]


_COLUMNS = ("lead", "log", "clock", "step", "first_log", "first_clock", "first_step")


def _past(sites: Sequence[tuple[Mapping[str, list], int]]) -> dict[str, Values]:
    """What is remembered of modules, each with its number of heads, put side by side."""
    return {
        name: from_plain(
            [value for columns, heads in sites for value in _padded(columns.get(name, []), heads)]
        )
        for name in _COLUMNS
    }


def _padded(column: list, heads: int) -> list:
    return column if len(column) == heads else column + [None] * (heads - len(column))
