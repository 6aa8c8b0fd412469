"""Starts of several seeds, and six copies of those that are alarmed.

    python -m studies.rescue.families --seeds 1 3 5 --again 12 --most 1

The starts run side by side on cuDNN without a switch. Those that have been alarmed by step 6,400,
as many as are asked for at most, first alarmed first, go on and are copied there six times; the
others end as soon as it is known that they are not among them. `copies.py` compares them.
"""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path

from studies.rescue.branches import STEP
from studies.rescue.jobs import (
    CHECKPOINT_EVERY,
    Command,
    Jobs,
    chosen,
    first_alarm,
    frozen,
    out_of_it,
    python,
    reached,
)
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


def families(options: argparse.Namespace, command: Command = python) -> list[int]:
    """Runs all of it; returns the seeds that were copied."""
    if (options.folder / "frozen").exists():
        raise SystemExit(f"{options.folder}/frozen is of a call that was cut off: remove it first")
    jobs = Jobs(options.folder / "logs", command, options.minutes)
    try:
        return _families(options, jobs)
    finally:
        jobs.stop_all()


def _families(options: argparse.Namespace, jobs: Jobs) -> list[int]:
    common = ["--backend", "cudnn", "--again", str(options.again), "--snapshot-megabytes", "0",
              "--steps", str(options.steps), "--corpus", str(options.corpus)]  # fmt: skip
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
        frozen(runs[seed], kept, STEP)
        again = str(options.again)
        branch = ["--seed", str(seed), "--branch", "--branch-step", str(STEP), "--of-again", again]
        queue += [[*common, "--folder", str(kept), *branch, *way] for way in WAYS]
    jobs.train(queue, options.slots)
    for copy in kept.glob(f"*-from{STEP}"):
        copy.rename(options.folder / copy.name)
    shutil.rmtree(kept)
    return copied


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, nargs="+", required=True)
    parser.add_argument("--again", type=int, required=True, help="number of the starts")
    parser.add_argument("--most", type=int, default=3, help="seeds to copy at most")
    parser.add_argument("--steps", type=int, default=7600, help="at which starts and copies end")
    parser.add_argument("--slots", type=int, default=8, help="runs side by side, 9 GB each")
    parser.add_argument("--minutes", type=float, default=float("inf"))
    parser.add_argument("--folder", type=Path, default=Path("runs/rescue"))
    parser.add_argument("--corpus", type=Path, default=Path("runs/corpus"))
    families(parser.parse_args(arguments))


if __name__ == "__main__":
    main()
