"""Does rounding explain the growth of W_Q? A table and a figure of what `push.py` has measured.

    python -m studies.rescue.growth studies/rescue/results/push-*.csv.gz --figure push.png

All figures are sums over steps of changes of log sigma, times 100 ("log points"): 10 are a factor
of 1.105. The run that was measured is a second one from the checkpoint, eager where its original is
compiled, so that the two part; what the original's heads did is told beside it.
"""

from __future__ import annotations

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from scipy.stats import bootstrap, spearmanr

from guardbit import read_run
from studies.rescue.packed import options_of
from studies.rescue.push import STEPS

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

#: Name of a file, less "push-" -> the run, beside it, whose checkpoint it went on from.
ORIGINALS = {
    "seed1": "stock-cudnn-lr1.5e-03-seed1-again12",
    "seed4": "stock-cudnn-lr1.5e-03-seed4-again9",
    "seed4-3200": "stock-cudnn-lr1.5e-03-seed4-again40",
    "seed8": "stock-cudnn-lr1.5e-03-seed8-again11",
    "seed9": "stock-cudnn-lr1.5e-03-seed9-again5",
    "seed9-2400": "stock-cudnn-lr1.5e-03-seed9-again50",
    "seed10": "stock-cudnn-lr1.5e-03-seed10-again5",
    "seed12": "stock-cudnn-lr1.5e-03-seed12-again11",
    "seed12-6400": "stock-cudnn-lr1.5e-03-seed12-again11",
}

#: First steps with another batch, left out: AdamW averages squares over 20.
ADAPTED = 20
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
    """Takes apart what `sigma` did, of the sums that `totals` returned: a row a head.

    What the run's own `rounding` added, and the `gradient` would have without it, are of first
    order; the `rest` is of higher order.
    """
    return pd.DataFrame(
        {
            "sigma": sums["change"],
            "rounding": sums["growth_run"],
            "gradient": sums["growth_all"] - sums["growth_run"],
            "rest": sums["change"] - sums["growth_all"],
        }
    )


def original_change(run: pd.DataFrame, first: int, last: int) -> pd.DataFrame:
    """The `change` of log sigma of an original's heads, by (layer, head).

    It is that from the last step kept up to `first` to the first from `last` on, its `attrs`.
    """
    norms = run[run["indicator"] == "w_q_spectral_norm"]
    by_step = norms.pivot(index=["layer", "head"], columns="step", values="value")
    steps = by_step.columns
    ends = steps[steps <= first].max(), steps[steps >= last].min()
    change = np.log(by_step[ends[1]] / by_step[ends[0]]).to_frame("change")
    change.attrs = dict(zip(("first", "last"), ends, strict=True))
    return change


def lines(columns: pd.DataFrame) -> str:
    """Log points of the heads that are shown, and of the median of the others."""
    rows = columns.tail(SHOWN)[::-1]
    rows.index = [f"head {layer}.{head}" for layer, head in rows.index]
    others = columns.iloc[:-SHOWN]
    rows.loc[f"median of the other {len(others)}"] = others.median()
    return (100 * rows).to_string(float_format="{:+.2f}".format)


def place(values: pd.Series) -> int:
    """The place of the last head among all, the largest value first."""
    return int((values > values.iloc[-1]).sum()) + 1


def with_and_without(of: pd.Series, other: pd.Series) -> str:
    """A correlation over heads, and that without the last one."""
    return f"{of.corr(other):.2f} ({of.iloc[:-1].corr(other.iloc[:-1]):.2f})"


def table(name: str, frame: pd.DataFrame, original: pd.DataFrame | None = None) -> str:
    """What became of the heads that rounding pushes most, of the others, and correlations."""
    sums = totals(frame)
    engines = [column for column in ENGINES if column in sums]
    rounding, change = sums["growth_run"], sums["change"]
    apart = parts(sums)
    in_original = ""
    if original is not None:
        apart["original"] = original["change"].reindex(sums.index)
        in_original = f"""
original: what sigma did in the run that this one began as, steps {original.attrs["first"]} to \
{original.attrs["last"]}: there its place is {place(apart["original"])},
and the correlation of rounding with it {with_and_without(rounding, apart["original"])}."""
    layer, head = sums.index[-1]
    first = frame[(frame["layer"] == layer) & (frame["head"] == head)]
    sigmas = frame[frame["step"] == frame["step"].min()].set_index(["layer", "head"])["sigma"]
    sigmas = sigmas.reindex(sums.index)
    _, low, high = correlation(sums)
    alike = ",\n".join(
        f"{ENGINES[column]} {with_and_without(rounding, sums[column])}" for column in engines[1:]
    )
    return f"""{name}, steps {frame["step"].min()} to {frame["step"].max()}: log points

{lines(apart)}

sigma: what it did. rounding: what cuDNN's adds. gradient: the gradient without it.
rest: what is not of first order.
The first head is the one to which rounding adds most. Its place among {len(sums)}:
by what sigma did {place(change)}; by the smallest sigma {place(-sigmas)},\
 {sigmas.iloc[-1]:.2f} where the median is {sigmas.median():.2f}.
In this head, over windows of {STEPS} steps, rounding and sigma go together by\
 {first["growth_run"].corr(first["change"]):.2f}.{in_original}

What each engine's rounding adds, from the same inputs:

{lines(sums[engines].rename(columns=ENGINES))}

Correlations over heads with what cuDNN's rounding adds, in brackets without the first head:
what sigma did {with_and_without(rounding, change)}, bootstrapped {low:.2f} to {high:.2f}; of ranks\
 {spearmanr(rounding, change).statistic:.2f};
{alike}."""


def noise(name: str, frame: pd.DataFrame) -> str:
    """What one head's sigma gets a step, log points, once AdamW's averages are of the new batch."""
    late = frame[frame["step"] >= frame["step"].min() + ADAPTED] * 100
    rounding, rest = late["growth_run"], late["growth_all"] - late["growth_run"]
    ratio = rounding.mean() / rest.std()
    return f"{name}: rounding {rounding.mean():.3f}, sd {rounding.std():.3f}; \
rest of the gradient {rest.mean():.3f}, sd {rest.std():.3f}; ratio {ratio:.2f}"


def draw(frames: dict[str, pd.DataFrame]) -> plt.Figure:
    """One row a file: the head that is pushed most, step by step, and all heads."""
    figure, rows = plt.subplots(len(frames), 2, figsize=(11, 3.8 * len(frames)), squeeze=False)
    for (name, frame), (left, right) in zip(frames.items(), rows, strict=True):
        sums = totals(frame)
        layer, head = sums.index[-1]
        one = frame[(frame["layer"] == layer) & (frame["head"] == head)].set_index("step")
        running = 100 * one.cumsum()
        left.plot(running["change"], color="black", linewidth=2.5, label="log sigma itself")
        for column, label in ENGINES.items():
            if column in one:
                style = "-" if column in _NATIVE else "--"
                left.plot(running[column], style, linewidth=1.5, label=label)
        left.set(title=f"{name}, head {layer}.{head}", xlabel="step", ylabel="log points, summed")
        left.legend(fontsize=8)
        right.axline((0, 0), slope=1, color="0.7", linewidth=1)
        right.scatter(100 * sums["growth_run"], 100 * sums["change"], s=14)
        for (layer, head), row in sums.tail(SHOWN).iterrows():
            spot = 100 * row["growth_run"], 100 * row["change"]
            right.annotate(
                f"{layer}.{head}", spot, textcoords="offset points", xytext=(-24, -3), fontsize=8
            )
        right.set(
            title=f"{name}, all {len(sums)} heads",
            xlabel="what cuDNN's rounding adds, log points",
            ylabel="change of log sigma, log points",
        )
    figure.tight_layout()
    return figure


def main(arguments: list[str] | None = None) -> None:
    options = options_of(__doc__, arguments, figure="where to draw it", several=True)
    frames, originals = {}, {}
    for path in options.results:
        name = path.name.removesuffix(".csv.gz").removeprefix("push-")
        if name.startswith("batch-"):
            print(noise(name, pd.read_csv(path)))
            continue
        frame = frames[name] = pd.read_csv(path)
        if name in ORIGINALS:
            run = read_run(path.parent / ORIGINALS[name])
            originals[name] = original_change(run, frame["step"].min(), frame["step"].max())
    print("\n\n".join(table(name, frame, originals.get(name)) for name, frame in frames.items()))
    if options.figure:
        draw(frames).savefig(options.figure, dpi=120)


if __name__ == "__main__":
    main()
