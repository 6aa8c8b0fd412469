"""The tables of the experiment, and its decision by the rules of README.md.

    python -m studies.tuned.analyse [--figure PATH] [--gather FOLDER ...]

Reads `results.csv` beside this file, a row a run. `--gather` writes that file anew from the folders
of runs: their `result.json` and what GuardBit recorded. Of that the
repository keeps what `studies.rescue.packed.kept_of` says, and the largest logit.
"""

from __future__ import annotations

import argparse
import itertools
import json
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from scipy import stats

from guardbit import read_events, read_run

TABLE = Path(__file__).with_name("results.csv")
RATES = (6e-4, 1e-3, 1.5e-3, 2.1e-3, 3e-3)
STAGE_1, STAGE_2 = (101, 102), tuple(range(201, 207))

#: Nats within which the first interval has to lie for the second decision, and its level.
NEAR, LEVEL = 0.004, 0.05

#: Held-out loss, nats, from which a run has no place in the figure: others end below 3.5.
DIVERGED = 4.0


def gathered(folders: list[Path]) -> pd.DataFrame:
    """A row a run: what it was, its held-out loss, its first alarm of a head, its largest logit."""
    rows = []
    for folder in folders:
        result = json.loads((folder / "result.json").read_text())
        events = read_events(folder)
        alarms = events.query("kind == 'alarm' and site != ''")["step"]
        logits = read_run(folder).query("indicator == 'max_logit'")["value"]
        kept = ("arm", "rate", "seed", "steps", "held_out", "seconds")
        rows.append(
            {name: result[name] for name in kept}
            | {"first_alarm": alarms.min(), "max_logit": logits.max()}
        )
    return pd.DataFrame(rows).sort_values(["seed", "rate", "arm"])


def best_rates(runs: pd.DataFrame) -> dict[str, float]:
    """The rate of each arm with the lowest mean held-out loss in the first stage."""
    first = runs[runs["seed"].isin(STAGE_1)].fillna({"held_out": np.inf})
    means = first.groupby(["arm", "rate"])["held_out"].mean()
    return {arm: float(means[arm].idxmin()) for arm in ("exact", "stock")}


def sign_flips(differences: np.ndarray) -> float:
    """One-sided exact p: how many of all signs give a mean as large."""
    signs = np.array(list(itertools.product([1, -1], repeat=len(differences))))
    means = (signs * differences).mean(1)
    # Sums of equal numbers in another order differ in the last bit.
    return float((means >= differences.mean() - 1e-12).mean())


def interval(differences: np.ndarray) -> tuple[float, float]:
    """The t interval of 95 % of the mean."""
    half = stats.t.ppf(0.975, len(differences) - 1) * stats.sem(differences)
    return float(differences.mean() - half), float(differences.mean() + half)


def differences(runs: pd.DataFrame) -> pd.DataFrame:
    """Stock less exact in nats, a row a seed of the second stage: `best`, and `excess`."""
    best = best_rates(runs)
    of = runs.set_index(["arm", "rate", "seed"])["held_out"]
    rows = {}
    for seed in STAGE_2:
        at = {}
        for arm, rate in best.items():
            higher = RATES[RATES.index(rate) + 1]
            at[arm] = of.get((arm, rate, seed)), of.get((arm, higher, seed))
        if all(value is not None for values in at.values() for value in values):
            (stock, stock_higher), (exact, exact_higher) = at["stock"], at["exact"]
            rows[seed] = stock - exact, (stock_higher - stock) - (exact_higher - exact)
    return pd.DataFrame.from_dict(rows, orient="index", columns=["best", "excess"])


def decision(found: pd.DataFrame) -> str:
    """What the README may say, by the rules."""
    low, high = interval(found["best"].to_numpy())
    if low > 0:
        return "1: switch it on for learned or no positions"
    near = low >= -NEAR and high <= NEAR
    if near and found["excess"].mean() > 0 and sign_flips(found["excess"].to_numpy()) < LEVEL:
        return "2: insurance, and room for a higher rate"
    return "3: in a tuned recipe correcting earns nothing that we could measure"


def draw(runs: pd.DataFrame) -> plt.Figure:
    """Held-out loss over rates, both arms, seeds as points; what diverged stands as text."""
    figure, axes = plt.subplots(figsize=(6, 4))
    names = {"stock": "stock, 8,000 steps", "exact": "exact delta, 7,663 steps"}
    for arm, colour, aside in (("stock", "C3", 0.99), ("exact", "C0", 1.01)):
        of = runs[(runs["arm"] == arm) & (runs["held_out"] < DIVERGED)]
        axes.plot(of["rate"] * aside, of["held_out"], "o", color=colour, alpha=0.5, markersize=5)
        axes.plot(of.groupby("rate")["held_out"].mean(), color=colour, label=names[arm])
    gone = runs[runs["held_out"] >= DIVERGED]
    for rate, losses in gone.groupby("rate")["held_out"]:
        said = f"{len(losses)} runs diverged: {losses.min():.1f} to {losses.max():.1f}"
        axes.text(rate, axes.get_ylim()[1], f"{said} ", ha="right", va="top", rotation=90)
    rates = sorted(runs["rate"].unique())
    axes.set(xscale="log", xlabel="largest rate of the schedule", ylabel="held-out loss, nats")
    axes.set_xticks(rates, [f"{rate:.1e}" for rate in rates])
    axes.set_xticks([], minor=True)
    axes.legend()
    figure.tight_layout()
    return figure


def main(arguments: list[str] | None = None) -> None:
    """Prints the tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gather", type=Path, nargs="+", metavar="FOLDER")
    parser.add_argument("--figure", type=Path)
    options = parser.parse_args(arguments)
    if options.gather:
        gathered(options.gather).to_csv(TABLE, index=False, float_format="%.8g")
    runs = pd.read_csv(TABLE)
    means = runs.pivot_table("held_out", ["arm", "seed"], "rate")
    print(means.round(4).to_string(na_rep="-"))
    done = runs[runs["seed"].isin(STAGE_1)].groupby(["arm", "rate"]).size()
    print(f"\nStage 1: {done.sum()} of 16 runs")
    if done.sum() == 16:
        print("best rates:", best_rates(runs))
        found = differences(runs)
        print(f"Stage 2: {len(found)} of {len(STAGE_2)} seeds complete")
        for name in found if len(found) > 1 else ():
            values = found[name].to_numpy()
            low, high = interval(values)
            print(
                f"{name}: {values.mean():.4f} nats (95 % {low:.4f} to {high:.4f}),"
                f" p = {sign_flips(values):.4f}"
            )
        if len(found) == len(STAGE_2):
            print(decision(found))
    alarmed = runs["first_alarm"].notna()
    print(f"\n{alarmed.sum()} of {len(runs)} runs alarmed")
    if options.figure:
        draw(runs).savefig(options.figure, dpi=120)


if __name__ == "__main__":
    main()
