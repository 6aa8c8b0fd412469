"""Do heads grow without the error of delta? Copies from before the first alarm.

    python -m studies.rescue.counterfactual studies/rescue/results --figure counterfactual.png

All copies of a family begin at one checkpoint of their original, before any head of it had been
alarmed, and see the same batches. Some run on `exact_delta` in all heads, from their second step
on; others go on as the original did, and differ from it by chance: sums of cuDNN's backward do not
repeat themselves. sigma is a head's largest singular value of W_Q; its growth is told in log
points, hundredths of log sigma, from the checkpoint to the last step that all runs have.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from matplotlib.ticker import StrMethodFormatter

from studies.rescue.branches import branches, is_before_alarm, what_was_done
from studies.rescue.measures import series
from studies.rescue.packed import Run, load, options_of

#: What a copy is that nothing was done to, and one that is corrected, as `what_was_done` says it.
UNCHANGED, CORRECTED = "nothing", "exact_delta"

#: Layer and head.
Head = tuple[int, int]


class Family(NamedTuple):
    """Copies of one run from before its first alarm.

    Attributes:
        origin: What they are of.
        step: At which they begin.
        copies: Those that are corrected first.
        last: The last step whose sigmas all of them, and the original, have.
    """

    origin: Run
    step: int
    copies: list[Run]
    last: int


def alarms(run: Run, until: float = math.inf) -> dict[Head, int]:
    """Each head's first alarm, up to a step, earliest first."""
    layers = run.frame.groupby("site")["layer"].first()
    found: dict[Head, int] = {}
    of_heads = run.events.query("kind == 'alarm' and site != '' and step <= @until")
    for event in of_heads.sort_values("step", kind="stable").itertuples():
        for head in event.heads:
            found.setdefault((int(layers[event.site]), head), int(event.step))
    return found


def families(runs: list[Run]) -> list[Family]:
    """The originals of which there are copies of both kinds from before the first alarm.

    Left out are copies on another kernel, and families of which no head had been alarmed in the
    original by the last step that all have.
    """
    copies: dict[tuple[str, int], list[Run]] = {}
    origins = {}
    for run, origin, step in branches(runs):
        is_alike = run.facts["backend"] == origin.facts["backend"]
        is_either = what_was_done(run) in (UNCHANGED, CORRECTED)
        if is_before_alarm(origin, step) and is_alike and is_either:
            copies.setdefault((origin.name, step), []).append(run)
            origins[origin.name] = origin
    found = []
    for (name, step), some in copies.items():
        some.sort(key=lambda run: (what_was_done(run) == UNCHANGED, run.name))
        shared = sigmas(origins[name]).index
        for run in some:
            shared = shared.intersection(sigmas(run).index)
        last = int(shared.max()) if len(shared) else step
        if len({what_was_done(run) for run in some}) == 2 and alarms(origins[name], last):
            found.append(Family(origins[name], step, some, last))
    return found


def sigmas(run: Run) -> pd.DataFrame:
    """A row a step, a column a head (layer, head)."""
    norms = run.frame[run.frame["indicator"] == "w_q_spectral_norm"]
    return norms.pivot(index="step", columns=["layer", "head"], values="value")


def growth(run: Run, family: Family) -> pd.Series:
    """Of all heads, in log points, from the family's first step, or the last one kept before it."""
    begin, end = sigmas(family.origin).loc[: family.step].iloc[-1], sigmas(run).loc[family.last]
    return 100 * np.log(end / begin)


def watched(family: Family) -> list[Head]:
    """The heads that were alarmed in any run of a family, that of the original's first one first.

    Up to the last step that all of them have.
    """
    found = alarms(family.origin, family.last)
    for run in family.copies:
        found = {**alarms(run, family.last), **found}
    first = next(iter(alarms(family.origin, family.last)))
    return [first, *sorted(set(found) - {first})]


def table(family: Family) -> pd.DataFrame:
    """A row a run, that of the original first.

    Returns:
        What was done to it; of each head of `watched` its `growth`, its largest logit at the last
        step and the step of its first alarm; of all heads the median and the largest growth, how
        many have been alarmed, and the largest logit at the last step.
    """
    rows = []
    for run in (family.origin, *family.copies):
        done = "original" if run is family.origin else what_was_done(run)
        grown, alarmed = growth(run, family), alarms(run, family.last)
        frame = run.frame
        logits = frame[(frame["indicator"] == "max_logit") & (frame["step"] == family.last)]
        logits = logits.set_index(["layer", "head"])["value"]
        row: dict[str, object] = {"what": done}
        for head in watched(family):
            name = f"{head[0]}.{head[1]}"
            row |= {f"{name} grew": grown[head], f"{name} logit": logits[head],
                    f"{name} alarm": alarmed.get(head)}  # fmt: skip
        heads = {"median grew": grown.median(), "most grew": grown.max(), "alarmed": len(alarmed)}
        rows.append(row | heads | {"largest logit": logits.max()})
    return pd.DataFrame(rows)


def told(family: Family) -> str:
    """The table of a family, and what was to be compared."""
    found = table(family)
    first = "{}.{} grew".format(*watched(family)[0])
    corrected, unchanged = (
        found.loc[found["what"] == what, first] for what in (CORRECTED, UNCHANGED)
    )
    chance = math.comb(len(corrected) + len(unchanged), len(corrected))
    text = found.set_index("what").rename_axis(None).T.to_string(
        float_format="{:,.1f}".format, na_rep="-"
    )  # fmt: skip
    return f"""{family.origin.name}, steps {family.step:,} to {family.last:,}

{text}

grew: log points of sigma. logit: the largest, at the last step. alarm: the step of the first.
Growth of the head that was alarmed first in the original, with exact_delta against unchanged:
{compared(corrected, unchanged)}. That all would be below all is chance in 1 of {chance} cases."""


def compared(corrected: pd.Series, unchanged: pd.Series) -> str:
    """How two kinds of copies lie to one another."""
    if not np.isfinite(corrected).all() or not np.isfinite(unchanged).all():
        return "not all are finite"
    if corrected.max() < unchanged.min():
        return "all lie below all"
    return "all lie above all" if corrected.min() > unchanged.max() else "they overlap"


def draw(found: list[Family]) -> plt.Figure:
    """A row a family: sigma of each head of `watched`, and the largest logits."""
    widest = max(len(watched(family)) for family in found) + 1
    figure, axes = plt.subplots(
        len(found), widest, figsize=(4.4 * widest, 3.8 * len(found)), squeeze=False
    )
    looks = {UNCHANGED: ("C3", "unchanged"), CORRECTED: ("C0", "exact_delta")}
    for family, row in zip(found, axes, strict=True):
        begin = family.step - 1000
        panels = [*watched(family), None]
        for axis, head in zip(row, panels, strict=False):
            seen: set[str] = set()
            for run in (family.origin, *family.copies):
                lines = series(run.frame, "max_logit") if head is None else sigmas(run)[head]
                if run is family.origin:
                    look, before = ("black", "the original"), lines.loc[: family.step]
                else:
                    look = looks[what_was_done(run)]
                    lines = pd.concat([before.iloc[-1:], lines])
                label = None if look[1] in seen else look[1]
                seen.add(look[1])
                axis.plot(lines.loc[begin : family.last], color=look[0], label=label, linewidth=1.5)
            axis.axvline(family.step, color="0.7", linewidth=1)
            of = "all heads" if head is None else f"head {head[0]}.{head[1]}"
            what = "largest logit" if head is None else "sigma of W_Q"
            axis.set(title=f"seed {family.origin.facts['seed']}, {of}", xlabel="step", ylabel=what,
                     yscale="log" if head is None else "linear")  # fmt: skip
            if head is None:
                axis.yaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
                axis.yaxis.set_minor_formatter(StrMethodFormatter("{x:,.0f}"))
            axis.legend(fontsize=8)
    figure.tight_layout()
    return figure


def main(arguments: list[str] | None = None) -> None:
    options = options_of(__doc__, arguments, figure="where to draw it")
    found = families(load(options.results))
    if not found:
        raise SystemExit(
            f"{options.results}: no run has both kinds of copies from before its alarm"
        )
    print("\n\n".join(map(told, found)))
    if options.figure:
        draw(found).savefig(options.figure, dpi=120)


if __name__ == "__main__":
    main()
