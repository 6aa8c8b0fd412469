"""Does the measured cause agree with the corrected twin? A row a head.

    python -m studies.rescue.shares studies/rescue/results

The files `push-*.csv.gz` hold what rounding adds to log sigma of every head, r, and what log sigma
did, c, summed over ten steps each. From these rounding's share comes as the product finds it
(`guardbit.monitor.measure.burst`). Copies of the same start (`doses.py --ways losses`) say what
became of the heads of the corrected layer without rounding: `paired-heads.csv` holds the growth of
log sigma in copies without a correction and in those on `exact_delta`, which

    python -m studies.rescue.shares studies/rescue/results --collect runs/rescue

has taken from their telemetry. Rounding moves a head if that takes away more than half of its
growth.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import pandas as pd
import torch

from guardbit.judgement import cause_by
from guardbit.monitor.measure.burst import WINDOW, share_of
from studies.rescue.branches import what_was_done
from studies.rescue.counterfactual import alarms
from studies.rescue.packed import begun_at
from studies.rescue.paired import EXACT, SHAM, UNCHANGED, read

#: Steps after which the copies are compared.
AFTER = 600

#: Files of `push.py` and the seed whose copies began at the same checkpoint.
STARTS = {"push-seed4-3200.csv.gz": 4, "push-seed9-2400.csv.gz": 9}


def share(windows: pd.DataFrame) -> tuple[float, float, float]:
    """Rounding's share of what log sigma of a head did, and its interval.

    Args:
        windows: The head's rows of a file of `push.py`.
    """
    series = torch.tensor(windows[["growth_run", "change"]].to_numpy(), dtype=torch.float64)
    series = torch.cat([series / WINDOW, torch.ones(len(series), 1)], 1)
    low_to_high = share_of(series.repeat_interleave(WINDOW, 0))
    return tuple(float(x) for x in low_to_high)  # pyright: ignore[reportReturnType]


def collect(folder: Path) -> pd.DataFrame:
    """Growth of log sigma of the corrected layer's heads in each copy, in log points."""
    rows = []
    for about in sorted(folder.glob("*-from*/about.json")):
        run = read(about.parent)
        begin, done = begun_at(run.name), what_was_done(run)
        if done not in (UNCHANGED, SHAM, EXACT):
            continue
        origin = read(folder / Path(run.facts["branched_from"]).parent.name)
        corrected, _ = next(iter(alarms(origin)))
        grew = 100 * np.log(_norms(run.frame, begin + AFTER) / _norms(origin.frame, begin))
        rows += [
            {"seed": run.facts["seed"], "begins": begin, "done": done, "layer": layer, "head": head,
             "grew": value}
            for (layer, head), value in grew.items() if layer == corrected
        ]  # fmt: skip
    return pd.DataFrame(rows)


def _norms(frame: pd.DataFrame, step: int) -> pd.Series:
    rows = frame[(frame["indicator"] == "w_q_spectral_norm") & (frame["step"] == step)]
    return rows.set_index(["layer", "head"])["value"]


def table(results: Path) -> pd.DataFrame:
    """A row a head of the corrected layers.

    Returns:
        Its `seed`, `layer` and `head`; rounding's `share`, with the ends of its interval (`low`,
        `high`) and the `verdict` by it; its mean growth in copies `without` a correction and
        `with_exact`; and the `part` of the growth that the correction takes away, NaN where it
        takes nothing.
    """
    copies = pd.read_csv(results / "paired-heads.csv")
    rows = []
    for name, seed in STARTS.items():
        pushes = pd.read_csv(results / name)
        for (layer, head), grew in copies[copies["seed"] == seed].groupby(["layer", "head"]):
            of_head = pushes[(pushes["layer"] == layer) & (pushes["head"] == head)]
            value, low, high = share(of_head)
            is_exact = grew["done"] == EXACT
            exact, without = grew.loc[is_exact, "grew"], grew.loc[~is_exact, "grew"]
            part = 1 - exact.mean() / without.mean() if without.mean() > exact.mean() else np.nan
            verdict = cause_by(value, low, high).what
            rows.append(
                {
                    "seed": seed, "layer": layer, "head": head, "share": value, "low": low,
                    "high": high, "verdict": verdict, "without": without.mean(),
                    "with_exact": exact.mean(), "part": part,
                }
            )  # fmt: skip
    return pd.DataFrame(rows)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("results", type=Path)
    parser.add_argument("--collect", type=Path, help="folder of the copies, to be read first")
    options = parser.parse_args(arguments)
    if options.collect:
        path = options.results / "paired-heads.csv"
        collect(options.collect).to_csv(path, index=False, float_format="%.4g")
    found = table(options.results)
    print(found.to_string(index=False, float_format="{:,.2f}".format))
    is_moved = found["part"] > 0.5
    wrong = is_moved != (found["verdict"] == "rounding")
    wrong &= found["verdict"] != "not settled"
    print(f"\nverdicts that the copies contradict: {wrong.sum()} of {len(found)}")


if __name__ == "__main__":
    main()
