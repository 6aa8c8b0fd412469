"""Runs a scenario many times with no error injected, and counts the processes that died.

    python -m tests.faults.control --scenario compiled --runs 90 --workers 10

Half of the runs are watched by GuardBit, half are not: what dies among those has another cause than
GuardBit. It is the control of the campaign's "crashed".
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
from collections import Counter

# As in the campaign, whose runs these are.
if __name__ == "__main__":
    os.environ.update(CUDA_VISIBLE_DEVICES="", OMP_NUM_THREADS="1", HF_HUB_OFFLINE="1")


def died(job: tuple[str, bool]) -> tuple[bool, str]:
    """Runs a scenario; returns whether it was watched, and how its process ended, "" if well."""
    from tests.faults.running import apart, perform

    scenario, watched = job
    try:
        apart(lambda: perform(scenario, watched, None))
    except (ChildProcessError, TimeoutError) as error:
        return watched, str(error)
    return watched, ""


def main() -> int:
    """Runs the command."""
    from tests.faults.running import warm_up
    from tests.faults.scenarios import SCENARIOS

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--scenario", choices=list(SCENARIOS), default="compiled")
    parser.add_argument("--runs", type=int, default=90)
    parser.add_argument("--workers", type=int, default=os.cpu_count())
    options = parser.parse_args()
    counted: Counter[tuple[bool, str]] = Counter()
    jobs = [(options.scenario, n % 2 == 0) for n in range(options.runs)]
    context = multiprocessing.get_context("spawn")
    with context.Pool(options.workers, warm_up) as pool:
        for one in pool.imap_unordered(died, jobs):
            counted[one] += 1
    for (watched, how), count in sorted(counted.items()):
        print(count, "watched" if watched else "not watched", how or "ended well")
    return 0


if __name__ == "__main__":
    sys.exit(main())
