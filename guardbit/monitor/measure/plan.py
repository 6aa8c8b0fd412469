"""What is measured: the probes that the wanted indicators need, and the sites of all ranks."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple

from guardbit.catalog import Probe, of_probe
from guardbit.monitor.measure.probes import CALL_PROBES, CallProbe


class Plan(NamedTuple):
    """What is measured at a sampled step; what is not wanted costs nothing."""

    wanted: frozenset[str]
    calls: tuple[CallProbe, ...]
    norms: frozenset[str]  # to take from the weights
    audits: bool  # of gradients, along the weights' largest directions
    needs_shadow: bool
    totals: frozenset[str]  # the indicators that are sums over rows, see `CallProbe`


def plan_for(wanted: Collection[str]) -> Plan:
    """Plans for the wanted indicators, names of the catalogue."""

    def of(probe: Probe) -> frozenset[str]:
        return frozenset(wanted) & frozenset(of_probe(probe))

    audits = bool(of("gradient_audit"))
    calls = tuple(make(wanted) for make in CALL_PROBES if of(make.name))
    return Plan(
        frozenset(wanted),
        calls,
        of("weights") | ({"w_q_spectral_norm"} if audits else set()),
        audits,
        any(probe.needs_shadow for probe in calls),
        frozenset(name for probe in calls for name in probe.totals),
    )


class KnownSite(NamedTuple):
    """A site of the metric."""

    place: int
    layer: int  # its number for readers
    name: str
    num_heads: int
    is_sharded: bool
    copies: int  # number of ranks that make the very same calls of each head


def joined_tables(tables: Sequence[Sequence[KnownSite]]) -> list[KnownSite]:
    """Joins the sites of several ranks into one table, with those of the first rank first."""
    sites: dict[str, KnownSite] = {}
    for table in tables:
        taken = {site.layer: name for name, site in sites.items()}
        clash = any(taken.get(site.layer, site.name) != site.name for site in table)
        shift = max(taken, default=-1) + 1 if clash else 0
        for site in table:
            site = site._replace(place=len(sites), layer=site.layer + shift)
            sites.setdefault(site.name, site)
    return list(sites.values())
