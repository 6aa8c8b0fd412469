"""Checks DDP and FSDP2 on two GPUs with NCCL, and writes down what came out.

    PYTHONPATH=. python benchmarks/two_gpus.py --csv benchmarks/results/two-gpus-h200.csv
    PYTHONPATH=. python benchmarks/two_gpus.py --accelerator cpu     # the same with gloo

Runs `tests/callbacks/test_distributed.py`, BF16 and deterministic: a watched run ends with the bits
of an unwatched one, all ranks switch at the same step, and the spectral norms are those of the
gathered weights.
"""

from __future__ import annotations

import argparse
import csv
import importlib.metadata
import sys
from pathlib import Path

import pytest
import torch
import torch.cuda.nccl

TESTS = Path(__file__).parents[1] / "tests" / "callbacks" / "test_distributed.py"


class Collector:
    """A pytest plugin: a row a check."""

    def __init__(self) -> None:
        self.rows: list[dict[str, str]] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Takes what became of one check, or of the run it is about."""
        if report.when != "call" and report.passed:
            return
        check, _, run = report.nodeid.rpartition("::")[2].partition("[")
        strategy, _, accelerator = run.rstrip("]").partition("-")
        self.rows.append(
            {
                "strategy": strategy, "accelerator": accelerator,
                "check": check.removeprefix("test_").replace("_", " "),
                "outcome": report.outcome, "figure": dict(report.user_properties).get("figure", ""),
            }
        )  # fmt: skip


def machine(accelerator: str) -> dict[str, str]:
    """What the checks hold for."""
    versions = {"torch": torch.__version__, "lightning": importlib.metadata.version("lightning")}
    if accelerator == "cpu":
        return {"gpus": "", "nccl": "", **versions}
    names = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    nccl = ".".join(map(str, torch.cuda.nccl.version()))
    return {"gpus": " + ".join(names), "nccl": nccl, **versions}


def main() -> None:
    """Reads the command line; see the module's docstring."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--accelerator", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--csv", metavar="FILE", help="where to write the rows")
    options = parser.parse_args()
    collector = Collector()
    marker = "gpu" if options.accelerator == "cuda" else "not gpu"
    status = pytest.main([str(TESTS), "-m", marker, "--quiet"], plugins=[collector])
    # Only now, because it takes hold of the GPUs that the runs use.
    rows = [row | machine(options.accelerator) for row in collector.rows]
    for row in rows:
        print(*row.values(), sep=", ")
    if options.csv and rows:
        with open(options.csv, "w", newline="") as file:
            writer = csv.DictWriter(file, rows[0], lineterminator="\n")
            writer.writeheader()
            writer.writerows(rows)
    if status or not rows or any(row["outcome"] != "passed" for row in rows):
        sys.exit("not everything passed")


if __name__ == "__main__":
    main()
