"""The study's table: which runs failed, which were warned, which were saved.

    python -m studies.rescue.analyse pack runs/rescue studies/rescue/results
    python -m studies.rescue.analyse table studies/rescue/results

`pack` makes each run small enough for the repository: the loss of every 20th step and, every 200
steps, each layer's largest value over heads. `table` prints one line a run and one an arm.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pandas as pd
from scipy.stats import beta

from guardbit import read_events, read_run

#: A run has failed at the first step at which its loss, averaged over the WINDOW steps before, lies
#: MARGIN nats above that of the matched run, the one whose heads are all compensated from the
#: start, with the same seed, batches and rate. A loss that is not finite is large. Pairs of
#: recorded stable runs on the same batches (`tests/data/runs`) differ by 0.046 at most from step
#: 1,000 on; the failing one passes 0.17.
MARGIN, WINDOW = 0.1, 500

_LARGE_LOSS = 1e3

_HEAD_STEPS, _LOSS_STEPS = 200, 20


def pack(runs: Path, results: Path) -> None:
    """Writes `NAME.csv.gz`, `NAME.events.csv` and `NAME.json` for every run below a folder."""
    results.mkdir(parents=True, exist_ok=True)
    for about in sorted(runs.glob("*/about.json")):
        folder, name = about.parent, about.parent.name
        frame = read_run(folder)
        scalars = frame[frame["site"] == ""]
        kept = scalars["step"] % _LOSS_STEPS == 0
        heads = frame[(frame["site"] != "") & (frame["step"] % _HEAD_STEPS == 0)]
        largest = heads.loc[
            heads.assign(size=heads["value"].abs())
            .groupby(["step", "site", "indicator"], observed=True)["size"]
            .idxmax()
        ]
        packed = pd.concat([scalars[kept], largest]).sort_values(["step", "layer", "indicator"])
        packed.to_csv(results / f"{name}.csv.gz", index=False, float_format="%.5g")
        read_events(folder).to_csv(results / f"{name}.events.csv", index=False)
        facts = json.loads(about.read_text())
        clock = folder / "clock.csv"
        if clock.exists():
            steps, seconds = np.loadtxt(clock, delimiter=",", ndmin=2).T
            facts["clock"] = {"steps": steps.tolist(), "seconds": seconds.tolist()}
        (results / f"{name}.json").write_text(json.dumps(facts))


def losses(results: Path, name: str) -> pd.Series:
    """Loss by step, as far as it was kept."""
    frame = pd.read_csv(results / f"{name}.csv.gz")
    return frame[frame["indicator"] == "loss"].set_index("step")["value"]


def departure(loss: pd.Series, reference: pd.Series) -> int | None:
    """First step at which a run has failed, by the definition above; None if it has not.

    Args:
        loss: By step.
        reference: The same of the matched run.
    """
    both = reference.index.intersection(loss.index)
    excess = loss.reindex(both).where(np.isfinite, _LARGE_LOSS) - reference.reindex(both)
    average = excess.rolling(WINDOW // _LOSS_STEPS, min_periods=1).mean()
    failing = average.index[average > MARGIN]
    return int(failing[0]) if len(failing) else None


def speed(facts: dict, first: int, last: int) -> float:
    """Steps a second between two steps, from the clock; NaN where it says nothing."""
    steps, seconds = (np.array(facts.get("clock", {}).get(key, [])) for key in ("steps", "seconds"))
    chosen = (steps[:-1] >= first) & (steps[1:] <= last) & (np.diff(seconds) > 0)
    # The median passes over pauses and, where a run was resumed, over the clock's new start.
    rates = (np.diff(steps) / np.diff(seconds))[chosen]
    return float(np.median(rates)) if rates.size else float("nan")


def one_line_a_run(results: Path) -> pd.DataFrame:
    """Step of failure, alarm and switch, lead, verdict and last loss of every packed run."""
    rows = []
    about = {path.stem: json.loads(path.read_text()) for path in results.glob("*.json")}
    for name, facts in sorted(about.items()):
        loss = losses(results, name)
        last = int(loss.index[-1])
        end = loss[loss.index > last - 500].mean()
        twins = [
            other
            for other, its in about.items()
            if its["arm"] == "from_start"
            and its["stabilizer"] == "compensated"
            and (its["seed"], its["learning_rate"]) == (facts["seed"], facts["learning_rate"])
        ]
        failed = above = None
        if twins:
            reference = losses(results, twins[0])
            failed = departure(loss, reference)
            upto = reference[reference.index <= last]
            above = end - upto[upto.index > last - 500].mean()
        events = pd.read_csv(results / f"{name}.events.csv")
        alarms, switches = events[events["kind"] == "alarm"], events[events["kind"] == "switch"]
        verdicts = events[events["kind"] == "verdict"]
        alarm = None if alarms.empty else int(alarms["step"].iloc[0])
        switch = None if switches.empty else int(switches["step"].iloc[0])
        rows.append(
            {
                "run": name,
                "arm": facts["arm"],
                "backend": facts["backend"],
                "stabilizer": facts["stabilizer"] or "",
                "learning_rate": facts["learning_rate"],
                "seed": facts["seed"],
                "steps": last,
                "matched": bool(twins),
                "failed_at": failed,
                "first_alarm": alarm,
                "rule": "" if alarms.empty else alarms["rule"].iloc[0],
                "lead": None if failed is None or alarm is None else failed - alarm,
                "verdict": "" if verdicts.empty else verdicts["rule"].iloc[-1],
                "first_switch": switch,
                "switches": len(switches),
                "last_loss": end,
                "above_matched": above,
                "speed_before": speed(facts, 300, switch or last),
                "speed_after": float("nan") if switch is None else speed(facts, switch + 100, last),
            }
        )
    return pd.DataFrame(rows)


def one_line_an_arm(runs: pd.DataFrame) -> pd.DataFrame:
    """How many runs of each arm failed, with the exact 95 % interval (Clopper and Pearson)."""
    rows = []
    keys = ["arm", "backend", "stabilizer", "learning_rate"]
    for key, group in runs[runs["matched"]].groupby(keys):
        failed, total = int(group["failed_at"].notna().sum()), len(group)
        low = beta.ppf(0.025, failed, total - failed + 1) if failed else 0.0
        high = beta.ppf(0.975, failed + 1, total - failed) if failed < total else 1.0
        rows.append(
            {
                **dict(zip(keys, key, strict=True)),
                "runs": total,
                "failed": failed,
                "failed_95": f"{low:.2f} to {high:.2f}",
                "alarmed": int(group["first_alarm"].notna().sum()),
                "least_lead": group["lead"].min(),
                "above_matched": f"{group['above_matched'].min():+.3f} to "
                f"{group['above_matched'].max():+.3f}",
            }
        )
    return pd.DataFrame(rows)


def main(command: str, *folders: str) -> None:
    """Packs, or prints both tables and writes them beside the data."""
    if command == "pack":
        pack(Path(folders[0]), Path(folders[1]))
        return
    results = Path(folders[0])
    runs = one_line_a_run(results)
    arms = one_line_an_arm(runs)
    runs.to_csv(results / "runs.csv", index=False, float_format="%.5g")
    arms.to_csv(results / "arms.csv", index=False, float_format="%.5g")
    print(runs.to_string(index=False))
    print(arms.to_string(index=False))


if __name__ == "__main__":
    main(*sys.argv[1:])
