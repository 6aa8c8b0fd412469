"""Adds up the probes' results over the calls, micro-batches and ranks of a sampled step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from guardbit.kernels.tensors import device_constant
from guardbit.monitor import ranks
from guardbit.monitor.measure.probes import CallProbe, CallView

#: Bytes of results that are held back; with more they are added up.
_MOST_HELD = 2**25


class _Held(NamedTuple):
    """A probe's result for one call, to be added up with others."""

    probe: int  # its index
    site: int
    heads: tuple[int, ...]  # numbers of the measured heads, C of them
    values: tuple[Tensor, ...]  # see `probes.Found`


class AttentionMetric:
    """Indicators of every head of every site, from the attention calls of a sampled step.

    All probes and sites share two state tensors, so that ranks exchange one sum and one maximum.
    Results are held back and added up many at a time, because many small kernels would keep the
    host busier than the device.
    """

    def __init__(
        self,
        probes: Sequence[CallProbe],
        num_sites: int,
        num_heads: int,
        device: torch.device | str = "cpu",
    ) -> None:
        self.probes = tuple(probes)
        self.shape = (num_sites, num_heads)
        self._sums = tuple(name for probe in probes for name in probe.sums)
        self._maxima = tuple(name for probe in probes for name in probe.maxima)
        self._device = device
        self.reset()

    def reset(self) -> None:
        self.has_calls = False  # whether it has looked at a call
        self._held: list[_Held] = []
        self._held_bytes = 0
        shapes = [(len(names), *self.shape) for names in (self._sums, self._maxima)]
        self.sums = torch.zeros(shapes[0], dtype=torch.float64, device=self._device)
        self.maxima = torch.full(shapes[1], -torch.inf, dtype=torch.float32, device=self._device)

    def update(self, site: int, view: CallView, first: int = 0) -> None:
        """Lets the probes look at one call, whose first head has the number `first`."""
        self.has_calls = True
        for place, probe in enumerate(self.probes):
            found = probe.update(view)
            if found is not None:
                # Two calls of one site are not added up together: they go to the same place.
                if any(held.site == site and held.probe == place for held in self._held):
                    self.finish()
                numbers = tuple(first + head for head in found.heads)
                self._held.append(_Held(place, site, numbers, found.values))
                self._held_bytes += sum(tensor.nbytes for tensor in found.values)
                if self._held_bytes > _MOST_HELD:
                    self.finish()

    def finish(self) -> None:
        """Adds up what is held back; call it before `measured`."""
        held, self._held, self._held_bytes = self._held, [], 0
        alike: dict[Any, list[_Held]] = {}
        for entry in held:
            first = entry.values[0]
            alike.setdefault((entry.probe, first.shape, first.device), []).append(entry)
        for entries in alike.values():
            probe = self.probes[entries[0].probe]
            values = probe.reduce(_stacked([entry.values for entry in entries]))
            sums, maxima = values[: len(probe.sums)], values[len(probe.sums) :]
            places = self._places(entries)
            rows = _rows(self.sums, self._sums.index(probe.sums[0]), sums)
            rows.index_add_(1, places, _flat(sums, self.sums))
            if maxima:
                rows = _rows(self.maxima, self._maxima.index(probe.maxima[0]), maxima)
                larger = torch.maximum(rows.index_select(1, places), _flat(maxima, self.maxima))
                rows.index_copy_(1, places, larger)

    def measured(self, loss_scale: float = 1.0) -> dict[str, Tensor]:
        """Returns the indicators of all ranks by name, FP64 `(S, H)`; NaN: no data."""
        self.finish()
        sums, maxima = self.sums, self.maxima
        if ranks.world_size() > 1:
            sums, maxima = ranks.reduced(sums, maxima)
        state = dict(zip((*self._sums, *self._maxima), (*sums, *maxima), strict=True))
        found: dict[str, Tensor] = {}
        for probe in self.probes:
            found |= probe.compute(state, loss_scale)
        return found

    def on_table(
        self, places: Sequence[int | None], num_sites: int, num_heads: int
    ) -> AttentionMetric:
        """Returns a metric with this one's results, with sites at the places ranks agreed on."""
        self.finish()
        table = AttentionMetric(self.probes, num_sites, num_heads, self.sums.device)
        heads = min(num_heads, self.shape[1])
        for old, new in enumerate(places):
            if new is not None:
                table.sums[:, new, :heads] = self.sums[:, old, :heads]
                table.maxima[:, new, :heads] = self.maxima[:, old, :heads]
        return table

    def _places(self, entries: list[_Held]) -> Tensor:
        """Returns the places of the heads in the state, sites and heads in one dimension."""
        num_heads = self.shape[1]
        places = tuple(e.site * num_heads + head for e in entries for head in e.heads)
        return device_constant(places, torch.int64, self.sums.device)


def _stacked(parts: list[tuple[Tensor, ...]]) -> list[Tensor]:
    """Stacks the n-th tensors of all parts, `(S, ...)`; a single part is not copied."""
    if len(parts) == 1:
        return [tensor[None] for tensor in parts[0]]
    return [torch.stack(tensors) for tensors in zip(*parts, strict=True)]


def _rows(state: Tensor, start: int, values: Sequence[Tensor]) -> Tensor:
    """Returns the part of a state for some values, sites and heads in one dimension."""
    return state[start : start + len(values)].view(len(values), -1)


def _flat(values: Sequence[Tensor], state: Tensor) -> Tensor:
    """Values `(S, C)` as rows of a state."""
    return torch.stack([value.flatten() for value in values]).to(state.device)
