"""What the tests of the store write."""

from guardbit.records import Event, ModuleRow, Sample
from guardbit.store import RunWriter


def loss(step: int, value: float = 0.0) -> Sample:
    return Sample(step, "", -1, "loss", (value,))


def alarm(step: int, why: str = "") -> Event:
    return Event(step, "alarm", "h.2.attn", (3, 7), why, rule="norm")


def gain(step: int, module: str = "", value: float = 0.0) -> ModuleRow:
    return ModuleRow(step, module, "block", "output", "gain", value, 0.1)


def put(writer: RunWriter, *samples: Sample) -> None:
    """Writes a segment."""
    writer.add(samples)
    writer.flush()


def write(folder, *samples: Sample, **options) -> None:
    with RunWriter(folder, **options) as writer:
        writer.add(samples)
