"""What correction is worth on GPT-2 small at the study's rate, and what it costs.

    python -m studies.rescue.worth studies/rescue/results

None of this was set before; all of it was looked at afterwards. It prints:

- how far the loss of runs without a correction lies above that of the run of the same seed and
  batches that was corrected from the start, in windows of steps in which none had failed;
- what a step that takes longer costs at an equal time of computing: nats by which the loss falls
  from one step to so many times that step;
- how far copies that were switched at their alarm end above the run corrected from the start;
- whether the head that is alarmed first has the largest logit where the loss departs.
"""

from __future__ import annotations

import numpy as np
import pandas as pd

from guardbit.monitor.replay import replay
from studies.rescue.lines import RATE, matched_run
from studies.rescue.measures import MARGIN, WINDOW, excess_loss, loss_departure, series
from studies.rescue.packed import ALARMED_FIRST, LOSS_STEPS, Run, begun_at, load, options_of

#: Windows of steps in which losses are compared.
WINDOWS = ((5000, 7000), (7000, 9000), (9000, 11000))
#: How much longer a step takes with `always=True`, by `compensated` (`benchmarks/overhead.py`).
COST = 0.025
#: Steps over which the fall of the loss is fitted.
FITTED = (4000, 12000)


def uncorrected(runs: list[Run]) -> list[tuple[Run, Run]]:
    """Starts without a switch on cuDNN at the study's rate, and their seed's corrected run."""
    found = []
    for run in runs:
        is_start = run.facts["arm"] == "stock" and begun_at(run.name) is None
        is_alike = (run.facts["backend"], run.facts["learning_rate"]) == ("cudnn", RATE)
        if is_start and is_alike and run.name not in ALARMED_FIRST:
            twin = matched_run(run, runs)
            if twin is not None and twin.facts["arm"] == "from_start":
                found.append((run, twin))
    return found


def gains(pairs: list[tuple[Run, Run]]) -> pd.DataFrame:
    """Nats by which each seed's uncorrected runs lie above the corrected one, a row a window.

    A run counts in a window that it ends before it has failed or come within half of that.
    """
    rows = []
    for run, twin in pairs:
        excess = excess_loss(series(run.frame, "loss"), series(twin.frame, "loss"))
        near = excess.rolling(WINDOW // LOSS_STEPS).mean() > MARGIN / 2
        sound_until = near.index[near][0] if near.any() else excess.index[-1]
        for begin, end in WINDOWS:
            if end <= sound_until:
                mean = excess.loc[begin:end].mean()
                rows.append(
                    {"window": f"{begin:,} to {end:,}", "seed": run.facts["seed"], "gain": mean}
                )
    by_seed = pd.DataFrame(rows).groupby(["window", "seed"])["gain"].mean()
    found = by_seed.groupby("window").agg(["mean", "min", "max", "count"])
    return found.loc[[f"{begin:,} to {end:,}" for begin, end in WINDOWS]]


def price(pairs: list[tuple[Run, Run]], cost: float = COST) -> float:
    """Nats that the corrected runs' loss falls from any step to 1 + `cost` times that step."""
    slopes = []
    for twin in {twin.name: twin for _, twin in pairs}.values():
        loss = series(twin.frame, "loss").loc[FITTED[0] : FITTED[1]]
        slopes.append(np.polyfit(np.log(loss.index), loss, 1)[0])
    return float(-np.mean(slopes) * np.log1p(cost))


def rescued(runs: list[Run]) -> pd.Series:
    """By the run's name, nats by which copies switched at their alarm end above correction."""
    found = {}
    for run in runs:
        is_rescue = run.facts["arm"].startswith("rescue") and run.facts["stabilizer"] != "row_max"
        twin = matched_run(run, runs)
        if is_rescue and twin is not None and twin.facts["arm"] == "from_start":
            excess = excess_loss(series(run.frame, "loss"), series(twin.frame, "loss"))
            found[run.name] = excess.iloc[-WINDOW // LOSS_STEPS :].mean()
    return pd.Series(found)


def named(runs: list[Run]) -> pd.DataFrame:
    """Of each uncorrected failure, the head alarmed first and that with the largest logit then."""
    rows = []
    for run in (r for r in runs if r.facts["arm"] == "stock" and begun_at(r.name) is None):
        if (twin := matched_run(run, runs)) is None:
            continue
        departed = loss_departure(series(run.frame, "loss"), series(twin.frame, "loss"))
        alarms = replay(run.frame).alarms
        first = next((alarm for alarm in alarms if alarm.heads), None)
        if departed is None or first is None or first.step > departed:
            continue
        logits = run.frame[run.frame["indicator"] == "max_logit"]
        at = logits[logits["step"] == logits["step"][logits["step"] <= departed].max()]
        largest = at.loc[at["value"].idxmax()]
        heads = [(first.site, head) for head in first.heads]
        rows.append({
            "run": run.name, "alarm": first.step, "first": heads, "departs": departed,
            "largest": (largest["site"], int(largest["head"])),
            "same": (largest["site"], largest["head"]) in heads,
        })  # fmt: skip
    return pd.DataFrame(rows)


def main(arguments: list[str] | None = None) -> None:
    runs = load(options_of(__doc__, arguments).results)
    pairs = uncorrected(runs)
    print("Nats above correction from the start, before any failure:")
    print(gains(pairs).to_string(float_format="{:.4f}".format))
    print(f"\n{COST:.1%} more steps are worth {price(pairs):.4f} nats")
    above = rescued(runs)
    print(f"\n{len(above)} copies switched at their alarm end {above.median():.4f} above "
          f"({above.min():.4f} to {above.max():.4f})")  # fmt: skip
    heads = named(runs)
    print(f"\nAlarmed first, and largest at departure: {heads['same'].sum()} of {len(heads)}")
    print(heads.to_string(index=False))


if __name__ == "__main__":
    main()
