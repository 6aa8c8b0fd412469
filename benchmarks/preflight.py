"""Writes what `guardbit doctor` finds of engines x shapes x masks as CSV, one line a tensor.

    PYTHONPATH=. python benchmarks/preflight.py --csv FILE [--seconds 60]

A line is the largest over all kinds of inputs; `inputs` is the kind where it is. `error` is the
relative L2 error on inputs as drawn. What was not examined has a line with the reason.
"""

from __future__ import annotations

import argparse
from itertools import groupby
from operator import attrgetter
from pathlib import Path

from benchmarks.common import write
from guardbit.doctor import text
from guardbit.doctor.inputs import DTYPES, parse_shape
from guardbit.doctor.preflight import COMMON, COMMON_MASKS, Examiner, this_machine

#: What no examination can say, and why.
UNEXAMINED = (
    "calls with dropout, as kernels do not say what they drop",
    "calls with sinks, for which there are no bounds yet",
)


def main() -> None:
    """Examines, and writes the file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--csv", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--dtype", choices=list(DTYPES), default="bf16")
    arguments = parser.parse_args()
    machine = this_machine()
    shapes = [parse_shape(shape) for shape in COMMON[machine.device]]
    examiner = Examiner(machine.device, arguments.seconds)
    result = examiner.shapes(shapes, COMMON_MASKS, arguments.dtype)
    versions = {name: machine.versions.get(name, "") for name in ("torch", "cudnn", "triton")}
    lines = []
    for place, group in groupby(result.rows, attrgetter("case")):
        rows = list(group)
        engine, shape, mask, dtype = place
        for tensor in dict.fromkeys(row.tensor for row in rows):
            mine = [row for row in rows if row.tensor == tensor]
            worst = max(mine, key=lambda row: row.of_bound)
            lines.append(
                {
                    "engine": engine, "shape": shape, "mask": mask, "dtype": dtype,
                    "tensor": tensor, "error": f"{mine[0].error:.3e}",
                    "of_bound": f"{worst.of_bound:.3g}", "inputs": worst.inputs,
                    "head": worst.worst_head, "row": worst.worst_row,
                    "units": worst.units,
                    "delta": result.delta.get(f"{engine} {shape} {mask} {dtype}", ""),
                    "verdict": text.verdict(result, *place), "gpu": machine.gpu or "", **versions,
                }
            )  # fmt: skip
    unexamined = {f"not examined: {why}": ["all engines"] for why in UNEXAMINED}
    for why, places in (result.not_examined | unexamined).items():
        lines += [{"shape": place, "verdict": why, "gpu": machine.gpu or ""} for place in places]
    write(arguments.csv, lines)
    for part in (text.describe_machine(machine), text.table(result), text.explain(result)):
        print(*part, sep="\n")


if __name__ == "__main__":
    main()
