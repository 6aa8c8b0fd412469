"""Starts of several seeds, six copies of those that are alarmed, and the push before the alarm.

    python -m studies.rescue.families --seeds 1 3 5 --again 12 --most 1

The starts run side by side on cuDNN without a switch. Those that have been alarmed by step 6,400,
as many as are asked for at most, first alarmed first, go on and are copied there six times; the
others end as soon as it is known that they are not among them. `copies.py` compares them. Then
`push.py` goes on from the last checkpoint before the first alarm of each, with nothing beside it,
for `growth.py`. When the time is up, what runs is stopped; what it has recorded stays.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from guardbit import read_events
from studies.rescue.branches import STEP
from studies.rescue.packed import HEAD_STEPS, step_of
from studies.rescue.train import parse, run_name

#: What is done to the copies, as arguments of `train.py`.
WAYS = (
    ("--arm", "late", "--stabilizer", "exact_delta"),
    ("--arm", "late_heads", "--stabilizer", "exact_delta"),
    ("--arm", "late", "--stabilizer", "centered_keys"),
    ("--arm", "stock", "--rate-factor", "0.5"),
    ("--arm", "qk_clip", "--bound", "1000"),
    ("--arm", "late_layers", "--stabilizer", "exact_delta"),
)

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
    """

    def __init__(self, folder: Path, command: Command, minutes: float) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self.command = folder, command
        self.end = time.monotonic() + 60 * minutes
        self.running: dict[str, subprocess.Popen] = {}

    def start(self, name: str, module: str, arguments: Sequence[str]) -> None:
        """Starts a process."""
        with (self.folder / f"{name}.log").open("a") as log:
            command = self.command(module, arguments)
            self.running[name] = subprocess.Popen(command, stdout=log, stderr=log)
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


def first_alarm(folder: Path, until: float = float("inf")) -> int | None:
    """The step of a run's first alarm of a head, None if there is none up to a step."""
    alarms = read_events(folder).query("kind == 'alarm' and site != '' and step <= @until")["step"]
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


def out_of_it(alarms: dict[int, int | None], at: dict[int, int], most: int) -> set[int]:
    """The starts of which it is known that they will not be copied.

    They have passed the step by which they would have had to be alarmed.

    Args:
        alarms: Seed -> step of its first alarm, up to `STEP`.
        at: Seed -> step that it has reached.
        most: How many are copied at most.
    """
    found = chosen(alarms, most)
    steps = [step for seed in found if (step := alarms[seed]) is not None]
    limit = max(steps) if len(found) == most else STEP
    return {seed for seed in alarms if seed not in found and at[seed] > limit}


def frozen(run: Path, folder: Path) -> Path:
    """A copy of a run as it is, with its checkpoint at `STEP`: the run itself goes on.

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
    checkpoint = f"step={STEP}.ckpt"
    (target / checkpoint).hardlink_to(run / checkpoint)
    return target


def families(options: argparse.Namespace, command: Command = python) -> list[int]:
    """Runs all of it.

    Args:
        options: See `main`.
        command: See `Jobs`.

    Returns:
        The seeds that were copied.
    """
    if (options.folder / "frozen").exists():
        raise SystemExit(f"{options.folder}/frozen is of a call that was cut off: remove it first")
    jobs = Jobs(options.folder / "logs", command, options.minutes)
    try:
        return _families(options, jobs)
    finally:
        jobs.stop_all()


def _families(options: argparse.Namespace, jobs: Jobs) -> list[int]:
    common = ["--backend", "cudnn", "--again", str(options.again), "--snapshot-megabytes", "0",
              "--updates-every", str(HEAD_STEPS), "--steps", str(options.steps),
              "--corpus", str(options.corpus)]  # fmt: skip
    starts, runs = {}, {}
    for seed in options.seeds:
        arguments = [*common, "--folder", str(options.folder), "--arm", "stock",
                     "--seed", str(seed), "--checkpoint-every", str(CHECKPOINT_EVERY)]  # fmt: skip
        runs[seed] = options.folder / run_name(parse(arguments), "stock")
        starts[seed] = f"seed{seed}"
        jobs.start(starts[seed], "train", arguments)
    going_on = set(options.seeds)
    # A clock after a step is a sign that all up to it is written.
    while any(reached(runs[s]) <= STEP and starts[s] in jobs.running for s in going_on):
        jobs.look()
        at = {seed: reached(runs[seed]) for seed in going_on}
        alarms = {s: first_alarm(runs[s], STEP) if at[s] else None for s in going_on}
        for seed in out_of_it(alarms, at, options.most):
            jobs.stop(starts[seed])
            going_on.remove(seed)
    alarms = {s: first_alarm(runs[s], STEP) for s in going_on if reached(runs[s]) > STEP}
    copied = chosen(alarms, options.most)
    print(f"first alarms: {alarms}; copied: {copied}", flush=True)
    for seed in going_on - set(copied):
        jobs.stop(starts[seed])
    kept = options.folder / "frozen"
    kept.mkdir()
    queue = []
    for seed in copied:
        frozen(runs[seed], kept)
        again = str(options.again)
        branch = ["--seed", str(seed), "--branch", "--branch-step", str(STEP), "--of-again", again]
        queue += [[*common, "--folder", str(kept), *branch, *way] for way in WAYS]
    while queue or jobs.running:
        while queue and len(jobs.running) < options.slots:
            arguments = queue.pop(0)
            name = run_name(parse(arguments), arguments[arguments.index("--arm") + 1])
            jobs.start(name, "train", arguments)
        jobs.look()
    for copy in kept.glob(f"*-from{STEP}"):
        copy.rename(options.folder / copy.name)
    shutil.rmtree(kept)
    for seed in copied:
        before = [path for path in runs[seed].glob("step=*.ckpt") if step_of(path) < alarms[seed]]
        if before:
            last = max(before, key=step_of)
            arguments = [str(last), "--csv", str(options.folder / f"push-seed{seed}.csv.gz"),
                         "--corpus", str(options.corpus), "--steps", str(options.push_steps),
                         "--minutes", f"{jobs.minutes:.2f}"]  # fmt: skip
            jobs.start(f"push-seed{seed}", "push", arguments)
            while jobs.running:
                jobs.look()
    return copied


def main(arguments: list[str]) -> None:
    """Reads the command line; see the module's docstring."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, nargs="+", required=True)
    parser.add_argument("--again", type=int, required=True, help="number of the starts")
    parser.add_argument("--most", type=int, default=3, help="seeds to copy at most")
    parser.add_argument("--steps", type=int, default=7600, help="at which starts and copies end")
    parser.add_argument("--push-steps", type=int, default=400)
    parser.add_argument("--slots", type=int, default=8, help="runs side by side, 9 GB each")
    parser.add_argument("--minutes", type=float, default=float("inf"))
    parser.add_argument("--folder", type=Path, default=Path("runs/rescue"))
    parser.add_argument("--corpus", type=Path, default=Path("runs/corpus"))
    families(parser.parse_args(arguments))


if __name__ == "__main__":
    main(sys.argv[1:])
