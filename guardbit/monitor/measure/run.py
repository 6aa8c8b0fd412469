"""Loss and gradient norm of every step, as the training loop reports them."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any, NamedTuple

from torch import Tensor
from torch.distributed.tensor import DTensor

from guardbit.monitor.transfer import Transfer
from guardbit.records import Sample


class Scalars(NamedTuple):
    """The numbers of several steps, the losses before the gradient norms.

    Attributes:
        losses: Step and factor of each micro-batch.
        grad_norms: The steps of the gradient norms.
    """

    losses: list[tuple[int, float]]
    grad_norms: list[int]

    def samples(self, numbers: Iterator[float]) -> Iterator[Sample]:
        """Yields the samples of each step; the loss is the mean over its micro-batches."""
        by_step: dict[int, list[float]] = {}
        for step, factor in self.losses:
            by_step.setdefault(step, []).append(next(numbers) * factor)
        for step, values in by_step.items():
            yield Sample(step, "", -1, "loss", (sum(values) / len(values),))
        for step in self.grad_norms:
            yield Sample(step, "", -1, "grad_norm", (next(numbers),))


class RunProbe:
    """Keeps the scalars of each step as they are given, until the next sampled step reads them."""

    def __init__(self, wanted: Collection[str]) -> None:
        self._wanted = wanted
        # Step, loss and factor of every micro-batch.
        self._losses: list[tuple[int, Tensor | float, float]] = []
        self._grad_norms: list[tuple[int, Tensor | float]] = []

    def loss(self, step: int, value: Tensor | float, factor: float) -> None:
        """Keeps the loss of a micro-batch of optimizer step `step`."""
        if "loss" in self._wanted:
            self._losses.append((step, _number(value), factor))

    def grad_norm(self, step: int, value: Tensor | float) -> None:
        """Keeps the gradient norm of optimizer step `step`; the last one given counts."""
        if "grad_norm" in self._wanted:
            self._grad_norms = [entry for entry in self._grad_norms if entry[0] != step]
            self._grad_norms.append((step, _number(value)))

    def forget_step(self, step: int | None) -> None:
        """Drops the scalars of an abandoned step."""
        self._losses = [entry for entry in self._losses if entry[0] != step]
        self._grad_norms = [entry for entry in self._grad_norms if entry[0] != step]

    def take(self) -> tuple[Scalars, list[Tensor | float]]:
        """Hands over what was kept, and its numbers, which may be on a device."""
        losses, self._losses = self._losses, []
        grad_norms, self._grad_norms = self._grad_norms, []
        scalars = Scalars(
            [(step, factor) for step, _, factor in losses], [step for step, _ in grad_norms]
        )
        return scalars, [*(loss for _, loss, _ in losses), *(norm for _, norm in grad_norms)]

    def state_dict(self) -> dict[str, Any]:
        """Returns what is kept, as plain Python."""
        losses = Transfer(loss for _, loss, _ in self._losses).read()
        norms = Transfer(norm for _, norm in self._grad_norms).read()
        return {
            "losses": [
                (step, value, factor)
                for (step, _, factor), (value,) in zip(self._losses, losses, strict=True)
            ],
            "grad_norms": [
                (step, value) for (step, _), (value,) in zip(self._grad_norms, norms, strict=True)
            ],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continues from a `state_dict`."""
        self._losses = [(step, value, factor) for step, value, factor in state["losses"]]
        self._grad_norms = [(step, value) for step, value in state["grad_norms"]]


def _number(value: Tensor | float) -> Tensor | float:
    """Returns one number without its history: a view, so no kernel runs, unless it is a DTensor."""
    if isinstance(value, Tensor) and (value.numel() != 1 or value.is_complex()):
        raise ValueError(
            f"expected one real number, got {value.dtype} of shape {tuple(value.shape)}"
        )
    if isinstance(value, DTensor):
        value = value.full_tensor()
    return value.detach().reshape(()) if isinstance(value, Tensor) else float(value)
