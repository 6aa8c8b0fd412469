"""Models of several kinds, each with a twin that has an exact delta from its second step on.

    python -m studies.rescue.kinds --again 30 --minutes 24.5 llama_learned,1.5e-3,1 llama,1.25e-3,1

A pair is an architecture of `train.py`, a rate and a seed. A run and its twin share weights and
batches; `risk.py` compares them.

Set before the runs of `-again80`: seeds 3 and 4 of `gpt2` at 1.5e-3 and of `llama_none`, `llama`
and `llama_qk_norm` at 1.25e-3, 6,000 steps. Compared: first alarms by the rules as they stand,
causes with twins, answers about risk with logits over 1.5 times the twin's. Expected: no twin is
alarmed; alarms come with learned or no positions only; at least five more causes are settled, and
no twin contradicts one; over kinds the largest unsaturated `dq_relative_error` by step 3,000 goes
with the difference of log logits at least as much as `key_common_mode` at step 2,000 does. Tries
lost with a machine: `gpt2`, seed 3; `llama` and `llama_qk_norm`, seed 4,
then cut off at 4,700 and 4,400, so not compared (logits 1.28 and 0.99 times the twins', no alarm).
No twin was alarmed; `gpt2` was at 3,750 and 2,450, `llama_none` at 3,250 and 2,050. Logits are as
keys said: 11.6 and 1.75, 1.8 and 3.6, `llama` 0.96, `llama_qk_norm` 0.99 times the twins'. Of
14 heads that grew and whose shares settled as rounding within 600 steps seven twins agree, five of
them of seed 3; seven, one of `gpt2`'s first alarm (15, 16 log points), do not: not as expected.
So is the audit, which goes with logits less than `key_common_mode` does: 0.60, 0.80 (`risk.py`).
"""

from __future__ import annotations

import argparse
from pathlib import Path

from studies.rescue.jobs import Command, Jobs, python

#: What is done to a run and to its twin, as arguments of `train.py`.
WAYS = (("--arm", "stock"), ("--arm", "from_start", "--stabilizer", "exact_delta"))


def kinds(options: argparse.Namespace, command: Command = python) -> None:
    """Trains all pairs; see `main` for the options and `Jobs` for the command."""
    jobs = Jobs(options.folder / "logs", command, options.minutes)
    queue = [
        ["--architecture", architecture, "--learning-rate", rate, "--seed", seed, *way,
         "--backend", "cudnn", "--again", str(options.again), "--steps", str(options.steps),
         "--snapshot-megabytes", "0", "--folder", str(options.folder),
         "--corpus", str(options.corpus)]
        for architecture, rate, seed in (pair.split(",") for pair in options.pairs)
        for way in WAYS
    ]  # fmt: skip
    try:
        jobs.train(queue, options.slots)
    finally:
        jobs.stop_all()


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("pairs", nargs="+", metavar="ARCHITECTURE,RATE,SEED")
    parser.add_argument("--again", type=int, required=True, help="number in the runs' names")
    parser.add_argument("--steps", type=int, default=6000)
    parser.add_argument("--slots", type=int, default=3, help="runs side by side, 12 GB each")
    parser.add_argument("--minutes", type=float, default=float("inf"))
    parser.add_argument("--folder", type=Path, default=Path("runs/rescue"))
    parser.add_argument("--corpus", type=Path, default=Path("runs/corpus"))
    kinds(parser.parse_args(arguments))


if __name__ == "__main__":
    main()
