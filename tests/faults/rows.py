"""Tries many jobs in processes of their own, and keeps a row of each in a CSV."""

import csv
import multiprocessing
import time
from argparse import Namespace
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

Job = tuple[str, ...]


def collect(
    options: Namespace,
    columns: list[str],
    jobs: Iterable[Job],
    try_one: Callable[[Job], list[str]],
    warm_up: Callable[[], object] | None = None,
    method: str = "spawn",
) -> list[list[str]]:
    """Tries the jobs that the CSV lacks, as long as there is time; returns all rows.

    A row begins with its job; `warm_up` is called first in each process.
    """
    rows: list[list[str]] = []
    if options.csv.exists():
        with options.csv.open(newline="") as file:
            rows = list(csv.reader(file))[1:]
    jobs = list(jobs)
    done = {tuple(row[: len(jobs[0])]) for row in rows}
    jobs = [job for job in jobs if job not in done]
    deadline = time.time() + 60 * options.minutes
    with (
        multiprocessing.get_context(method).Pool(options.workers, warm_up) as pool,
        options.csv.open("a", newline="") as file,
    ):
        writer = csv.writer(file)
        if not rows:
            writer.writerow(columns)
        for row in pool.imap_unordered(partial(_try, try_one, deadline), jobs):
            if row is not None:
                rows.append(row)
                writer.writerow(row)
                file.flush()
    return rows


def _try(try_one: Any, deadline: float, job: Job) -> list[str] | None:
    return [*job, *try_one(job)] if time.time() < deadline else None
