"""Injects faults into training runs and counts what became of them."""

import sys
from argparse import Namespace
from collections import Counter

from tests.faults.rows import Job, collect
from tests.faults.running import AGAIN, BROKEN, counts_of, inject, plan_of, references_of, warm_up
from tests.faults.scenarios import SCENARIOS

COLUMNS = ["seed", "scenario", "error", "point", "result", "detail"]

_scenarios: list[str] = []


def _inject(job: Job) -> list[str]:
    plan = plan_of(int(job[0]), _scenarios)
    return [plan.scenario, plan.error.__name__, str(plan.point), *inject(plan)]


def run(options: Namespace) -> list[list[str]]:
    """Runs the injections that the CSV lacks; returns all rows."""
    warm_up()  # forks share what this imports, and what scenarios do when nothing fails
    for name in options.scenario or SCENARIOS:
        try:
            references_of(name)
            counts_of(name)
        except Exception as why:
            print(f"{name} cannot run here and is left out: {why!r}", file=sys.stderr)
        else:
            _scenarios.append(name)
    seeds = range(options.seed, options.seed + options.number)
    rows = collect(options, COLUMNS, ((str(n),) for n in seeds), _inject, method="fork")
    return sorted(rows, key=lambda row: int(row[0]))


def main(options: Namespace) -> int:
    rows = run(options)
    counted = Counter((row[1], row[2], row[4]) for row in rows)
    for (scenario, error, result), number in sorted(counted.items()):
        print(f"{scenario}, {error}, {result}: {number}")
    print(f"all: {len(rows)}, {Counter(row[4] for row in rows)}")
    print(f"{sum(AGAIN in row[5] for row in rows)} had a result at the second try only")
    bad = [row for row in rows if row[4] in BROKEN]
    for row in bad[:100]:
        print(" ".join(row), file=sys.stderr)
    return 1 if bad else 0
