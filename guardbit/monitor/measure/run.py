"""Loss and gradient norm of every step, running sums, and how numbers reach the host."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import replace
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from guardbit.catalog import SUMS
from guardbit.records import Sample

_SUM_OF = {summed: name for name, summed in SUMS.items()}

#: Name, step and factor of a scalar of the run.
Scalar = tuple[str, int, float]


class RunProbe:
    """Keeps the scalars of each step as they are given, until the next sampled step reads them."""

    def __init__(self, wanted: Collection[str]) -> None:
        self._wanted = wanted
        # Name, step, value and factor.
        self._kept: list[tuple[str, int, Tensor | float, float]] = []

    def loss(self, step: int, value: Tensor | float, factor: float) -> None:
        if "loss" in self._wanted:
            self._kept.append(("loss", step, _number(value), factor))

    def grad_norm(self, step: int, value: Tensor | float) -> None:
        """Keeps the gradient norm of optimizer step `step`; the last one given counts."""
        if "grad_norm" in self._wanted:
            self._kept = [kept for kept in self._kept if kept[:2] != ("grad_norm", step)]
            self._kept.append(("grad_norm", step, _number(value), 1.0))

    def forget_step(self, step: int | None) -> None:
        """Drops the scalars of an abandoned step."""
        self._kept = [kept for kept in self._kept if kept[1] != step]

    def take(self) -> tuple[list[Scalar], list[Tensor | float]]:
        """Hands over what was kept, losses first, and its numbers, which may be on a device."""
        kept, self._kept = sorted(self._kept, key=lambda kept: kept[0] != "loss"), []
        return [(name, step, factor) for name, step, _, factor in kept], [one[2] for one in kept]

    def state_dict(self) -> dict[str, Any]:
        values = Transfer(value for _, _, value, _ in self._kept).read()
        return {
            "scalars": [
                (name, step, value, factor)
                for (name, step, _, factor), (value,) in zip(self._kept, values, strict=True)
            ]
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._kept = [(name, step, value, factor) for name, step, value, factor in state["scalars"]]


def samples_of(scalars: Iterable[Scalar], numbers: Iterable[float]) -> Iterator[Sample]:
    """Yields the samples of each step; the loss is the mean over its micro-batches."""
    found: dict[tuple[str, int], list[float]] = {}
    for (name, step, factor), number in zip(scalars, numbers, strict=True):
        found.setdefault((name, step), []).append(number * factor)
    for (name, step), values in found.items():
        yield Sample(step, "", -1, name, (sum(values) / len(values),))


def _number(value: Tensor | float) -> Tensor | float:
    """Returns one number without its history: a view, so no kernel runs, unless it is a DTensor."""
    if isinstance(value, DTensor):
        value = value.full_tensor()
    return value.detach().reshape(()) if isinstance(value, Tensor) else float(value)


class RunningSums:
    """Adds indicators up over the sampled steps."""

    def __init__(self) -> None:
        # Running sum -> site -> one sum a head; NaN as long as there was nothing to add.
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


class Transfer:
    """Moves numbers to the host in one copy; on a GPU the host does not wait before it reads."""

    def __init__(self, values: Iterable[Tensor | float]) -> None:
        values = list(values)
        # None stands at the places of tensors.
        self._numbers = [None if isinstance(v, Tensor) else float(v) for v in values]
        tensors = [value.reshape(-1) for value in values if isinstance(value, Tensor)]
        # A GPU joins tensors of one dtype with a few kernels, but mixed dtypes with one kernel
        # each.
        alike: dict[torch.dtype, list[int]] = {}
        for place, tensor in enumerate(tensors):
            alike.setdefault(tensor.dtype, []).append(place)
        self._order = [place for places in alike.values() for place in places]
        self._sizes = [tensors[place].numel() for place in self._order]
        self._host, self._event = torch.empty(0, dtype=torch.float32), None
        if tensors:
            device = tensors[0].device
            joined = [torch.cat([tensors[i].to(device) for i in some]) for some in alike.values()]
            self._host, self._event = _send(torch.cat(joined))

    @property
    def is_under_way(self) -> bool:
        """Whether the host may have to wait for the device to read."""
        return self._event is not None

    def read(self) -> list[tuple[float, ...]]:
        """Returns the numbers of each value, once they have come."""
        if self._event is not None:
            self._event.synchronize()
        parts = zip(self._order, self._host.split(self._sizes), strict=True)
        moved = iter([tuple(part.tolist()) for _, part in sorted(parts, key=itemgetter(0))])
        return [next(moved) if number is None else (number,) for number in self._numbers]


def _send(joined: Tensor) -> tuple[Tensor, torch.cuda.Event | None]:
    """Begins the copy; returns its target, and the event of its end, or None if it has ended."""
    if not joined.is_cuda:
        return joined.cpu(), None
    # To pageable memory the copy would be synchronous.
    host = torch.empty(joined.shape, dtype=joined.dtype, pin_memory=True)
    host.copy_(joined, non_blocking=True)
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(joined.device))
    return host, event
