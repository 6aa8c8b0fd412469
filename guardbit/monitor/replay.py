"""Runs the detectors over recorded telemetry again, as if the run were live."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from guardbit.monitor.detectors import DEFAULT_RULES, Detectors, Rule
from guardbit.monitor.verdict import judge
from guardbit.records import Alarm, Sample, Verdict

#: More heads than any attention has; beyond it a number is no head.
MAX_HEADS = 65_536

COLUMNS = ("step", "site", "layer", "head", "indicator", "value")


@dataclass(frozen=True, slots=True)
class Replay:
    """What the detectors would have said.

    Attributes:
        alarms: In the order of their steps.
        first_alarm: Step of the first alarm, None without any.
        verdict: What kind of run it was, as a run with these rules would have recorded it;
            "unclear" also where no rule of heads could judge it.
        why: The evidence in one sentence, and which rules could not judge it.
        advisories: What rules found that is no alarm, in the order of their steps.
    """

    alarms: list[Alarm]
    first_alarm: int | None
    verdict: Verdict
    why: str
    advisories: list[Alarm]


def normalised_sites(metadata: Mapping[str, Any]) -> frozenset[str]:
    """Returns the sites of a run where the size of W_Q does not reach the scores (QK norm)."""
    sites = metadata.get("sites")
    known = sites.items() if isinstance(sites, Mapping) else ()
    return frozenset(
        name
        for name, facts in known
        if isinstance(facts, Mapping) and facts.get("normalises_queries") is True
    )


def replay(
    frame: pd.DataFrame,
    rules: tuple[Rule, ...] = DEFAULT_RULES,
    normalised: frozenset[str] = frozenset(),
) -> Replay:
    """Runs rules over the telemetry of one run."""
    if missing := [column for column in COLUMNS if column not in frame.columns]:
        raise ValueError(
            f"the telemetry lacks the columns {missing}; needed are {list(COLUMNS)}, "
            f"given are {list(frame.columns)}"
        )
    site = frame["site"]
    if not isinstance(site.dtype, pd.StringDtype):  # empty columns are read as numbers
        site = site.astype(object)
    frame = frame.assign(site=site.where(site.notna(), ""))
    detectors = Detectors(rules)
    detectors.normalised = normalised
    found = detectors.update(samples(frame))
    alarms = [alarm for alarm in found if not alarm.role.is_advisory]
    advisories = [alarm for alarm in found if alarm.role.is_advisory]
    sites = frame.loc[frame["site"] != "", "site"].nunique()
    verdict, why = judge(found, sites)
    unjudged = detectors.unjudged(set(frame.loc[frame["value"].notna(), "indicator"].unique()))
    if unjudged:
        missing = ", ".join(dict.fromkeys(name for names in unjudged.values() for name in names))
        why += f"; not judged by {', '.join(unjudged)}: the telemetry lacks {missing}"
    of_heads = {
        name
        for name, role in detectors.roles.items()
        if role.judges == "head" and not role.is_advisory
    }
    if of_heads <= unjudged.keys():
        verdict = "unclear"
    return Replay(alarms, alarms[0].step if alarms else None, verdict, why, advisories)


def samples(frame: pd.DataFrame) -> Iterator[Sample]:
    """Yields the rows of a tidy frame as samples, one for each step, site and indicator."""
    if frame.empty:
        return
    for name in ("step", "layer"):
        if pd.isna(frame[name].to_numpy()).any():
            raise ValueError(f"the telemetry has rows without a {name}")
    site, sites = pd.factorize(frame["site"], sort=True)
    # A row that names no indicator is of none: by default pandas numbers it -1, which is the last.
    indicator, indicators = pd.factorize(frame["indicator"], sort=True, use_na_sentinel=False)
    columns = [frame[name].to_numpy() for name in ("step", "layer", "head", "value")]
    order = np.lexsort((indicator, columns[1], site, columns[0]))
    site, indicator = site[order], indicator[order]
    step, layer, head, value = (column[order] for column in columns)
    is_module = np.array([name != "" for name in sites])[site]
    wrong = np.flatnonzero(is_module & ~((head >= 0) & (head < MAX_HEADS)))
    if len(wrong):
        first = wrong[0]
        raise ValueError(
            f"head {head[first]} of site {sites[site[first]]!r} at step {step[first]} in the "
            f"telemetry; the heads of a site count from 0 to {MAX_HEADS - 1} at most"
        )
    keys = np.stack([step, layer, site, indicator]).astype(np.int64)
    starts = np.flatnonzero(np.diff(keys, axis=1, prepend=keys[:, :1] - 1).any(0))
    places = zip(*keys[:, starts].tolist(), strict=True)
    ends = [*starts[1:].tolist(), len(value)]
    sites, indicators = list(sites), list(indicators)
    heads = np.where(is_module, head, 0).astype(np.int64).tolist()
    values = value.astype(float).tolist()
    for (at, its_layer, its_site, what), start, end in zip(
        places, starts.tolist(), ends, strict=True
    ):
        known = values[start:end]
        if heads[start:end] != list(range(end - start)):
            by_head = dict(zip(heads[start:end], known, strict=True))
            known = [by_head.get(one, math.nan) for one in range(max(by_head) + 1)]
        yield Sample(at, sites[its_site], its_layer, indicators[what], tuple(known))
