"""Faults by the thousand, for `docs/guarantees.md`; a small part of each is in `test_faults.py`.

    python -m tests.faults campaign --number 10000 --workers 16 --minutes 5 --csv faults.csv

Several may be named, to run in one process. Number n of seed s is number s + n. What the CSV holds
already is left out, so it goes on where it stopped. It ends with 1 if a promise was broken.
"""

import argparse
import importlib
import os
import sys
from pathlib import Path

#: The modules of this folder with a `main`, and how much each does unless told otherwise.
NUMBERS = {
    "campaign": 1000, "stores": 1000, "kernels": 100_000, "kills": 1000, "commands": 2000,
    "soak": 20_000, "found": 0, "missing_rank": 0,
}  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", choices=list(NUMBERS), nargs="+")
    parser.add_argument("--number", type=int)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int, default=os.cpu_count())
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--csv", type=Path)
    parser.add_argument("--scenario", action="append", default=[], help="those of found, campaign")
    options = parser.parse_args()
    if options.names != ["kernels"]:
        # CUDA's threads do not survive a fork; one thread each, because runs are many.
        os.environ.update(CUDA_VISIBLE_DEVICES="", OMP_NUM_THREADS="1", HF_HUB_OFFLINE="1")
    is_broken = 0
    for name in options.names:
        changes = {"number": options.number or NUMBERS[name],
                   "csv": options.csv or Path(f"{name}.csv")}  # fmt: skip
        module = importlib.import_module(f"tests.faults.{name}")
        is_broken |= module.main(argparse.Namespace(**{**vars(options), **changes}))
    return is_broken


if __name__ == "__main__":
    sys.exit(main())
