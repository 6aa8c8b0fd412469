"""The runs at 6e-4, and how two starts of one seed part.

    python -m studies.rescue.low_rate studies/rescue/results --figure low-rate.png

No run at this rate was corrected from the start, so none is matched. Starts of one seed share
weights and batches, and differ by chance alone: while both are healthy, their losses differ by
little. How far a run's loss lies above that of the longest other start of its seed is told over
the last 500 steps, as failures are judged, and beside it the largest such difference before either
was said to change (by an advisory or an alarm), which is chance.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd

from studies.rescue.counterfactual import alarms, sigmas
from studies.rescue.measures import WINDOW, excess_loss, series
from studies.rescue.packed import LOSS_STEPS, Run, load

#: The rate that GPT-2 small is commonly trained at.
RATE = 6e-4

#: Steps over which a loss is averaged in the figure.
SHORT = 100


def runs_at(runs: list[Run]) -> list[Run]:
    """Those at this rate, by seed, the shorter ones first."""
    found = [run for run in runs if run.facts["learning_rate"] == RATE]
    return sorted(found, key=lambda run: (run.facts["seed"], _last(run)))


def other_of(run: Run, runs: list[Run]) -> Run | None:
    """The longest other start of a run's seed, None if there is none."""
    others = [r for r in runs if r.facts["seed"] == run.facts["seed"] and r.name != run.name]
    return max(others, key=_last, default=None)


def first_said(run: Run) -> float:
    """The step of a run's first advisory or alarm of a head, infinity if there is none."""
    steps = run.events.query("kind in ('advisory', 'alarm') and site != ''")["step"]
    return float(steps.min()) if len(steps) else np.inf


def excess(run: Run, other: Run, steps: int) -> pd.Series:
    """How far a run's loss lies above another's, in nats: means over some steps, by the last."""
    losses = excess_loss(series(run.frame, "loss"), series(other.frame, "loss"))
    return losses.rolling(steps // LOSS_STEPS).mean().dropna()


def table(runs: list[Run]) -> pd.DataFrame:
    """A row a run.

    Returns:
        Its last step; those of its first advisory and of its first alarm of a head, and how many
        heads were alarmed; at its end the largest W_Q norm of these and the largest logit of all
        heads; in nats how far its loss lies `above` that of the longest other start, and how far by
        `chance`, see the module.
    """
    rows = []
    for run in runs:
        alarmed = alarms(run)
        advisories = run.events.query("kind == 'advisory' and site != ''")["step"]
        other = other_of(run, runs)
        above = chance = np.nan
        if other is not None:
            differences = excess(run, other, WINDOW)
            above = differences.iloc[-1]
            chance = differences.loc[: min(first_said(run), first_said(other))].abs().max()
        rows.append(
            {
                "run": run.name,
                "steps": _last(run),
                "advisory": advisories.min(),
                "alarm": min(alarmed.values(), default=np.nan),
                "heads": len(alarmed),
                "sigma": sigmas(run)[list(alarmed)].iloc[-1].max(),
                "logit": series(run.frame, "max_logit").iloc[-1],
                "above": above,
                "chance": chance,
            }
        )
    return pd.DataFrame(rows)


def draw(runs: list[Run]) -> plt.Figure:
    """The run with the largest logit at its end, and the longest other start of its seed."""
    run = max(runs, key=lambda run: series(run.frame, "max_logit").iloc[-1])
    other, alarmed = other_of(run, runs), alarms(run)
    if other is None or not alarmed:
        raise SystemExit(f"{run.name} has no other start of its seed, or no alarm: nothing to draw")
    figure, (left, middle, right) = plt.subplots(1, 3, figsize=(14, 4))
    for number, (layer, head) in enumerate(alarmed):
        look = {"color": f"C{number}", "linewidth": 1.4}
        left.plot(sigmas(run)[layer, head], **look, label=f"head {layer}.{head}")
        left.plot(sigmas(other)[layer, head], **look, linestyle=":")
    left.set(title="alarmed heads; dotted: in the other start", xlabel="step",
             ylabel="sigma of W_Q", yscale="log")  # fmt: skip
    left.legend(fontsize=8)
    for each, colour in ((run, "C3"), (other, "0.5")):
        middle.plot(series(each.frame, "max_logit"), color=colour, label=each.name)
    middle.set(title="all heads", xlabel="step", ylabel="largest logit", yscale="log")
    middle.legend(fontsize=7)
    right.plot(excess(run, other, SHORT), color="C3", linewidth=1)
    right.axhline(0, color="0.7", linewidth=1)
    right.set(title=f"loss above the other start's, means of {SHORT} steps", xlabel="step",
              ylabel="nats")  # fmt: skip
    for axes in (left, middle, right):
        axes.locator_params(axis="x", nbins=5)
        axes.axvline(first_said(run), color="0.8", linewidth=1)
        axes.axvline(min(alarmed.values()), color="0.6", linewidth=1)
    figure.tight_layout()
    return figure


def _last(run: Run) -> int:
    return int(run.frame["step"].max())


def main(arguments: list[str]) -> None:
    """Reads the command line; see the module's docstring."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("results", type=Path)
    parser.add_argument("--figure", type=Path, help="where to draw it")
    options = parser.parse_args(arguments)
    found = runs_at(load(options.results))
    if not found:
        raise SystemExit(f"{options.results}: no run at a rate of {RATE:g}")
    text = table(found).to_string(index=False, float_format="{:,.3f}".format, na_rep="-")
    print(text)
    print(
        f"\nabove: nats that the loss lies above the longest other start's, mean of {WINDOW} steps."
    )
    print("chance: the largest such difference before the first advisory or alarm of either.")
    if options.figure:
        draw(found).savefig(options.figure, dpi=120)


if __name__ == "__main__":
    main(sys.argv[1:])
