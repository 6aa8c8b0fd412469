"""Says in a sentence where the first NaN of a run is, and which backwards do not repeat."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

from guardbit.catalog import NONFINITE
from guardbit.records import Event, Sample

_FORWARD = ("q", "k", "v", "O")
# Two orders of additions round a part of the numbers to the other side: by two half units in the
# last place at most, and of few of them. A race changes more.
_OF_ORDER = 2.0

_WHENCE = {
    "q": "it came into attention with the queries, from the layer's input or its weights",
    "k": "it came into attention with the keys, from the layer's input or its weights",
    "v": "it came into attention with the values, from the layer's input or its weights",
    "O": "attention made it in its forward, as q, k and v are finite",
    "dO": "it came with the gradient of the output, from what follows attention or from the loss",
    "dQ": "attention made it in its backward, as q, k, v, O and dO are finite",
    "dK": "attention made it in its backward, as q, k, v, O, dO and dQ are finite",
    "dV": "attention made it in its backward, as q, k, v, O, dO, dQ and dK are finite",
}


class Oddities:
    """What of a run is told once: its first NaN, backwards that do not repeat, races."""

    def __init__(self) -> None:
        self._told: set[str] = set()

    def look(
        self,
        step: int,
        samples: Sequence[Sample],
        loss_scale: float,
        kernel_of: Callable[[str], str],
    ) -> Iterator[Event]:
        """Yields the events of a sampled step.

        Args:
            step: The step.
            samples: What was measured in it.
            loss_scale: Factor of the loss. With one, gradients overflow now and then, and the
                scaler leaves such steps out, so that is not told.
            kernel_of: Returns for a site what runs its attention, in words, or "".
        """
        first = first_nonfinite(samples)
        if first is not None and "nonfinite" not in self._told:
            sample, tensor, heads = first
            if loss_scale == 1.0 or tensor in _FORWARD:
                self._told.add("nonfinite")
                yield _nonfinite(step, sample, tensor, heads, kernel_of(sample.site))
        yield from self._repeats(step, samples, kernel_of)

    def _repeats(
        self, step: int, samples: Iterable[Sample], kernel_of: Callable[[str], str]
    ) -> Iterator[Event]:
        worst: dict[str, tuple[float, Sample]] = {}
        for sample in samples:
            if sample.indicator != "repeat_difference":
                continue
            largest = max((value for value in sample.values if value == value), default=0.0)
            kind = "race" if largest > _OF_ORDER else "order"
            if largest > 0 and largest > worst.get(kind, (0.0, sample))[0]:
                worst[kind] = largest, sample
        for kind, (largest, sample) in worst.items():
            if kind in self._told:
                continue
            self._told.add(kind)
            least = _OF_ORDER if kind == "race" else 0.0
            heads = tuple(h for h, value in enumerate(sample.values) if value > least)
            kernel = kernel_of(sample.site)
            what = (
                "more than another order of additions can: it is a race; let `guardbit doctor`"
                " examine the kernel, and use another"
                if kind == "race"
                else "as another order of additions makes it (atomics): the run does not repeat to"
                " the bit, and no more"
            )
            why = (
                f"two backwards on the same tensors differ{f' in {kernel}' if kernel else ''}, at"
                f" worst by {largest:.2g} half units in the last place, {what}"
            )
            yield Event(step, "advisory", sample.site, heads, why, rule="repeatability")


def first_nonfinite(samples: Iterable[Sample]) -> tuple[Sample, str, tuple[int, ...]] | None:
    """Returns the module, tensor and heads that a sampled step's first NaN or infinity is in.

    A step runs the layers forward, then backward; so the first layer whose q, k, v or O is not
    finite counts, and if there is none the last one with a gradient that is not.
    """
    found = sorted(
        (sample for sample in samples if sample.indicator == "nonfinite"),
        key=lambda sample: sample.layer,
    )
    forward = sum(NONFINITE[name] for name in _FORWARD)
    with_forward = [one for one in found if any(code & forward for code in _codes(one))]
    sample = with_forward[0] if with_forward else found[-1] if found else None
    if sample is None:
        return None
    codes = _codes(sample)
    for name, number in NONFINITE.items():
        heads = tuple(head for head, code in enumerate(codes) if code & number)
        if heads:
            return sample, name, heads
    return None


def _codes(sample: Sample) -> list[int]:
    return [int(value) if value == value else 0 for value in sample.values]


def _nonfinite(
    step: int, sample: Sample, tensor: str, heads: tuple[int, ...], kernel: str
) -> Event:
    made_here = tensor in ("O", "dQ", "dK", "dV") and kernel
    why = (
        f"NaN or infinity, of this sampled step first in {tensor}: {_WHENCE[tensor]}"
        f"{f' ({kernel})' if made_here else ''}; it may be older than this step, as those between"
        " samples are not looked at"
    )
    return Event(step, "advisory", sample.site, heads, why, rule="nonfinite")
