"""Does the sampled push of rounding explain the growth of W_Q over a whole run?

    python -m studies.rescue.sampled_push studies/rescue/results

For each run from step 1 that audited all heads and recorded `w_q_push`: what its running sum and
the logarithm of sigma (`w_q_spectral_norm`) did between two steps, and how these go together over
heads.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import numpy as np
import pandas as pd
from scipy.stats import bootstrap, pearsonr, spearmanr

from studies.rescue.packed import Run, audits_all, load

#: The first step, after the warm-up, and the last.
FIRST, LAST = 2000, 7400


def changes(run: Run) -> pd.DataFrame:
    """What both did from `FIRST` to `LAST`: a row a head, with `push` and `growth`."""
    columns = {}
    for name, indicator in (("push", "w_q_push_cumulative"), ("growth", "w_q_spectral_norm")):
        rows = run.frame[run.frame["indicator"] == indicator]
        table = rows.pivot_table(index="step", columns=["layer", "head"], values="value")
        table = np.log(table) if name == "growth" else table
        columns[name] = table.loc[:LAST].iloc[-1] - table.loc[:FIRST].iloc[-1]
    return pd.DataFrame(columns).dropna()


def table(runs: list[Run]) -> pd.DataFrame:
    """A row a run: the correlation over heads, its bootstrapped 95 % interval, and the ranks'."""
    rows = []
    for run in runs:
        pushes = run.frame[run.frame["indicator"] == "w_q_push"]
        if run.facts["branched_from"] or pushes.empty or not audits_all(pushes):
            continue
        found = changes(run)
        sample = found["push"].to_numpy(), found["growth"].to_numpy()
        interval = bootstrap(
            sample, lambda a, b: pearsonr(a, b).statistic, paired=True, vectorized=False,
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
                "grew_most": "{}.{}".format(*worst),
                "its_growth": found.loc[worst, "growth"],
                "its_push": found.loc[worst, "push"],
                "largest_push": found["push"].abs().max(),
            }
        )
    return pd.DataFrame(rows)


def main(arguments: list[str]) -> None:
    """Reads the command line; see the module's docstring."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("results", type=Path)
    print(table(load(parser.parse_args(arguments).results)).to_string(index=False))


if __name__ == "__main__":
    main(sys.argv[1:])
