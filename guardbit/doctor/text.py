"""What doctor prints."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from guardbit.doctor.finding import Preflight, Row
from guardbit.doctor.machine import Machine


def describe_machine(machine: Machine) -> Iterator[str]:
    """Yields lines about the machine and the known faults of its versions."""
    gpu = "no GPU"
    if machine.gpu is not None:
        gpu = f"{machine.gpu}, compute capability {machine.capability}, CUDA {machine.cuda}"
    yield f"Machine: {machine.system}, Python {machine.python}, {gpu}"
    yield "Versions: " + ", ".join(f"{name} {number}" for name, number in machine.versions.items())
    for fault in machine.known:
        yield f"Known of these versions: {fault}"
    if not machine.known:
        yield "Known of these versions: nothing bad."


def table(preflight: Preflight) -> Iterator[str]:
    """Yields a heading and a line for each engine at each call, in columns."""
    lines: list[tuple[str, ...]] = [
        ("", "engine", "B,H,H_kv,N,D", "mask", "out", "dQ", "dK", "dV", "of bound", "delta", "is")
    ]
    for (engine, shape, mask, dtype), rows in by_engine(preflight.rows).items():
        errors = {row.tensor: row.error for row in rows if row.inputs == rows[0].inputs}
        place = f"{shape} {mask} {dtype}"
        lines.append(
            (
                "*" if preflight.chosen.get(place) == engine else "", engine, shape, mask,
                *(f"{errors[name]:.1e}" if name in errors else "-" for name in _GRADIENTS),
                f"{max(row.of_bound for row in rows):.2g}",
                preflight.delta.get(f"{engine} {place}", "-"),
                verdict(preflight, engine, shape, mask, dtype),
            )
        )  # fmt: skip
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for line in lines:
        cells = (cell.ljust(width) for cell, width in zip(line, widths, strict=True))
        yield "  ".join(cells).rstrip()


_GRADIENTS = ("out", "dq", "dk", "dv")


def by_engine(rows: Iterable[Row]) -> dict[tuple[str, str, str, str], list[Row]]:
    """Gathers rows by engine, shape, mask and dtype."""
    groups: dict[tuple[str, str, str, str], list[Row]] = {}
    for row in rows:
        groups.setdefault((row.engine, row.shape, row.mask, row.dtype), []).append(row)
    return groups


def verdict(preflight: Preflight, *place: str) -> str:
    """Says in words what was found of an engine at a call, its engine, shape, mask and dtype."""
    mine = [
        finding
        for finding in preflight.findings
        if (finding.engine, finding.shape, finding.mask, finding.dtype) == place
    ]
    bad = [finding.fault for finding in mine if finding.is_broken]
    other = [finding.fault for finding in mine if not finding.is_broken]
    so_far = " so far" if " ".join(place) in preflight.left_out else ""
    said = f"BROKEN: {', '.join(bad)}" if bad else f"sound{so_far}"
    return said + (f" ({', '.join(other)})" if other else "")


def explain(preflight: Preflight) -> Iterator[str]:
    """Yields what was found, what was not examined, and what that comes to, a sentence each."""
    told: dict[tuple[str, str], list[str]] = {}
    for finding in preflight.findings:
        about = finding.engine, f"{finding.why} {finding.advice}".strip()
        told.setdefault(about, []).append(f"{finding.shape} {finding.mask} {finding.dtype}")
    for (engine, why), places in told.items():
        yield f"{engine}: {why} ({_some(places)})"
    for why, places in preflight.refused.items():
        yield f"{why} ({_some(places)})"
    if any(source == "rounded output" for source in preflight.delta.values()):
        yield (
            "A delta of the rounded output is how flash attention works, and what GuardBit watches"
            " in training; exact_delta replaces it."
        )
    yield conclusion(preflight)


def _some(places: Sequence[str]) -> str:
    """The first three of them."""
    more = f" and {len(places) - 3} more" if len(places) > 3 else ""
    return "; ".join(places[:3]) + more


def conclusion(preflight: Preflight) -> str:
    """Says in a sentence what came of it."""
    if not preflight.examined:
        return "Nothing was examined."
    broken = {finding.engine for finding in preflight.findings if finding.is_broken}
    if broken:
        return f"Broken: {', '.join(sorted(broken))}."
    if not preflight.is_complete:
        return (
            f"Incomplete: {preflight.examined} examined, within the bounds of their arithmetic so"
            " far; the rest needs more time or memory (* is PyTorch's choice)."
        )
    return (
        f"Sound: all of the {preflight.examined} examined are within the bounds of their arithmetic"
        " (* is PyTorch's choice)."
    )
