"""Plain thresholds beside the rules: how early each warns where none alarms a sound run.

    PYTHONPATH=. python benchmarks/baselines.py

Every threshold is the smallest that alarms neither one of the study's sound runs nor one of the
corrected twins of other kinds of model (`studies/rescue/other_models`). A lead
is the number of steps from the first alarm to the step at which the loss diverged; a failure
without an alarm counts as lead 0.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pandas as pd

from benchmarks.detectors import DEPARTS, RESULTS, Recorded, alarms_of
from guardbit.monitor.detectors import DEFAULT_RULES
from guardbit.store.reading import samples_of
from studies.rescue.packed import ALARMED_FIRST, begun_at, load
from studies.rescue.risk import LATER

OTHERS = RESULTS.with_name("other_models")


class Watched(NamedTuple):
    """A run that was never switched after its second step, and its telemetry."""

    run: Recorded
    frame: pd.DataFrame
    is_other: bool  # whether it is of another kind of model

    @property
    def kind(self) -> str:
        """What its alarms count as."""
        if self.is_other:
            is_twin = self.run.name.partition("-")[2].startswith("from_start")
            return "twins" if is_twin else "others"
        return "failing" if self.run.kind == "again" else self.run.kind


def watched(results: Path, is_other: bool) -> Iterator[Watched]:
    """The runs below a folder without a switch, or corrected from the start."""
    for run in load(results):
        is_whole = begun_at(run.name) is None and run.facts["arm"] in ("stock", "from_start")
        is_whole &= run.facts.get("architecture") not in LATER
        if is_whole and "row_max" not in run.name and run.name not in ALARMED_FIRST:
            frame = run.frame[run.frame["indicator"] != "nonfinite"]
            yield Watched(Recorded(run.name, list(samples_of(frame))), run.frame, is_other)


def largest(indicator: str) -> Callable[[pd.DataFrame], pd.Series]:
    """The largest value of any head, or the run's own."""

    def score(frame: pd.DataFrame) -> pd.Series:
        rows = frame[frame["indicator"] == indicator]
        return rows.groupby("step")["value"].max()

    return score


def outgrowing(frame: pd.DataFrame) -> pd.Series:
    """By how much log W_Q of a head grew in 1,000 steps more than 2.5 times the median head's."""
    rows = frame[frame["indicator"] == "w_q_spectral_norm"]
    logs = np.log(rows.pivot_table(index="step", columns=["layer", "head"], values="value"))
    every = logs.index.to_series().diff().median()
    grown = logs.diff(max(1, round(1000 / every)))
    return (grown.sub(2.5 * grown.median(axis=1).clip(lower=0), axis=0)).max(axis=1).dropna()


def spike(indicator: str) -> Callable[[pd.DataFrame], pd.Series]:
    """How many deviations a value of the run lies above the mean of its last 50."""

    def score(frame: pd.DataFrame) -> pd.Series:
        values = frame[frame["indicator"] == indicator].set_index("step")["value"]
        before = values.shift().rolling(50)
        return ((values - before.mean()) / before.std()).loc[2000:].dropna()

    return score


SCORES: dict[str, Callable[[pd.DataFrame], pd.Series]] = {
    "largest logit": largest("max_logit"),
    "W_Q outgrows the median head": outgrowing,
    "largest W_Q norm": largest("w_q_spectral_norm"),
    "share of rows with BF16 maxima": largest("multiple_maxima_bf16"),
    "spike of the loss": spike("loss"),
    "spike of the gradient norm": spike("grad_norm"),
}

#: Sets of the product's rules.
RULES = {
    "all rules": DEFAULT_RULES,
    **{rule.name: (rule,) for rule in DEFAULT_RULES if rule.name != "large_error"},
}


def first_steps(runs: list[Watched]) -> Iterator[tuple[str, list[float | None]]]:
    """The step of the first alarm of each run, by each way to warn."""
    for name, rules in RULES.items():
        found = [alarms_of(each.run.samples, rules) for each in runs]
        yield name, [alarms[0].step if alarms else None for alarms in found]
    for name, score in SCORES.items():
        scores = [score(each.frame) for each in runs]
        negatives = [each.kind in ("sound", "twins") for each in runs]
        threshold = max(s.max() for s, is_one in zip(scores, negatives, strict=True) if is_one)
        above = [s.index[s > threshold] for s in scores]
        yield f"{name} > {threshold:.4g}", [steps[0] if len(steps) else None for steps in above]


def table(runs: list[Watched]) -> pd.DataFrame:
    """A row for each way to warn: its leads, and which runs it alarms."""
    rows = []
    for name, steps in first_steps(runs):
        row: dict[str, object] = {"warned by": name}
        leads = [
            max(0, DEPARTS[each.run.name] - step) if step is not None else 0
            for each, step in zip(runs, steps, strict=True)
            if each.kind == "failing"
        ]
        row |= {"median lead": statistics.median(leads), "least": min(leads)}
        for kind in ("failing", "sound", "twins", "others", "not seen to fail"):
            of_kind = [s for each, s in zip(runs, steps, strict=True) if each.kind == kind]
            row[kind] = f"{sum(step is not None for step in of_kind)} of {len(of_kind)}"
        rows.append(row)
    return pd.DataFrame(rows)


def main() -> None:
    """Prints the table as Markdown."""
    runs = [*watched(RESULTS, is_other=False), *watched(OTHERS, is_other=True)]
    found = table(runs)
    print("| " + " | ".join(found) + " |\n" + "|---" * len(found.columns) + "|")
    for row in found.itertuples(index=False):
        cells = (f"{x:,.0f}" if isinstance(x, int | float) else str(x) for x in row)
        print("| " + " | ".join(cells) + " |")


if __name__ == "__main__":
    main()
