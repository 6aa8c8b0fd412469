"""Running sums of indicators over the sampled steps, kept on the host."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator
from dataclasses import replace

from guardbit.catalog import SUMS, Probe, of_probe
from guardbit.records import Sample

_SUM_OF = {summed: name for name, summed in SUMS.items()}


def measured(wanted: Collection[str], probe: Probe) -> tuple[str, ...]:
    """Returns what a probe has to measure for the wanted indicators, in the catalogue's order."""
    needed = {SUMS.get(name, name) for name in wanted}
    return tuple(name for name in of_probe(probe) if name in needed)


class RunningSums:
    """Adds indicators up over the sampled steps.

    Attributes:
        sums: Running sum -> site -> one sum a head; NaN, no data, as long as there was nothing to
            add.
    """

    def __init__(self) -> None:
        self.sums: dict[str, dict[str, list[float]]] = {name: {} for name in SUMS}

    def follow(self, sample: Sample) -> Iterator[Sample]:
        """Yields the running sums after a sample of a summed indicator."""
        name = _SUM_OF.get(sample.indicator)
        if name is None:
            return
        sums = self.sums[name].setdefault(sample.site, [])
        if len(sums) != len(sample.values):  # another module has this name now
            sums[:] = [math.nan] * len(sample.values)
        for head, value in enumerate(sample.values):
            if math.isfinite(value):
                sums[head] = value if math.isnan(sums[head]) else sums[head] + value
        yield replace(sample, indicator=name, values=tuple(sums))

    def state_dict(self) -> dict[str, dict[str, list[float]]]:
        """Returns the sums; plain Python only."""
        return {
            name: {site: list(values) for site, values in sites.items()}
            for name, sites in self.sums.items()
        }

    def load_state_dict(self, state: dict[str, dict[str, list[float]]]) -> None:
        """Continues from the sums of a `state_dict`."""
        for name in self.sums:
            found = state.get(name, {})
            self.sums[name] = {site: list(values) for site, values in found.items()}
