"""How often runs fail once a head has alarmed, once a clock strikes, once logits are high.

    python -m studies.rescue.survival studies/rescue/results --figure survival.png

The runs are those without a correction at rates below 2e-3 whose outcome can be judged: they
failed, or have a sound run on the same batches to be compared with. Starts that were kept because
they were alarmed are left out. First alarms are those of today's rules, from a replay. Kaplan-Meier
estimates; intervals from a bootstrap over seeds and rates, because runs of one seed share batches.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd

from guardbit.monitor.replay import normalised_sites, replay
from guardbit.store import read_metadata, read_run
from studies.rescue.packed import ALARMED_FIRST, options_of

#: The clock strikes at this step.
CLOCK = 5000
#: Logits above this are high.
HIGH = 10_000.0
#: Steps after which the share of failed runs is printed.
AFTER = (2000, 4000, 8000)
RESAMPLES = 2000


class Course(NamedTuple):
    """A run from its entry on: to its failure, or to its end.

    Attributes:
        cluster: What it shares with other runs.
        steps: Steps from the entry to the failure or the end.
        has_failed: Whether it ends with the failure.
    """

    cluster: tuple[int, float]
    steps: float
    has_failed: bool


def failed_within(courses: Sequence[Course], steps: float) -> float:
    """The Kaplan-Meier estimate of the share of runs that fail within so many steps.

    >>> key = (0, 0.0015)
    >>> one, two, three = Course(key, 10, True), Course(key, 20, False), Course(key, 30, True)
    >>> failed_within([one, two, three], 10), failed_within([one, two, three], 30)
    (0.33333333333333337, 1.0)
    """
    surviving = 1.0
    for at in sorted({one.steps for one in courses if one.has_failed and one.steps <= steps}):
        at_risk = sum(one.steps >= at for one in courses)
        surviving *= 1 - sum(one.has_failed and one.steps == at for one in courses) / at_risk
    return 1 - surviving


def interval(courses: Sequence[Course], steps: float) -> tuple[float, float]:
    """The middle 95 % of estimates from clusters drawn anew."""
    clusters: dict[tuple[int, float], list[Course]] = {}
    for one in courses:
        clusters.setdefault(one.cluster, []).append(one)
    drawn, random = list(clusters.values()), np.random.default_rng(0)
    found = []
    for _ in range(RESAMPLES):
        chosen = random.integers(len(drawn), size=len(drawn))
        found.append(failed_within([one for at in chosen for one in drawn[at]], steps))
    low, high = np.quantile(found, (0.025, 0.975))
    return float(low), float(high)


def courses_from(runs: pd.DataFrame, entry: Callable[[str], float]) -> list[Course]:
    """The runs that are under way at the step at which they enter, by their names."""
    found = []
    for row in runs.itertuples():
        began, failed = entry(str(row.run)), float(row.failed_at)
        end = float(row.steps) if math.isnan(failed) else failed
        if began < end:
            cluster = int(row.seed), float(row.learning_rate)
            found.append(Course(cluster, end - began, not math.isnan(failed)))
    return found


def draw(entries: Mapping[str, Sequence[Course]]) -> plt.Figure:
    """A curve an entry, with the intervals that the table has."""
    figure, axes = plt.subplots(figsize=(7.5, 4.2))
    for number, (name, courses) in enumerate(entries.items()):
        steps = [0.0, *sorted(one.steps for one in courses)]
        shares = [failed_within(courses, step) for step in steps]
        label = f"since {name} ({len(courses)} runs)"
        axes.step(steps, shares, where="post", color=f"C{number}", label=label)
        for after in AFTER:
            place = after + 120 * (number - 1)  # beside each other
            axes.vlines(
                place, *interval(courses, after), color=f"C{number}", linewidth=4, alpha=0.3
            )
    # Later curves rest on a run or two.
    axes.set(xlabel="steps", ylabel="share of runs that have failed", ylim=(0, 1))
    axes.set_xlim(0, AFTER[-1] + 200)
    axes.xaxis.set_major_formatter("{x:,.0f}")
    axes.legend(loc="upper left", frameon=False)
    figure.tight_layout()
    return figure


def main(arguments: list[str] | None = None) -> None:
    options = options_of(__doc__, arguments, figure="where to draw the curves")
    results = options.results
    runs = pd.read_csv(results / "runs.csv")
    is_uncorrected = runs["arm"].isin(("stock", "restart")) & (runs["learning_rate"] < 2e-3)
    is_uncorrected &= ~runs["run"].isin(ALARMED_FIRST)
    runs = runs[is_uncorrected & (runs["matched"].notna() | runs["failed_at"].notna())]
    alarms: dict[str, float] = {}
    high: dict[str, float] = {}
    for name in runs["run"]:
        frame = read_run(results / name)
        found = replay(frame, normalised=normalised_sites(read_metadata(results / name)))
        alarms[name] = math.inf if found.first_alarm is None else found.first_alarm
        steps = frame.loc[(frame["indicator"] == "max_logit") & (frame["value"] > HIGH), "step"]
        high[name] = math.inf if steps.empty else float(steps.min())
    failures = int(runs["failed_at"].notna().sum())
    alarmed = sum(map(math.isfinite, alarms.values()))
    print(f"{len(runs)} runs without a correction, {alarmed} alarmed, {failures} failed")
    entries = {
        "the first alarm": courses_from(runs, alarms.__getitem__),
        f"step {CLOCK:,}": courses_from(runs, lambda _: CLOCK),
        f"logits above {HIGH:,.0f}": courses_from(runs, high.__getitem__),
    }
    print("| failed within | " + " | ".join(f"{steps:,} steps" for steps in AFTER) + " | runs |")
    print("|---" * (len(AFTER) + 2) + "|")
    for name, courses in entries.items():
        cells = []
        for steps in AFTER:
            low, high_end = interval(courses, steps)
            cells.append(f"{failed_within(courses, steps):.2f} ({low:.2f} to {high_end:.2f})")
        print(f"| of {name} | {' | '.join(cells)} | {len(courses)} |")
    if options.figure:
        draw(entries).savefig(options.figure, dpi=120)


if __name__ == "__main__":
    main()
