"""Does the sampled push of rounding explain the growth of W_Q over a whole run?

    python -m studies.rescue.sampled_push studies/rescue/results --figure sampled-push.png

For each run from step 1 that audited all heads and recorded `w_q_push`: what its running sum and
the logarithm of sigma (`w_q_spectral_norm`) did between two steps, and how these go together over
heads.
"""

from __future__ import annotations

import sys

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from scipy.stats import bootstrap, pearsonr, spearmanr

from studies.rescue.measures import series
from studies.rescue.packed import Run, audits_all, load, options_of

#: The first step, after the warm-up, and the last.
FIRST, LAST = 2000, 7400


def audited(runs: list[Run]) -> list[Run]:
    """The runs from step 1 that recorded the push of all heads."""
    found = []
    for run in runs:
        pushes = run.frame[run.frame["indicator"] == "w_q_push"]
        if not run.facts["branched_from"] and not pushes.empty and audits_all(pushes):
            found.append(run)
    return found


def histories(run: Run) -> dict[str, pd.DataFrame]:
    """The running sum of the push and log sigma from `FIRST` to `LAST`, both from 0 on.

    Returns:
        `push` and `growth`, each with a row a step and a column a head, (layer, head).
    """
    tables = {}
    for name, indicator in (("push", "w_q_push_cumulative"), ("growth", "w_q_spectral_norm")):
        rows = run.frame[run.frame["indicator"] == indicator]
        table = rows.pivot_table(index="step", columns=["layer", "head"], values="value")
        table = np.log(table) if name == "growth" else table
        tables[name] = table.loc[:LAST] - table.loc[:FIRST].iloc[-1]
    return tables


def changes(run: Run) -> pd.DataFrame:
    """What both did from `FIRST` to `LAST`: a row a head, with `push` and `growth`."""
    return pd.DataFrame({name: rows.iloc[-1] for name, rows in histories(run).items()}).dropna()


def table(runs: list[Run]) -> pd.DataFrame:
    """A row a run: the correlation over heads, its bootstrapped 95 % interval, and others.

    `of_ranks` is that of the ranks, `of_sizes` that of the push without its sign.
    """
    rows = []
    for run in audited(runs):
        found = changes(run)
        sample = found["push"].to_numpy(), found["growth"].to_numpy()
        interval = bootstrap(
            sample, lambda a, b, axis: pearsonr(a, b, axis=axis).statistic, paired=True,
            random_state=np.random.default_rng(0),
        ).confidence_interval  # fmt: skip
        worst = found["growth"].idxmax()
        rows.append(
            {
                "run": run.name,
                "heads": len(found),
                "correlation": pearsonr(*sample).statistic,
                "low": interval.low,
                "high": interval.high,
                "of_ranks": spearmanr(*sample).statistic,
                "of_sizes": pearsonr(np.abs(sample[0]), sample[1]).statistic,
                "grew_most": "{}.{}".format(*worst),
                "its_growth": found.loc[worst, "growth"],
                "its_push": found.loc[worst, "push"],
                "largest_push": found["push"].abs().max(),
            }
        )
    return pd.DataFrame(rows)


def drawn(runs: list[Run]) -> list[Run]:
    """Of each seed on cuDNN the run with the largest logits, and the runs that were corrected."""
    furthest: dict[int, Run] = {}
    corrected = []
    for run in audited(runs):
        if run.facts["arm"] != "stock":
            corrected.append(run)
        elif run.facts["backend"] == "cudnn":
            held = furthest.setdefault(run.facts["seed"], run)
            if largest_logit(run) > largest_logit(held):
                furthest[run.facts["seed"]] = run
    return [furthest[seed] for seed in sorted(furthest)] + corrected


def largest_logit(run: Run) -> float:
    """The largest logit of the run, up to `LAST`."""
    return series(run.frame, "max_logit").loc[:LAST].max()


def draw(runs: list[Run]) -> plt.Figure:
    """A row a run: both histories of the head that grew most, and all heads."""
    shown = drawn(runs)
    figure, rows = plt.subplots(len(shown), 2, figsize=(10, 2.9 * len(shown)), squeeze=False)
    for run, (left, right) in zip(shown, rows, strict=True):
        history, found = histories(run), changes(run)
        worst = found["growth"].idxmax()
        name = f"seed {run.facts['seed']}"
        if run.facts["arm"] != "stock":
            name += f" on {run.facts['stabilizer']}"
        left.plot(history["growth"].loc[FIRST:, worst], color="black")
        left.set(title="{}, head {}.{}".format(name, *worst), xlabel="step")
        left.set_ylabel("growth of log sigma (black)")
        sums = left.twinx()  # of another unit
        sums.plot(history["push"].loc[FIRST:, worst], color="C0")
        sums.set_ylabel("sum of the push (blue)", color="C0")
        right.scatter(found["push"], found["growth"], s=10)
        right.set(
            title=f"{name}, all {len(found)} heads",
            xlabel="sum of the push",
            ylabel="growth of log sigma",
        )
    figure.tight_layout()
    return figure


def main(arguments: list[str]) -> None:
    """Reads the command line; see the module's docstring."""
    options = options_of(__doc__, arguments, figure="where to draw it")
    runs = load(options.results)
    print(table(runs).to_string(index=False))
    if options.figure:
        draw(runs).savefig(options.figure, dpi=110)


if __name__ == "__main__":
    main(sys.argv[1:])
