"""Decides which probes the wanted indicators need, and what each probe measures."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import NamedTuple

from guardbit.catalog import Probe, of_probe
from guardbit.monitor.measure.delta import DeltaProbe
from guardbit.monitor.measure.finite import FiniteProbe
from guardbit.monitor.measure.gradient_audit import GradientAudit
from guardbit.monitor.measure.keys import KeyProbe
from guardbit.monitor.measure.probes import CallProbe
from guardbit.monitor.measure.repeats import RepeatProbe
from guardbit.monitor.measure.rows import RowProbe

#: The probes of attention calls, in the order in which they look at one.
CALL_PROBES: dict[Probe, Callable[[Collection[str]], CallProbe]] = {
    "rows": RowProbe,
    "keys": KeyProbe,
    "delta": DeltaProbe,
    "gradient_audit": GradientAudit,
    "repeats": RepeatProbe,
    "finite": FiniteProbe,
}


class Plan(NamedTuple):
    """What is measured at a sampled step; what is not wanted costs nothing.

    Attributes:
        wanted: The indicators to record.
        calls: The probes that look at attention calls.
        norms: The spectral norms to take from the weights.
        audits: Whether gradients are audited, along the weights' largest directions.
        needs_shadow: Whether any probe reads the shadow of a call.
        totals: The indicators that are sums over rows, see `CallProbe`.
    """

    wanted: frozenset[str]
    calls: tuple[CallProbe, ...]
    norms: frozenset[str]
    audits: bool
    needs_shadow: bool
    totals: frozenset[str]


def plan_for(wanted: Collection[str]) -> Plan:
    """Plans for the wanted indicators, names of the catalogue."""

    def of(probe: Probe) -> frozenset[str]:
        return frozenset(wanted) & frozenset(of_probe(probe))

    audits = bool(of("gradient_audit"))
    calls = tuple(make(of(probe)) for probe, make in CALL_PROBES.items() if of(probe))
    return Plan(
        frozenset(wanted),
        calls,
        of("weights") | ({"w_q_spectral_norm"} if audits else set()),
        audits,
        any(probe.needs_shadow for probe in calls),
        frozenset(name for probe in calls for name in probe.totals),
    )
