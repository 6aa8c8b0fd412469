"""Runs of the study beside each other, watched from outside: what starts, copies and ends them."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from guardbit import read_events
from studies.rescue.branches import STEP
from studies.rescue.train import parse, run_name

#: Steps between checkpoints, of which `STEP` is a multiple.
CHECKPOINT_EVERY = 800

#: Seconds between two looks at what runs, and that a run has to obey before it is killed.
LOOK, OBEY = 1.0, 10.0

#: How often a run that is written to is copied.
_TRIES = 20

#: The command of a module of the study and its arguments.
Command = Callable[[str, Sequence[str]], list[str]]


def python(module: str, arguments: Sequence[str]) -> list[str]:
    """The command that runs a module of the study."""
    return [sys.executable, "-m", f"studies.rescue.{module}", *arguments]


class Jobs:
    """Processes beside each other, until a time is up.

    Args:
        folder: Where their output goes, a file each.
        command: What makes a command of a module and arguments.
        minutes: From now on.
        gpus: Numbers of the GPUs to spread processes over; none leaves the choice to PyTorch.
    """

    def __init__(
        self, folder: Path, command: Command, minutes: float, gpus: Sequence[int] = ()
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self.command = folder, command
        self.end = time.monotonic() + 60 * minutes
        self.running: dict[str, subprocess.Popen] = {}
        self.gpus, self._gpu_of = gpus, dict[str, int]()

    def start(self, name: str, module: str, arguments: Sequence[str]) -> None:
        """Starts a process."""
        with (self.folder / f"{name}.log").open("a") as log:
            command, environment = self.command(module, arguments), None
            if self.gpus:
                busy = [self._gpu_of[running] for running in self.running]
                self._gpu_of[name] = min(self.gpus, key=busy.count)
                environment = os.environ | {"CUDA_VISIBLE_DEVICES": str(self._gpu_of[name])}
            self.running[name] = subprocess.Popen(command, stdout=log, stderr=log, env=environment)
        print(f"{name}: started", flush=True)

    def look(self) -> None:
        """Waits a moment, and forgets what has ended.

        Raises:
            SystemExit: The time is up.
        """
        time.sleep(LOOK)
        for name, process in list(self.running.items()):
            if process.poll() is not None:
                del self.running[name]
                print(f"{name}: ended with {process.returncode}", flush=True)
        if time.monotonic() > self.end:
            raise SystemExit("the time is up")

    def train(self, queue: Sequence[Sequence[str]], slots: int) -> None:
        """Trains runs in their order, so many at a time, until all have ended.

        Args:
            queue: The arguments of `train.py` for each run.
            slots: How many run at a time.
        """
        waiting = list(queue)
        while waiting or self.running:
            while waiting and len(self.running) < slots:
                arguments = waiting.pop(0)
                options = parse(list(arguments))
                self.start(run_name(options, options.arm), "train", arguments)
            self.look()

    def stop(self, name: str) -> None:
        """Ends a process, by force if it does not obey."""
        process = self.running.pop(name, None)
        if process is None:
            return
        process.terminate()
        try:
            process.wait(OBEY)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        print(f"{name}: stopped", flush=True)

    def stop_all(self) -> None:
        """Ends all that runs."""
        for name in list(self.running):
            self.stop(name)

    @property
    def minutes(self) -> float:
        """That are left."""
        return (self.end - time.monotonic()) / 60


def first_alarm(
    folder: Path, until: float = float("inf"), kinds: Sequence[str] = ("alarm",)
) -> int | None:
    """The step of a run's first alarm of a head, None if there is none up to a step."""
    alarms = read_events(folder).query("kind in @kinds and site != '' and step <= @until")["step"]
    return None if alarms.empty else int(alarms.min())


def reached(folder: Path) -> int:
    """The last step that a run's clock tells."""
    clock = folder / "clock.csv"
    lines = clock.read_text().split() if clock.exists() else []
    return int(lines[-1].partition(",")[0]) if lines else 0


def chosen(alarms: dict[int, int | None], most: int) -> list[int]:
    """The seeds to copy.

    Args:
        alarms: Seed -> step of its first alarm.
        most: How many at most.

    Returns:
        Those that were alarmed, first alarmed first; of equals the smaller seed.
    """
    found = sorted((step, seed) for seed, step in alarms.items() if step is not None)
    return [seed for _, seed in found][:most]


def out_of_it(
    alarms: dict[int, int | None], at: dict[int, int], most: int, by: int = STEP
) -> set[int]:
    """The starts of which it is known that they will not be copied.

    They have passed the step by which they would have had to be alarmed.

    Args:
        alarms: Seed -> step of its first alarm, up to `by`.
        at: Seed -> step that it has reached.
        most: How many are copied at most.
        by: No alarm counts after this step.
    """
    found = chosen(alarms, most)
    steps = [step for seed in found if (step := alarms[seed]) is not None]
    limit = max(steps) if len(found) == most else by
    return {seed for seed in alarms if seed not in found and at[seed] > limit}


def frozen(run: Path, folder: Path, step: int) -> Path:
    """A copy of a run as it is, with its checkpoint at a step: the run itself goes on.

    Files may vanish meanwhile, because what was written before is merged; then it is copied anew.
    """
    target = folder / run.name
    for attempt in range(_TRIES):
        try:
            shutil.copytree(run, target, ignore=shutil.ignore_patterns("*.ckpt", ".*.partial"))
            break
        except shutil.Error:
            shutil.rmtree(target)
            if attempt == _TRIES - 1:
                raise
    checkpoint = f"step={step}.ckpt"
    (target / checkpoint).hardlink_to(run / checkpoint)
    return target
