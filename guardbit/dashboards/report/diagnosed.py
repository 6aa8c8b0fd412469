"""What `guardbit diagnose` has found of a run's heads, as a section of its report."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from guardbit.dashboards.report import words
from guardbit.dashboards.report.document import Diagnosed, Table

#: Where `guardbit diagnose` keeps its answer in the folder of a run.
ANSWER = Path("diagnosis", "diagnosis.json")

_MOST_HEADS = 8


class Kept(NamedTuple):
    """What a run's folder holds about its diverging heads.

    Attributes:
        snapshots: Steps of which inputs of heads were kept.
        heads: What was found of each head that was diagnosed.
    """

    snapshots: int = 0
    heads: Sequence[Mapping[str, Any]] = ()


def read_kept(folder: Path) -> Kept:
    """Reads a run's folder; an answer that cannot be read counts as none."""
    try:
        heads = json.loads((folder / ANSWER).read_text(encoding="utf-8"))["heads"]
        complete = [one for one in heads if {"site", "head", "answer", "left", "steps"} <= {*one}]
    except (OSError, ValueError, TypeError, KeyError):
        complete = []
    return Kept(len(list(folder.glob("snapshot-*.pt"))), complete)


def why_heads_diverge(kept: Kept) -> Diagnosed | None:
    """The answer of each diagnosed head, then what is left with each remedy."""
    if not kept.snapshots and not kept.heads:
        return None
    if not kept.heads:
        steps = words.count(kept.snapshots, "step")
        return Diagnosed(
            f"Inputs of heads were kept at {steps}; guardbit diagnose says why they diverge."
        )
    shown = kept.heads[:_MOST_HEADS]
    more = len(kept.heads) - len(shown)
    note = "What is left of the summed error of dQ without a rounding, and with a remedy."
    rows = [
        [
            name,
            *(f"{100 * one['left'][name]:.3g} %" if name in one["left"] else "–" for one in shown),
        ]
        for name in dict.fromkeys(name for one in shown for name in one["left"])
    ]
    names = [f"{one['site']} head {one['head']}" for one in shown]
    return Diagnosed(
        heads=[
            (f"{name}, {words.span(min(one['steps']), max(one['steps']))}", " ".join(one["answer"]))
            for name, one in zip(names, shown, strict=True)
        ],
        note=note + (f" {words.count(more, 'more head')} not shown." if more else ""),
        left=Table(["", *names], rows, numbers_from=1),
    )
