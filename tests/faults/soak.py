"""Writes thousands of sampled steps and looks at memory, files and bytes."""

import resource
import tempfile
from argparse import Namespace
from pathlib import Path
from typing import NamedTuple

from guardbit.records import Event, Sample
from guardbit.store import RunWriter, read_run

_INDICATORS, _SITES, _HEADS = 4, 2, 4


class Soaked(NamedTuple):
    files: int  # the most at any moment
    bytes_a_value: float  # on disk
    grown: int  # bytes by which the process grew after its first tenth
    values: int  # that were read back


def soak(samples: int, folder: Path) -> Soaked:
    """Writes as many sampled steps, each flushed."""
    most, early = 0, 0
    with RunWriter(folder) as writer:
        for step in range(samples):
            writer.add(
                Sample(step, f"h.{site}", site, f"indicator_{n}", (float(step % 97),) * _HEADS)
                for n in range(_INDICATORS)
                for site in range(_SITES)
            )
            writer.flush()
            if step % 500 == 0:
                writer.event(Event(step, "alarm", "h.0", (0,), "on purpose", rule="model_logits"))
                most = max(most, sum(1 for _ in folder.iterdir()))
            if step == samples // 10:
                early = _resident()
    grown = _resident() - early
    size = sum(path.stat().st_size for path in folder.iterdir())
    values = samples * _INDICATORS * _SITES * _HEADS
    return Soaked(most, size / values, grown, len(read_run(folder)))


def _resident() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def main(options: Namespace) -> int:
    with tempfile.TemporaryDirectory() as folder:
        found = soak(options.number, Path(folder) / "run")
    expected = options.number * _INDICATORS * _SITES * _HEADS
    print(found, expected)
    is_sound = found.files < 100 and found.values == expected and found.grown < 256 * 2**20
    return 0 if is_sound and found.bytes_a_value < 16 else 1
