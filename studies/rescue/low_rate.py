"""The runs at 6e-4, and how starts of one seed part.

    python -m studies.rescue.low_rate studies/rescue/results

Starts of one seed share weights and batches. Two that compute alike differ by chance alone: while
both are healthy, their losses differ by little. Each run is held against another start of its seed:
the matched one of the study (`lines.matched_run`), here on `exact_delta` in all heads from its
second step on, else another corrected one, else the longest. How far its loss lies above is told
over the last 500 steps, as failures are judged, and beside it the largest such difference before
either was said to change (by an advisory or an alarm), which is chance.

What was to be compared was set before the corrected starts were made (`README.md`, `-again20`): the
largest logit that any head has come to, by 15,400 steps or the end of the shorter corrected start.
"""

from __future__ import annotations

import numpy as np
import pandas as pd

from studies.rescue.counterfactual import alarms, sigmas
from studies.rescue.lines import matched_run
from studies.rescue.measures import MARGIN, WINDOW, excess_loss, loss_departure, series
from studies.rescue.packed import LOSS_STEPS, Run, load, options_of

#: The rate that GPT-2 small is commonly trained at.
RATE = 6e-4

#: Columns of the table that are steps, where there is one.
STEPS = ("advisory", "alarm", "departs")

#: The step by which logits are compared, and how many a start must have made to be: others ended
#: before anything was said in any.
COMPARED, LONG = 15_400, 10_000


def runs_at(runs: list[Run]) -> list[Run]:
    """Those at this rate, by seed, the shorter ones first."""
    found = [run for run in runs if run.facts["learning_rate"] == RATE]
    return sorted(found, key=lambda run: (run.facts["seed"], run.last))


def is_corrected(run: Run) -> bool:
    """Whether all heads of a run were switched from the start."""
    return run.facts["arm"] == "from_start"


def other_of(run: Run, runs: list[Run]) -> Run | None:
    """The start of its seed that a run is held against, see the module; None if there is none."""
    others = [r for r in runs if r.facts["seed"] == run.facts["seed"] and r.name != run.name]
    longest = max(others, key=lambda other: (is_corrected(other), other.last), default=None)
    return matched_run(run, runs) or longest


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
        heads; in nats how far its loss lies `above` that of `other_of`, and how far by `chance`,
        see the module; the step at which it `departs` from that by the margin of the study.
    """
    rows = []
    for run in runs:
        alarmed = alarms(run)
        advisories = run.events.query("kind == 'advisory' and site != ''")["step"]
        other = other_of(run, runs)
        above = chance = departs = np.nan
        if other is not None:
            differences = excess(run, other, WINDOW)
            above = differences.iloc[-1]
            chance = differences.loc[: min(first_said(run), first_said(other))].abs().max()
            departs = loss_departure(series(run.frame, "loss"), series(other.frame, "loss"))
        rows.append(
            {
                "run": run.name,
                "steps": run.last,
                "advisory": advisories.min(),
                "alarm": min(alarmed.values(), default=np.nan),
                "heads": len(alarmed),
                "sigma": sigmas(run)[list(alarmed)].iloc[-1].max(),
                "logit": series(run.frame, "max_logit").iloc[-1],
                "above": above,
                "chance": chance,
                "departs": departs,
            }
        )
    return pd.DataFrame(rows)


def compared(runs: list[Run]) -> pd.DataFrame:
    """A row a long start of a seed that was corrected in some.

    Returns:
        The run, its seed and whether it `is_corrected`; the `step` by which all of that seed are
        compared, and the largest `logit` that any head had come to by then. A run that ended
        earlier counts with less than it would have come to.
    """
    rows = []
    for seed in sorted({run.facts["seed"] for run in runs if is_corrected(run)}):
        starts = [run for run in runs if run.facts["seed"] == seed and run.last >= LONG]
        step = min([COMPARED, *(run.last for run in starts if is_corrected(run))])
        rows += [
            {
                "run": run.name,
                "seed": seed,
                "is_corrected": is_corrected(run),
                "step": step,
                "logit": series(run.frame, "max_logit").loc[:step].max(),
            }
            for run in starts
        ]
    columns = ["run", "seed", "is_corrected", "step", "logit"]
    return pd.DataFrame(rows, columns=columns).sort_values(["seed", "logit"])


def _as_step(step: float) -> str:
    return "-" if pd.isna(step) else f"{step:,.0f}"


def main(arguments: list[str] | None = None) -> None:
    options = options_of(__doc__, arguments)
    found = runs_at(load(options.results))
    if not found:
        raise SystemExit(f"{options.results}: no run at a rate of {RATE:g}")
    told = {"logit": "{:,.0f}".format, **dict.fromkeys(STEPS, _as_step)}
    shown = table(found)
    shown["above"] = shown["above"].round(3) + 0.0  # no "-0.000"
    text = shown.to_string(index=False, float_format="{:.3f}".format, na_rep="-", formatters=told)
    print(text)
    print(
        f"\nabove: nats that the loss lies above that of a corrected start of the seed, else of the"
        f" longest other one, mean of {WINDOW} steps. departs: where that passes {MARGIN}."
    )
    print("chance: the largest such difference before the first advisory or alarm of either.")
    if not (by_seed := compared(found)).empty:
        print("\nThe largest logits that long starts have come to:\n")
        print(by_seed.to_string(index=False, float_format="{:,.0f}".format))


if __name__ == "__main__":
    main()
