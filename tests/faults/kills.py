"""Kills a writing run again and again, and reads what it had acknowledged.

A child writes samples and events into a folder. It says in a pipe what the store has taken, and is
killed (SIGKILL) after a random time. Everything it said must be readable. Every fifth child goes on
in the folder of the one before.
"""

import contextlib
import os
import random
import shutil
import signal
import sys
import tempfile
import time
import warnings
from argparse import Namespace
from pathlib import Path

from guardbit.records import Event, Sample
from guardbit.store import RunWriter, read_events, read_run

_SITES = 3


def _write(folder: Path, first: int, told: int) -> None:
    """Writes for ever, from a step on; says each step that is on disk, and how many events."""
    with RunWriter(folder, start_step=first - 1 if first else None) as writer:
        for step in range(first, sys.maxsize):
            writer.add(
                Sample(step, f"h.{layer}", layer, "max_logit", (1.0, 2.0, float(step)))
                for layer in range(_SITES)
            )
            writer.flush()
            if step % 3 == 0:
                writer.event(Event(step, "alarm", "h.0", (1,), "on purpose", rule="model_logits"))
            os.write(told, step.to_bytes(8, "little"))


def kill_one(folder: Path, first: int, seconds: float) -> int:
    """Lets a child write and kills it; returns the last step that it said, or `first` - 1."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reading)
        with contextlib.suppress(BaseException):
            _write(folder, first, writing)
        os._exit(1)
    os.close(writing)
    time.sleep(seconds)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    said = b""
    while part := os.read(reading, 1 << 16):
        said += part
    os.close(reading)
    steps = [int.from_bytes(said[i : i + 8], "little") for i in range(0, len(said), 8)]
    return steps[-1] if steps else first - 1


def lost(folder: Path, last: int) -> str:
    """Returns what is missing of steps 0 to `last`, or ""."""
    if last < 0:
        return ""
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # nothing may be left out either
        samples, events = read_run(folder), read_events(folder)
    expected = {
        (step, f"h.{layer}", head)
        for step in range(last + 1)
        for layer in range(_SITES)
        for head in range(3)
    }
    found = set(zip(samples["step"], samples["site"], samples["head"], strict=True))
    if expected - found:
        return f"{len(expected - found)} values"
    alarms = set(range(0, last + 1, 3)) - set(events["step"])
    return f"{len(alarms)} events" if alarms else ""


def run(kills: int, seed: int) -> list[str]:
    """Kills as often as asked; returns what was lost, one line a loss."""
    chance = random.Random(seed)
    losses, root = [], Path(tempfile.mkdtemp(prefix="guardbit-kills-"))
    try:
        last = -1
        for number in range(kills):
            folder = root / str(number // 5)
            first = last + 1 if number % 5 else 0
            last = kill_one(folder, first, chance.uniform(0.0, 0.08))
            missing = lost(folder, last) if folder.exists() else ""
            if missing:
                losses.append(f"kill {number} of seed {seed}: {missing} of {last + 1} steps")
            if number % 5 == 4:
                shutil.rmtree(folder, ignore_errors=True)
    finally:
        shutil.rmtree(root, ignore_errors=True)
    return losses


def main(options: Namespace) -> int:
    losses = run(options.number, options.seed)
    print(f"{options.number} kills, {len(losses)} losses")
    print("\n".join(losses))
    return 1 if losses else 0
