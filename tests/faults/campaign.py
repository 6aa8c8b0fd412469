"""Injects faults into training runs and counts what became of them.

    python -m tests.faults.campaign --injections 10000 --workers 16 --minutes 5 --seed 0 \
        --csv faults.csv

Injection n of seed s is number s + n. Numbers that the CSV holds already are left out, so a
campaign goes on where it stopped. It ends with 1 if a promise was broken.
"""

from __future__ import annotations

import argparse
import csv
import multiprocessing
import os
import pickle
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

# CUDA's threads do not survive a fork; one thread each, because runs are many.
if __name__ == "__main__":
    os.environ.update(CUDA_VISIBLE_DEVICES="", OMP_NUM_THREADS="1", HF_HUB_OFFLINE="1")

COLUMNS = ["seed", "scenario", "error", "point", "result", "detail"]


def _refer(scenario: str, answers: Any) -> None:
    """Finds out what a scenario does when nothing fails."""
    from tests.faults.running import counts_of, reference_of

    try:
        known = pickle.dumps((reference_of(scenario), counts_of(scenario)))
        answers.put((scenario, known, ""))
    except Exception as error:
        answers.put((scenario, b"", repr(error)))


def _work(
    seeds: Any, results: Any, references: dict[str, bytes], scenarios: list[str], deadline: float
) -> None:
    from tests.faults.running import counts_known, inject, plan_of, references_known

    try:
        for name, known in references.items():
            references_known[name], counts_known[name] = pickle.loads(known)
        while time.time() < deadline:
            seed = seeds.get()
            if seed is None:
                break
            plan = plan_of(seed, scenarios)
            result, detail = inject(plan)
            results.put([seed, plan.scenario, plan.error.__name__, str(plan.point), result, detail])
    finally:
        results.put(None)


def _references(scenarios: list[str]) -> dict[str, bytes]:
    """Runs each scenario without a fault; those that cannot run here are left out, and told."""
    context = multiprocessing.get_context("fork")
    answers = context.Queue()
    processes = [
        context.Process(target=_refer, args=(name, answers), daemon=True) for name in scenarios
    ]
    found: dict[str, bytes] = {}
    for process in processes:
        process.start()
    for _ in scenarios:
        name, reference, why = answers.get()
        if why:
            print(f"{name} cannot run here and is left out: {why}", file=sys.stderr)
        else:
            found[name] = reference
    for process in processes:
        process.join()
    return found


def run(
    first: int, count: int, workers: int, minutes: float, path: Path, scenarios: list[str]
) -> list[list[str]]:
    """Runs the injections that the CSV lacks; returns all rows."""
    from tests.faults.running import warm_up

    done: dict[int, list[str]] = {}
    if path.exists():
        with path.open(newline="") as file:
            done = {int(row[0]): row for row in list(csv.reader(file))[1:]}
    # Forks share what this imports. It has no threads before it puts something in a queue.
    warm_up()
    references = _references(scenarios)
    scenarios = [name for name in scenarios if name in references]
    context = multiprocessing.get_context("fork")
    seeds, results = context.Queue(), context.Queue()
    deadline = time.time() + 60 * minutes
    processes = [
        context.Process(
            target=_work, args=(seeds, results, references, scenarios, deadline), daemon=True
        )
        for _ in range(workers)
    ]
    for process in processes:
        process.start()
    for seed in range(first, first + count):
        if seed not in done:
            seeds.put(seed)
    for _ in range(workers):
        seeds.put(None)
    is_new = not path.exists()
    with path.open("a", newline="") as file:
        writer = csv.writer(file)
        if is_new:
            writer.writerow(COLUMNS)
        working = workers
        while working:
            row = results.get()
            if row is None:
                working -= 1
                continue
            row = [str(x) for x in row]
            done[int(row[0])] = row
            writer.writerow(row)
            file.flush()
    seeds.cancel_join_thread()  # what nobody has taken need not be sent
    for process in processes:
        process.terminate()
        process.join()
    return [done[seed] for seed in sorted(done)]


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


def main() -> int:
    """Runs the command."""
    from tests.faults.running import AGAIN, BROKEN
    from tests.faults.scenarios import SCENARIOS

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--injections", type=int, default=1000)
    parser.add_argument("--workers", type=int, default=os.cpu_count())
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--csv", type=Path, default=Path("faults.csv"))
    parser.add_argument("--scenario", action="append", choices=list(SCENARIOS), default=[])
    options = parser.parse_args()
    rows = run(
        options.seed, options.injections, options.workers, options.minutes, options.csv,
        options.scenario or list(SCENARIOS),
    )  # fmt: skip
    print(table(rows, BROKEN))
    print(f"{sum(AGAIN in row[5] for row in rows)} had a result at the second try only")
    bad = [row for row in rows if row[4] in BROKEN]
    for row in bad[:100]:
        print(" ".join(row), file=sys.stderr)
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
