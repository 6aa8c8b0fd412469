"""What the tests of the store write."""

from guardbit.records import Sample
from guardbit.store import RunWriter


def loss(step: int, value: float = 0.0) -> Sample:
    return Sample(step, "", -1, "loss", (value,))


def write(folder, *samples: Sample, **options) -> None:
    """Writes one session of a run."""
    with RunWriter(folder, **options) as writer:
        writer.add(samples)
