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


def parts(sums: pd.DataFrame) -> pd.DataFrame:
    """What log sigma did, taken apart: the last three columns add up to the first.

    Args:
        sums: What `totals` returned.

    Returns:
        A row a head: what `sigma` did; what the run's own `rounding` added, and what the `gradient`
        would have without it, both in first order; and the `rest`, which is of higher order.
    """
    return pd.DataFrame(
        {
            "sigma": sums["change"],
            "rounding": sums["growth_run"],
            "gradient": sums["growth_all"] - sums["growth_run"],
            "rest": sums["change"] - sums["growth_all"],
        }
    )


def lines(columns: pd.DataFrame) -> str:
    """Per cent, of the heads that are shown and of the median of the others."""
    rows = columns.tail(SHOWN)[::-1]
    rows.index = [f"head {layer}.{head}" for layer, head in rows.index]
    rows.loc["median of the others"] = columns.iloc[:-SHOWN].median()
    return (100 * rows).to_string(float_format="{:+.2f}".format)


def table(name: str, frame: pd.DataFrame) -> str:
    """What became of the heads that rounding pushes most, of the others, and the correlation."""
    sums = totals(frame)
    engines = [column for column in ENGINES if column in sums]
    steps = f"steps {frame['step'].min()} to {frame['step'].max()}"
    by_engine = sums[engines].rename(columns=ENGINES)
    r, low, high = correlation(sums)
    ranks = spearmanr(sums["growth_run"], sums["change"]).statistic
    others = sums["growth_run"].iloc[:-1].corr(sums["change"].iloc[:-1])
    rank = int((sums["change"] > sums["change"].iloc[-1]).sum()) + 1
    alike = ", ".join(
        f"{ENGINES[column]} {sums['growth_run'].corr(sums[column]):.2f}" for column in engines[1:]
    )
    return f"""{name}, {steps}: per cent of sigma, summed over the steps

{lines(parts(sums))}

sigma: what it did. rounding: what cuDNN's adds. gradient: the gradient without it.
rest: what is not of first order.
Of {len(sums)} heads the first, to which rounding adds most, is number {rank} by what sigma did.

What each engine's rounding adds, from the same inputs:

{lines(by_engine)}

Correlation over heads, of cuDNN's rounding and what sigma did: {r:.2f} ({low:.2f} to {high:.2f});
without the first head {others:.2f}; of ranks {ranks:.2f}.
Of cuDNN's rounding and that of others: {alike}."""


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
