"""Two processes, one of which stays away from an exchange: the other waits, gives up, and trains.

    python -m tests.faults.missing_rank FOLDER

Prints the seconds that the longest step took, and what the store says.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

if __name__ == "__main__":
    os.environ.update(CUDA_VISIBLE_DEVICES="", OMP_NUM_THREADS="1")

from guardbit import MonitorSession, read_events
from guardbit.monitor import ranks
from tests.faults.scenarios import Attention, average, batch, model_of, on_two

#: Seconds that a rank waits here.
PATIENCE = 2.0


def train(rank: int, folder: Path) -> float:
    """Trains six steps; the second rank calls its session in the first two only."""
    ranks.PATIENCE = PATIENCE
    model = model_of(Attention)
    session = MonitorSession(model, every_n_train_steps=1, dirpath=None if rank else folder / "run")
    longest = 0.0
    for step in range(6):
        began = time.monotonic()
        takes_part = rank == 0 or step < 2
        if takes_part:
            session.begin_batch(step)
        model(batch(step)).square().mean().backward()
        average(model.parameters())
        if takes_part:
            session.end_step()
        longest = max(longest, time.monotonic() - began)
    session.close()
    return longest


def main() -> None:
    folder = Path(sys.argv[1])
    print(on_two(folder, lambda rank: train(rank, folder)))
    print(read_events(folder / "run")["why"].iloc[-1])


if __name__ == "__main__":
    main()
