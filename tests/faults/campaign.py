"""Injects faults into training runs and counts what became of them."""

from __future__ import annotations

import multiprocessing
import pickle
import sys
from argparse import Namespace
from collections import Counter

from tests.faults.rows import Job, collect
from tests.faults.running import (
    AGAIN,
    BROKEN,
    counts_known,
    counts_of,
    inject,
    plan_of,
    reference_of,
    references_known,
    warm_up,
)
from tests.faults.scenarios import SCENARIOS

COLUMNS = ["seed", "scenario", "error", "point", "result", "detail"]

_scenarios: list[str] = []


def _refer(scenario: str) -> tuple[str, bytes, str]:
    """Finds out what a scenario does when nothing fails, or why it cannot run here."""
    try:
        # As bytes, because PyTorch sends tensors by memory that ends with the process.
        return scenario, pickle.dumps((reference_of(scenario), counts_of(scenario))), ""
    except Exception as error:
        return scenario, b"", repr(error)


def _inject(job: Job) -> list[str]:
    plan = plan_of(int(job[0]), _scenarios)
    return [plan.scenario, plan.error.__name__, str(plan.point), *inject(plan)]


def run(options: Namespace) -> list[list[str]]:
    """Runs the injections that the CSV lacks; returns all rows."""
    warm_up()  # forks share what this imports
    names = options.scenario or list(SCENARIOS)
    with multiprocessing.get_context("fork").Pool(len(names)) as pool:
        for name, known, why in pool.map(_refer, names):
            if why:
                print(f"{name} cannot run here and is left out: {why}", file=sys.stderr)
                continue
            references_known[name], counts_known[name] = pickle.loads(known)
            _scenarios.append(name)
    seeds = range(options.seed, options.seed + options.number)
    rows = collect(options, COLUMNS, ((str(n),) for n in seeds), _inject, method="fork")
    return sorted(rows, key=lambda row: int(row[0]))


def table(rows: list[list[str]], broken: tuple[str, ...]) -> str:
    """Returns a table of Markdown: scenario x error, and how often which promise was broken."""
    counted: dict[tuple[str, str], Counter[str]] = {}
    for _, scenario, error, _, result, _ in rows:
        counted.setdefault((scenario, error), Counter())[result] += 1
    lines = [
        f"| scenario | exception | injections | {' | '.join(broken)} |",
        f"|---|---|{'---|' * (1 + len(broken))}",
    ]
    whole: Counter[str] = Counter()
    for (scenario, error), results in sorted(counted.items()):
        fired = sum(results.values()) - results["not reached"]
        cells = " | ".join(str(results[name]) for name in broken)
        lines.append(f"| {scenario} | {error} | {fired} | {cells} |")
        whole += results
    fired = sum(whole.values()) - whole["not reached"]
    lines.append(f"| **all** | | {fired} | {' | '.join(str(whole[name]) for name in broken)} |")
    return "\n".join(lines)


def main(options: Namespace) -> int:
    rows = run(options)
    print(table(rows, BROKEN))
    print(f"{sum(AGAIN in row[5] for row in rows)} had a result at the second try only")
    bad = [row for row in rows if row[4] in BROKEN]
    for row in bad[:100]:
        print(" ".join(row), file=sys.stderr)
    return 1 if bad else 0
