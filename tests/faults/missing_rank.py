"""Two processes, one of which stays away from an exchange: the other waits, gives up, and trains.

It ends with 1 if the longest step did not wait, or the store does not say why it is off.
"""

import tempfile
import time
from argparse import Namespace
from pathlib import Path

from guardbit import MonitorSession, read_events
from guardbit.monitor import ranks
from tests.faults.scenarios import Attention, average, batch, model_of, on_two

#: Seconds that a rank waits here, and what it says then.
TIMEOUT_SECONDS = 2.0
SAID = "the monitor is off, training goes on: another rank did not answer"


def train(rank: int, folder: Path) -> float:
    """Trains six steps; the second rank calls its session in the first two only."""
    ranks.EXCHANGE_SECONDS = TIMEOUT_SECONDS
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


def main(_: Namespace) -> int:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        longest = on_two(folder, lambda rank: train(rank, folder))
        why = read_events(folder / "run")["why"].iloc[-1]
    print(longest, why)
    return 0 if longest >= TIMEOUT_SECONDS and why.startswith(SAID) else 1
