"""The paper's remedy, `row_max`, from the second step on, beside other runs of the same seeds.

    python -m studies.rescue.remedy studies/rescue/results

A run on it stands first of its seed, then those that were corrected from the second step on, then
starts without a switch, all up to the last step in common. Alarms are today's rules', replayed.
"""

from __future__ import annotations

import pandas as pd

from guardbit.monitor.replay import replay
from studies.rescue.lines import RATE, matched_run
from studies.rescue.measures import WINDOW, excess_loss, loss_departure, series
from studies.rescue.packed import LOSS_STEPS, Run, load, options_of

#: A run that ends before this step is left out.
REACHED = 6000


def starts(runs: list[Run]) -> dict[int, list[Run]]:
    """Seed -> its starts on cuDNN at the study's rate, that on `row_max` first; none without it."""
    found: dict[int, list[Run]] = {}
    for run in sorted(runs, key=_place):
        facts = run.facts
        is_start = facts["arm"] in ("stock", "from_start") and facts["branched_from"] is None
        is_alike = (facts["backend"], facts["learning_rate"]) == ("cudnn", RATE)
        if is_start and is_alike and run.last >= REACHED:
            found.setdefault(facts["seed"], []).append(run)
    return {seed: some for seed, some in found.items() if some[0].facts["stabilizer"] == "row_max"}


def table(runs: list[Run]) -> pd.DataFrame:
    """A row a run.

    Returns:
        Its seed, what was `done` and its name; the last of its `steps` that count; the largest
        `logit` and W_Q norm of any head up to there; the first `alarm`; how far the mean loss of
        the last 500 steps lies `above` the matched run's, in nats; and where that `departs`.
    """
    rows = []
    for seed, (own, *others) in starts(runs).items():
        ends = [(own, own.last), *((run, min(run.last, own.last)) for run in others)]
        # Once more beside a corrected run that ended before it.
        ends += [(own, end) for run, end in ends if run.facts["stabilizer"] and end < own.last]
        for run, last in ends:
            until = run.frame[run.frame["step"] <= last]
            row = {
                "seed": seed,
                "done": run.facts["stabilizer"] or "nothing",
                "run": run.name,
                "steps": last,
                "logit": series(until, "max_logit").max(),
                "W_Q": series(until, "w_q_spectral_norm").max(),
                "alarm": replay(until).first_alarm,
            }
            if (matched := matched_run(run, runs)) is not None:
                losses = series(until, "loss"), series(matched.frame, "loss")
                row["above"] = excess_loss(*losses).iloc[-WINDOW // LOSS_STEPS :].mean()
                row["departs"] = loss_departure(*losses)
            rows.append(row)
    return pd.DataFrame(rows)


def _place(run: Run) -> tuple[int, bool, bool, str]:
    stabilizer = run.facts["stabilizer"]
    return run.facts["seed"], stabilizer != "row_max", stabilizer is None, run.name


def main(arguments: list[str] | None = None) -> None:
    if (found := table(load(options_of(__doc__, arguments).results))).empty:
        raise SystemExit("no run was on row_max from the start")
    steps = dict.fromkeys(("alarm", "departs"), lambda x: "-" if pd.isna(x) else f"{x:,.0f}")
    told = {"logit": "{:,.0f}".format, "W_Q": "{:.1f}".format, "above": "{:.4f}".format}
    print(found.to_string(index=False, na_rep="-", formatters=told | steps))


if __name__ == "__main__":
    main()
