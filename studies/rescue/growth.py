"""Does rounding explain the growth of W_Q? A table and a figure of what `push.py` has measured.

python -m studies.rescue.growth studies/rescue/results/push-*.csv.gz --figure push.png
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from scipy.stats import bootstrap, spearmanr

#: Column of the file -> what the engine is called.
ENGINES = {
    "growth_run": "cuDNN",
    "growth_flash": "flash",
    "growth_guardbit": "GuardBit, none",
    "growth_compensated": "compensated",
    "growth_exact_delta": "exact_delta",
    "growth_centred": "centred keys",
}
#: Those that nothing is done for.
_NATIVE = ("growth_run", "growth_flash", "growth_guardbit")

#: How many heads are shown: those to whose sigma cuDNN's rounding adds most.
SHOWN = 3


def totals(frame: pd.DataFrame) -> pd.DataFrame:
    """Sums over all steps of a file: a row a head, (layer, head), what rounding adds most last."""
    sums = frame.groupby(["layer", "head"]).sum().drop(columns=["step", "sigma"])
    return sums.sort_values("growth_run")


def correlation(sums: pd.DataFrame) -> tuple[float, float, float]:
    """Of what rounding adds with what log sigma did, over heads, and its 95 % interval.

    The interval is bootstrapped over heads (bias-corrected, 9,999 draws).
    """

    def pearson(growth: np.ndarray, change: np.ndarray) -> float:
        return float(np.corrcoef(growth, change)[0, 1])

    sample = sums["growth_run"].to_numpy(), sums["change"].to_numpy()
    seed = np.random.default_rng(0)
    found = bootstrap(sample, pearson, paired=True, vectorized=False, random_state=seed)
    return pearson(*sample), *found.confidence_interval


def table(name: str, frame: pd.DataFrame) -> str:
    """What became of the heads that rounding pushes most, of the others, and the correlation."""
    sums = totals(frame)
    shown = ["change", "growth_all", *(column for column in ENGINES if column in sums)]
    steps = f"steps {frame['step'].min()} to {frame['step'].max()}"
    rows = sums[shown].tail(SHOWN)[::-1]
    rows.index = [f"head {layer}.{head}" for layer, head in rows.index]
    rows.loc["median of the others"] = sums[shown].iloc[:-SHOWN].median()
    r, low, high = correlation(sums)
    ranks = spearmanr(sums["growth_run"], sums["change"]).statistic
    others = sums["growth_run"].iloc[:-1].corr(sums["change"].iloc[:-1])
    return "\n".join(
        [
            f"{name}, {steps}: per cent of sigma, summed over the steps",
            (100 * rows).rename(columns=ENGINES).to_string(float_format="{:+.2f}".format),
            "correlation of cuDNN's rounding with the change, over heads:"
            f" {r:.2f} ({low:.2f} to {high:.2f});"
            f" without the first of them {others:.2f}; of their ranks {ranks:.2f}",
        ]
    )


def draw(frames: dict[str, pd.DataFrame]) -> plt.Figure:
    """One row a file: the head that is pushed most, step by step, and all heads."""
    figure, rows = plt.subplots(len(frames), 2, figsize=(11, 3.8 * len(frames)), squeeze=False)
    for (name, frame), (left, right) in zip(frames.items(), rows, strict=True):
        sums = totals(frame)
        layer, head = sums.index[-1]
        one = frame[(frame["layer"] == layer) & (frame["head"] == head)].set_index("step")
        running = 100 * one.cumsum()
        left.plot(running["change"], color="black", linewidth=2.5, label="sigma itself")
        for column, label in ENGINES.items():
            if column in one:
                style = "-" if column in _NATIVE else "--"
                left.plot(running[column], style, linewidth=1.5, label=label)
        left.set(title=f"{name}, head {layer}.{head}", xlabel="step", ylabel="% of sigma, summed")
        left.legend(fontsize=8)
        right.axline((0, 0), slope=1, color="0.7", linewidth=1)
        right.scatter(100 * sums["growth_run"], 100 * sums["change"], s=14)
        for (layer, head), row in sums.tail(SHOWN).iterrows():
            place = 100 * row["growth_run"], 100 * row["change"]
            right.annotate(
                f"{layer}.{head}", place, textcoords="offset points", xytext=(-24, -3), fontsize=8
            )
        right.set(
            title=f"{name}, all {len(sums)} heads",
            xlabel="what cuDNN's rounding adds to sigma, %",
            ylabel="what sigma did, %",
        )
    figure.tight_layout()
    return figure


def main(arguments: list[str]) -> None:
    """Reads the command line; see the module's docstring."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("files", type=Path, nargs="+")
    parser.add_argument("--figure", type=Path, help="where to draw it")
    options = parser.parse_args(arguments)
    frames = {
        path.name.removesuffix(".csv.gz").removeprefix("push-"): pd.read_csv(path)
        for path in options.files
    }
    print("\n\n".join(table(name, frame) for name, frame in frames.items()))
    if options.figure:
        draw(frames).savefig(options.figure, dpi=120)


if __name__ == "__main__":
    main(sys.argv[1:])
