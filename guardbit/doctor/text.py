"""What `guardbit doctor` and `guardbit diagnose` print."""

import math
from collections.abc import Iterator, Sequence
from itertools import groupby
from operator import attrgetter
from typing import Any

from guardbit.doctor.diagnose import THROUGH_DELTA, Diagnosis
from guardbit.doctor.preflight import Machine, Preflight
from guardbit.doctor.snapshots import KeptHead

_GRADIENTS = ("out", "dq", "dk", "dv")


def describe_machine(machine: Machine) -> Iterator[str]:
    gpu = "no GPU"
    if machine.gpu is not None:
        gpu = f"{machine.gpu}, compute capability {machine.capability}, CUDA {machine.cuda}"
    yield f"Machine: {machine.system}, Python {machine.python}, {gpu}"
    yield "Versions: " + ", ".join(f"{name} {number}" for name, number in machine.versions.items())
    for fault in machine.known or ["nothing bad."]:
        yield f"Known of these versions: {fault}"
    yield from machine.missing


def table(preflight: Preflight) -> Iterator[str]:
    lines: list[tuple[str, ...]] = [
        ("", "engine", "B,H,H_kv,N,D", "mask", "out", "dQ", "dK", "dV", "of bound", "delta", "is")
    ]
    for (engine, shape, mask, dtype), group in groupby(preflight.rows, attrgetter("case")):
        rows = list(group)
        errors = {row.tensor: row.error for row in rows if row.inputs == rows[0].inputs}
        case = f"{shape} {mask} {dtype}"
        lines.append(
            (
                "*" if preflight.chosen.get(case) == engine else "", engine, shape, mask,
                *(f"{errors[name]:.1e}" if name in errors else "-" for name in _GRADIENTS),
                f"{max(row.of_bound for row in rows):.2g}",
                preflight.delta.get(f"{engine} {case}", "-"),
                verdict(preflight, engine, shape, mask, dtype),
            )
        )  # fmt: skip
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for line in lines:
        cells = (cell.ljust(width) for cell, width in zip(line, widths, strict=True))
        yield "  ".join(cells).rstrip()


def verdict(preflight: Preflight, *case: str) -> str:
    bad = [finding.fault for finding in preflight.findings if finding.case == case]
    return f"BROKEN: {', '.join(bad)}" if bad else "no fault"


def explain(preflight: Preflight) -> Iterator[str]:
    told: dict[str, list[str]] = {}
    for finding in preflight.findings:
        said = f"{finding.engine}: {finding.why} {finding.advice}"
        told.setdefault(said, []).append(" ".join(finding.case[1:]))
    for said, cases in (told | preflight.not_examined).items():
        more = f" and {len(cases) - 3} more" if len(cases) > 3 else ""
        yield f"{said} ({'; '.join(cases[:3])}{more})"
    yield conclusion(preflight)


def conclusion(preflight: Preflight) -> str:
    if not preflight.examined:
        return "Nothing was examined."
    broken = {finding.engine for finding in preflight.findings}
    if broken:
        return f"Broken: {', '.join(sorted(broken))}."
    if preflight.not_examined:
        return (
            f"Incomplete: {preflight.examined} examined, within the bounds of their arithmetic so"
            " far; the rest needs more time or memory (* is PyTorch's choice)."
        )
    return (
        f"Sound: all of the {preflight.examined} examined are within the bounds of their"
        " arithmetic (* is PyTorch's choice)."
    )


def sentences(found: Diagnosis) -> tuple[str, str, str]:
    return _what_is_wrong(found), _adding_up(found), _whence(found)


def _what_is_wrong(found: Diagnosis) -> str:
    error = found.error
    if found.cause == "fault":
        return f"The kernel is at fault: {'; '.join(fault.why for fault in found.faults)}."
    if found.is_saturated:
        is_late = found.cause == "unclear"
        heading = "Too late to tell" if is_late else "Rounding is not the cause here"
        return (
            f"{heading}: attention is saturated: the exact dQ is {error.exact_part:.1g} of what it"
            " would be if attention were even, and the rest of dQ is rounding."
        )
    if found.cause == "not rounding":
        return (
            f"Rounding is not the cause: dQ is right to {_percent(error.relative_error)}, its worst"
            f" rounding is that of {found.operation}."
        )
    name = found.operation
    cure = "an exact delta" if name == "delta" else f"{name} in full precision"
    root = ""
    if found.operation == "delta" and found.root in THROUGH_DELTA:
        root = f" Delta is wrong because {found.root} is rounded."
    heading = "Rounding" if found.cause == "rounding" else "Maybe rounding"
    return (
        f"{heading} of {name}: dQ is wrong by {_percent(error.relative_error)};"
        f" {cure} takes away {_percent(found.moved_back)} of the error that adds up.{root}"
    )


def _adding_up(found: Diagnosis) -> str:
    error = found.error
    way = "grow" if error.push > 0 else "shrink"
    push = (
        f"{abs(error.push_share):.2g} times what the exact gradients of single rows add"
        f" ({abs(error.significance):.1f} standard deviations of chance)"
    )
    if found.is_saturated:
        return (
            f"It is {error.error_part:.1g} of that size. What made the scores this large came"
            " before: look at the learning rate first, and at an earlier snapshot."
        )
    if found.cause == "not rounding":
        return (
            f"What is left pushes W_Q by {push}: look at the learning rate first, and at an earlier"
            " snapshot."
        )
    does = "adds up" if found.cause == "rounding" else "does not surely add up in these rows"
    if found.cause == "fault":
        does = "counts so much here"
    return f"The error {does}: it makes W_Q {way} along its top direction by {push}."


def _whence(found: Diagnosis) -> str:
    roots = found.roots
    _, left = min((each.summed, name) for name, each in found.remedies.items() if name != "none")
    where = (
        f"The keys have {_percent(roots.common)} of their size in common, and"
        f" {_percent(roots.tied)} of the rows have tied maxima"
    )
    if found.cause in ("fault", "not rounding") or found.is_saturated:
        return where + "; no stabilizer is needed."
    part = found.remedies[left].summed / (found.remedies["none"].summed or math.inf)
    return f"{where}; {left} leaves {_percent(part)} of the summed error of dQ."


def parts_left(found: Diagnosis) -> dict[str, float]:
    """What each rounding taken out, or each remedy, leaves of the summed error of dQ."""
    whole, stock = (each.summed or 1.0 for each in (found.together, found.remedies["none"]))
    left: dict[str, float] = {}
    for name, each in found.without.items():
        label = "exact delta" if name == "delta" else f"{name} not rounded"
        left[label] = each.summed / whole
    for name, each in found.remedies.items():
        if name != "none":
            left[f"remedy {name}"] = each.summed / stock
    return left


def heading(kept: Sequence[KeptHead], found: Diagnosis) -> str:
    first, last = kept[0], kept[-1]
    when = f"step {first.step:,}" if len(kept) == 1 else f"steps {first.step:,} to {last.step:,}"
    kernel = f" of {last.kernel}" if last.kernel else ""
    rows = f"{found.samples} sample{'s' * (found.samples != 1)}, {found.rows:,} rows{kernel}"
    return f"{last.site} head {last.head}, {when}: {rows}"


def page(kept: Sequence[KeptHead], found: Diagnosis) -> Iterator[str]:
    yield heading(kept, found)
    yield from sentences(found)
    if kept[-1].stabilizer != "none":
        yield (
            f"The head ran {kept[-1].stabilizer}: what its own kernel would have returned is"
            " unknown, and FlashAttention-2's roundings stand in for it."
        )


def file_name(one: KeptHead) -> str:
    site = "".join(letter if letter.isalnum() or letter in "._-" else "_" for letter in one.site)
    return f"{site[-200:]}-head{one.head}.png"  # file systems take 255 bytes


def as_json(kept: Sequence[KeptHead], found: Diagnosis) -> dict[str, Any]:
    of_head = ("site", "head", "stabilizer", "kernel")
    of_diagnosis = ("cause", "operation", "root", "samples", "rows")
    return {
        **{name: getattr(kept[-1], name) for name in of_head},
        **{name: getattr(found, name) for name in of_diagnosis},
        "steps": [one.step for one in kept],
        "answer": list(sentences(found)),
        "left": parts_left(found),
    }


def _percent(part: float) -> str:
    """A part in percent; beyond ten times the whole its size says nothing more."""
    return "over 1,000 %" if part > 10 else f"{100 * part:.3g} %"
