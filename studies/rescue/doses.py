"""Copies of a run from before its first alarm, in rounds that differ in what is done to them.

    python -m studies.rescue.doses --seeds 8 12 --again 16 --rounds 3 --minutes 24
    python -m studies.rescue.doses --seeds 4 10 --again 40 --rounds 5 --ways losses
    python -m studies.rescue.doses --seeds 4 --again 60 --rounds 1 --ways twins
    python -m studies.rescue.doses --seeds 9 --again 90 --rounds 2 --ways showcase

The starts run side by side on cuDNN without a switch. The one that is alarmed first goes on; the
others end as soon as it is known that they are not it. From its last checkpoint before that alarm
copies go on, in rounds: one of each way. `doses` hand on multiples of delta's error (`errors.py`),
and `dose_response.py` compares them; `losses` compare what corrections of the layers that the first
alarm names are worth, and `paired.py` does. `twins` correct all heads, and `causes.py` compares
them with the start itself. `low` is for a low rate: it begins before the first advisory, and
`counterfactual.py` compares. `showcase` records two copies that only watch and two that
`AutoStabilizer` guards as it comes. The first round has the next number after the starts'.

Set before the runs of `-again90`, the showcase: seeds 9, 4 and 10, in this order, one at a time. A
start watches; at its first alarm of a head it ends, and four copies go on from its last checkpoint
(of every 100 steps) before that, two watching, two with `AutoStabilizer()`, to step 10,000. If a
watching copy does not depart, or a guarded one does, that is told, and the next seed is tried.
Two tries of seed 9 were lost with the machine. Then the seeds were alarmed at 3,000, 3,150, 4,000,
and no copy of any had departed by 10,000. Largest logits, the last ones packed: 8,920 and 912,
24,400 and 43,400, 163,000 and 87,700 if watched, 312 to 419 if guarded.
"""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path

from studies.rescue.branches import STEP
from studies.rescue.errors import FACTORS
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
from studies.rescue.packed import step_of
from studies.rescue.train import NETS, parse, run_name

#: How a round's copies differ, as arguments of `train.py`.
WAYS = {
    "doses": (("--arm", "stock"), *(("--arm", "late", "--delta-error", f) for f in FACTORS)),
    "losses": (
        ("--arm", "stock"),
        ("--arm", "late_layers", "--stabilizer", "exact_delta"),
        ("--arm", "late_layers", "--delta-error", "1"),
        ("--arm", "qk_clip", "--bound", "1000"),
        ("--arm", "late_layers", "--stabilizer", "row_max"),
    ),
    "twins": (("--arm", "late", "--stabilizer", "exact_delta"),),
    "low": (("--arm", "stock"), ("--arm", "late", "--stabilizer", "exact_delta")),
    "showcase": (("--arm", "stock"), ("--arm", "rescue_layer", "--stabilizer", "exact_delta")),
}

#: How far copies go. Twins: 600 steps after the alarm, whichever checkpoint they are of.
STEPS = 1800
STEPS_OF = {"doses": STEPS, "losses": 1500, "twins": CHECKPOINT_EVERY + 600, "low": 2000}

#: The step at which all runs of the showcase end, and its steps between checkpoints.
SHOWN_UNTIL, SHOWN_EVERY = 10_000, 100


def doses(options: argparse.Namespace, command: Command = python) -> tuple[int, int]:
    """Runs all of it; returns the seed that was copied and the step from which."""
    kept = options.folder / "frozen"
    if kept.exists():
        raise SystemExit(f"{kept} is of a call that was cut off: remove it first")
    jobs = Jobs(options.folder / "logs", command, options.minutes, options.gpus)
    try:
        common = ["--backend", "cudnn", "--snapshot-megabytes", "0",
                  "--corpus", str(options.corpus),
                  "--architecture", options.architecture,
                  "--learning-rate", str(options.learning_rate)]  # fmt: skip
        seed, run = _first(options, jobs, common)
        alarm = first_alarm(run, kinds=_kinds(options))
        before = [step for p in run.glob("step=*.ckpt") if (step := step_of(p)) < (alarm or 0)]
        if not before:
            raise SystemExit(f"{run} was alarmed at step {alarm} and has no checkpoint before")
        step = max(before)
        print(f"seed {seed}: alarmed at {alarm}, copied from {step}", flush=True)
        kept.mkdir()
        frozen(run, kept, step)
        if options.ways == "showcase":
            # Nothing compares with it, and its checkpoints would fill the disk.
            jobs.stop(f"seed{seed}")
        end = _end(options, step)
        common += ["--folder", str(kept), "--seed", str(seed), "--steps", str(end)]
        common += ["--branch", "--branch-step", str(step), "--of-again", str(options.again)]
        common += ["--alarmed-by", str(alarm)]
        _copy(options, jobs, common, run, end)
    finally:
        jobs.stop_all()
        for copy in kept.glob("*-from*"):
            copy.rename(options.folder / copy.name)
        shutil.rmtree(kept, ignore_errors=True)
    return seed, step


def _first(options: argparse.Namespace, jobs: Jobs, common: list[str]) -> tuple[int, Path]:
    """Starts the seeds; returns the one that is alarmed first, which goes on, and its folder."""
    every = SHOWN_EVERY if options.ways == "showcase" else CHECKPOINT_EVERY
    runs = {}
    for seed in options.seeds:
        arguments = [*common, "--folder", str(options.folder), "--arm", "stock", "--again",
                     str(options.again), "--seed", str(seed),
                     "--steps", str(_end(options, options.by)),
                     "--checkpoint-every", str(every)]  # fmt: skip
        runs[seed] = options.folder / run_name(parse(arguments), "stock")
        jobs.start(f"seed{seed}", "train", arguments)
    going_on = set(options.seeds)
    while going_on:
        jobs.look()
        at = {seed: reached(runs[seed]) for seed in going_on}
        alarms = {
            s: first_alarm(runs[s], options.by, _kinds(options)) if at[s] else None
            for s in going_on
        }
        for seed in out_of_it(alarms, at, 1, options.by):
            jobs.stop(f"seed{seed}")
            going_on.remove(seed)
        # A clock after the alarm's step is a sign that all up to it is written.
        for seed in chosen(alarms, 1):
            if going_on == {seed} and at[seed] >= (alarms[seed] or 0):
                return seed, runs[seed]
        for seed in [s for s in going_on if f"seed{s}" not in jobs.running]:
            print(f"seed {seed} ended at {at[seed]}", flush=True)
            going_on.remove(seed)
    raise SystemExit(f"no start was alarmed by step {options.by}")


def _end(options: argparse.Namespace, begin: int) -> int:
    """The step at which copies end that begin at a step."""
    return SHOWN_UNTIL if options.ways == "showcase" else begin + STEPS_OF[options.ways]


def _kinds(options: argparse.Namespace) -> tuple[str, ...]:
    """The kinds of events that copies have to begin before."""
    return ("alarm", "advisory") if options.ways == "low" else ("alarm",)


def _copy(options: argparse.Namespace, jobs: Jobs, common: list[str], run: Path, end: int) -> None:
    """Goes through the rounds of copies; the original ends where they do."""
    queue = [
        [*common, "--again", str(options.again + number), *way]
        for number in range(1, options.rounds + 1)
        for way in WAYS[options.ways]
    ]
    while queue or jobs.running:
        while queue and len(jobs.running) < options.slots:
            arguments = queue.pop(0)
            name = run_name(parse(arguments), arguments[arguments.index("--arm") + 1])
            jobs.start(name, "train", arguments)
        jobs.look()
        if reached(run) >= end:
            for name in [name for name in jobs.running if name.startswith("seed")]:
                jobs.stop(name)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, nargs="+", required=True)
    parser.add_argument("--again", type=int, required=True, help="number of the starts")
    parser.add_argument("--rounds", type=int, default=3, help="of copies")
    parser.add_argument("--ways", choices=WAYS, default="doses")
    parser.add_argument("--architecture", choices=NETS, default="gpt2")
    parser.add_argument("--learning-rate", type=float, default=1.5e-3)
    parser.add_argument("--by", type=int, default=STEP, help="no alarm counts after this step")
    parser.add_argument("--slots", type=int, default=6, help="runs side by side, 12 GB each")
    parser.add_argument("--gpus", type=int, nargs="+", default=(), help="to spread runs over")
    parser.add_argument("--minutes", type=float, default=float("inf"))
    parser.add_argument("--folder", type=Path, default=Path("runs/rescue"))
    parser.add_argument("--corpus", type=Path, default=Path("runs/corpus"))
    doses(parser.parse_args(arguments))


if __name__ == "__main__":
    main()
