"""What a diagnosis says: three sentences first, then tables."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from guardbit.diagnosis.diagnosis import Diagnosis
from guardbit.diagnosis.direction import Measures
from guardbit.diagnosis.isolation import THROUGH_DELTA
from guardbit.diagnosis.run import Diagnosed

#: Remedies that a head can be switched to.
_SWITCHES = ("exact_delta", "centered_keys", "compensated", "row_max")


def sentences(found: Diagnosis) -> tuple[str, str, str]:
    """Returns the answer: what moves dQ, whether it adds up, and where it comes from."""
    return _what(found), _adding_up(found), _whence(found)


def _what(found: Diagnosis) -> str:
    error = found.error
    if found.cause == "fault":
        return f"The kernel is at fault: {'; '.join(fault.why for fault in found.faults)}."
    if found.is_saturated:
        is_late = found.cause == "unclear"
        heading = "Too late to tell" if is_late else "Rounding is not the cause here"
        return (
            f"{heading}: attention is saturated, so that the exact dQ has all but vanished, to"
            f" {found.isolation.exact_part:.1g} of what it would be if attention were even, and"
            " what is left of dQ is rounding."
        )
    if found.cause == "not rounding":
        return (
            f"Rounding is not the cause: dQ is right to {_percent(error.relative_error)}, its worst"
            f" rounding is that of {found.operation}."
        )
    part = found.isolation.moved_back(found.operation)
    name = found.operation
    cured = "with an exact delta" if name == "delta" else f"with {name} in full precision"
    if found.operation == "delta" and found.root in THROUGH_DELTA:
        cured += f", which is wrong because {found.root} is rounded"
    heading = "Rounding" if found.cause == "rounding" else "Maybe rounding"
    return (
        f"{heading} of {name}: dQ is wrong by {_percent(error.relative_error)} of itself, and"
        f" {_percent(part)} of what adds up of that is gone {cured}."
    )


def _adding_up(found: Diagnosis) -> str:
    error = found.error
    way = "grow" if error.push > 0 else "shrink"
    push = (
        f"{abs(error.push_share):.2g} of what the exact gradients of single rows do,"
        f" {abs(error.significance):.1f} standard deviations of chance"
    )
    if found.is_saturated:
        nothing = "" if found.cause == "unclear" else "comes to nothing: it "
        return (
            f"It {nothing}is {found.isolation.error_part:.1g} of that size. What made the scores"
            " this large came before: look at the learning rate first, and at an earlier snapshot."
        )
    if found.cause == "not rounding":
        way = "grow" if error.exact_drift > 0 else "shrink"
        return (
            f"What is left pushes W_Q by {push}, while the exact gradient itself makes it {way} by"
            f" {abs(error.drift_share):.2g}: look at the learning rate first."
        )
    does = "adds up" if found.cause == "rounding" else "does not surely add up in these rows"
    if found.cause == "fault":
        does = "counts so much here"
    return (
        f"The error {does}: it makes W_Q {way} along its top direction by {push};"
        f" {_percent(error.rank_one)} of its sum is of rank one, {error.angle:.0f} degrees from"
        " that direction."
    )


def _whence(found: Diagnosis) -> str:
    roots = found.roots
    key = roots.keys[0]
    named = f"key {key.number}" + (f" ({key.what})" if key.what else "")
    left = min(_SWITCHES, key=lambda name: found.remedies[name].summed)
    where = (
        f"Of the sum {_percent(roots.top_share)} is in one row of a hundred, most by {named};"
        f" keys have {roots.common:.2g} of their size in common and {_percent(roots.tied)} of the"
        " rows tied maxima"
    )
    if found.cause in ("fault", "not rounding") or found.is_saturated:
        return where + "; no stabilizer is called for."
    part = found.remedies[left].summed / (found.remedies["none"].summed or math.inf)
    return f"{where}; {left} leaves {_percent(part)} of it."


def tables(found: Diagnosis) -> Iterator[str]:
    """Yields the tables behind the answer, line by line."""
    yield f"{'dQ':<24}{'error':>10}{'push':>11}{'std devs':>10}{'sum left':>10}"
    whole = found.isolation.together.summed or 1.0
    yield _line("as it was", found.error, whole)
    for name, measures in found.isolation.without.items():
        exact = "exact delta" if name == "delta" else f"{name} not rounded"
        yield _line(exact, measures, whole)
    for name, measures in found.remedies.items():
        if name != "none":
            yield _line(f"remedy {name}", measures, found.remedies["none"].summed or 1.0)
    yield ""
    yield f"{'row':<16}{'push':>11}{'delta error':>13}{'largest P':>11}{'maxima':>8}"
    for row in found.roots.rows:
        yield (
            f"{f'{row.sequence}:{row.position}':<16}{row.push:>+11.3g}{row.delta_error:>+13.3g}"
            f"{row.largest:>11.3f}{row.maxima:>8}"
        )
    yield ""
    for kind, parts in (("key", found.roots.keys), ("column of V", found.roots.columns)):
        yield f"{kind:<16}{'push':>11}"
        for part in parts:
            yield f"{part.number:<16}{part.push:>+11.3g}  {part.what}".rstrip()


def heading(one: Diagnosed) -> str:
    """Names the head and what was looked at."""
    steps, found = one.steps, one.found
    when = f"step {steps[0]:,}" if len(steps) == 1 else f"steps {steps[0]:,} to {steps[-1]:,}"
    kernel = f" of {one.kernel}" if one.kernel else ""
    rows = f"{found.samples} samples, {found.rows:,} rows{kernel}"
    return f"{one.site} head {one.head}, {when}: {rows}"


def page(one: Diagnosed) -> Iterator[str]:
    """Yields all that is said of a head: the answer first, then the tables."""
    yield heading(one)
    yield from sentences(one.found)
    if one.stabilizer != "none":
        yield (
            f"The head ran {one.stabilizer}: what its own kernel would have returned is not known,"
            " FlashAttention-2's roundings stand in for it."
        )
    yield ""
    yield from tables(one.found)
    yield ""


def parts_left(found: Diagnosis) -> dict[str, float]:
    """What is left of the summed error of dQ without each rounding and with each remedy."""
    whole = found.isolation.together.summed or 1.0
    left = {
        ("exact delta" if name == "delta" else f"{name} not rounded"): measures.summed / whole
        for name, measures in found.isolation.without.items()
    }
    stock = found.remedies["none"].summed or 1.0
    left |= {
        f"remedy {name}": measures.summed / stock
        for name, measures in found.remedies.items()
        if name != "none"
    }
    return left


def file_name(one: Diagnosed) -> str:
    """Returns the name of the head's figure."""
    site = "".join(letter if letter.isalnum() or letter in "._-" else "_" for letter in one.site)
    return f"{site}-head{one.head}.png"


def as_json(one: Diagnosed) -> dict[str, Any]:
    """All numbers of a diagnosed head, for `json.dumps`."""
    found = one.found
    return {
        "site": one.site,
        "head": one.head,
        "steps": list(one.steps),
        "stabilizer": one.stabilizer,
        "kernel": one.kernel,
        "cause": found.cause,
        "operation": found.operation,
        "root": found.root,
        "faults": [vars(fault) for fault in found.faults],
        "answer": list(sentences(found)),
        "samples": found.samples,
        "rows": found.rows,
        "error": _numbers(found.error),
        "without": {name: _numbers(each) for name, each in found.isolation.without.items()},
        "alone": {name: _numbers(each) for name, each in found.isolation.alone.items()},
        "remedies": {name: _numbers(each) for name, each in found.remedies.items()},
        "left": parts_left(found),
        "top_rows": [row._asdict() for row in found.roots.rows],
        "top_keys": [part._asdict() for part in found.roots.keys],
        "top_columns": [part._asdict() for part in found.roots.columns],
        "tied_rows": found.roots.tied,
        "repeated_keys": found.roots.repeated,
        "key_common_mode": found.roots.common,
    }


def _numbers(measures: Measures) -> dict[str, float | None]:
    values = {
        "relative_error": measures.relative_error,
        "push": measures.push_share,
        "significance": measures.significance,
        "summed": measures.summed,
        "coherence": measures.coherence,
        "rank_one": measures.rank_one,
        "angle": measures.angle,
    }
    # JSON has no infinity.
    return {name: value if math.isfinite(value) else None for name, value in values.items()}


def _line(name: str, measures: Measures, whole: float) -> str:
    return (
        f"{name:<24}{_percent(measures.relative_error):>10}{measures.push_share:>+11.2g}"
        f"{measures.significance:>+10.1f}{_percent(measures.summed / whole):>10}"
    )


def _percent(part: float) -> str:
    return f"{100 * part:.3g} %"
