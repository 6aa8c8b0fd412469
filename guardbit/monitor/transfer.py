"""Moves numbers from the device to the host."""

from __future__ import annotations

from collections.abc import Iterable
from operator import itemgetter

import torch
from torch import Tensor


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
