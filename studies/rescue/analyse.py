"""The study's tables: which runs failed, which were warned, which were saved, and what they show.

    python -m studies.rescue.analyse pack runs/rescue studies/rescue/results
    python -m studies.rescue.analyse table studies/rescue/results

`pack` thins runs for the repository (`packed.py`). `table` prints one line a run, one an arm, one a
family (all of it, and its copies).

A run has failed when its loss, averaged over the 500 steps before, lies 0.1 nats above that of the
matched run, the one whose heads are all compensated from the start, with the same seed and batches.
(Its rate is the same, 1.5e-3 for higher ones, at which that arm is not stable either. Of a seed
without such a run, the one whose heads were all switched to `compensated` at its first alarm stands
in and is taken to be sound; the column `matched` says so. Of seed 1 at 6e-4 there is neither: one
on `exact_delta` from the start stands in.) Recorded stable runs on the same batches
(`tests/data/runs`) lie 0.045 above one another at most, the failing one 0.17 above each. A loss
that is not finite is large.

Untouched runs that were begun once more, at step 1, are an arm of their own, `restart`. What began
as a copy at a step that was named (`branches.py`) is in the first table only: the failure may be
that of its original.

What has not failed counts as such from 14,500 compared steps on. (It was 15,000 until six runs of
15,600 planned steps ended with the machine's time at 14,540 to 15,480.) Losses, also those above
the matched run's, are means over the last 500 steps; the highest logit is since the first alarm, or
since step 1,000; the largest norm and logit are the last ones of the worst head. The rule is that
of the first alarm, the verdict the last one; a switch is one of a site.

Runs that begin as copies of one untouched run, at its last checkpoint before its first alarm, are a
family, that one included. They differ by what was switched, and by chance. The third table tells
how often chance alone would part them as they did, if the switch made no difference; the fourth the
same of the copies alone, as the first run of a family is the one that was alarmed.

What a switch does is told by the heads whose largest logit is above 1,000 at the first alarm, where
heads were switched then by those of them: how fast it grew in the 1,500 steps before, and in the
1,500 after. An alarm comes where growth is steepest, so what follows is slower in any case.
(Without an alarm the last step stands for it.)
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import pandas as pd
from scipy.stats import beta, hypergeom

from studies.rescue.lines import one_line_a_run
from studies.rescue.packed import begun_at, load, pack

#: Compared steps from which on a run that has not failed counts.
LENGTH = 14_500


def one_line_an_arm(runs: pd.DataFrame) -> pd.DataFrame:
    """How many runs of each arm failed, with the exact 95 % interval (Clopper and Pearson).

    As lengths differ, and a failure counts whenever it comes, the interval is a rough one.

    Args:
        runs: Their lines. What was held against another run for `LENGTH` steps, or until it failed,
            counts.

    Returns:
        A row for each arm, backend, stabilizer and rate, with the least lead, in steps, and the
        range of how far losses ended above the matched run's, in nats.
    """
    rows = []
    keys = ["arm", "backend", "stabilizer", "learning_rate"]
    for key, group in _counted(runs).groupby(keys):
        failed, total = int(group["failed"].sum()), len(group)
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


def _counted(runs: pd.DataFrame) -> pd.DataFrame:
    """Those that were held against another for `LENGTH` steps or until they `failed`."""
    runs = runs.assign(failed=runs["failed_at"].notna())
    long_enough = runs["failed"] | (runs["compared_steps"] >= LENGTH)
    return runs[(runs["matched"] != "") & long_enough]


def one_line_a_family(runs: pd.DataFrame) -> pd.DataFrame:
    """How runs that share their first steps parted.

    Args:
        runs: Their lines. What was held against another run for `LENGTH` steps, or until it failed,
            counts.

    Returns:
        A row for each family with runs that were switched to `compensated` and others, and one for
        `all`: how many there are, and how many of them failed. `chance` is that of as many failures
        or more among the others, if all runs of a family were as likely to fail (exact, one-sided;
        a permutation within each family).
    """
    runs = _counted(runs)
    compensated = (runs["stabilizer"] == "compensated") & (runs["switches"] > 0)
    counts = pd.DataFrame(
        {
            "others": ~compensated,
            "others_failed": ~compensated & runs["failed"],
            "compensated": compensated,
            "compensated_failed": compensated & runs["failed"],
        }
    ).astype(int)
    table = counts.groupby(runs["family"]).sum().query("others > 0 and compensated > 0")
    # Of the number of failures among the others, over all families: 0, 1, 2...
    probabilities, chances = np.ones(1), []
    for line in table.itertuples():
        failed = line.others_failed + line.compensated_failed
        dealt = hypergeom(line.others + line.compensated, failed, line.others)
        chances.append(dealt.sf(line.others_failed - 1))
        probabilities = np.convolve(probabilities, dealt.pmf(np.arange(line.others + 1)))
    total = table.sum()
    table["chance"] = chances
    table.loc["all"] = [*total, probabilities[total["others_failed"] :].sum()]
    return table.reset_index().astype(dict.fromkeys(counts, int))


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    packing = commands.add_parser("pack", help="thin runs for the repository")
    packing.add_argument("runs", type=Path)
    packing.add_argument("results", type=Path)
    packing.add_argument("--snapshots", type=int, default=4, help="of a run's first alarmed head")
    commands.add_parser("table", help="print all tables").add_argument("results", type=Path)
    options = parser.parse_args(arguments)
    if options.command == "pack":
        pack(options.runs, options.results, options.snapshots)
        return
    runs = one_line_a_run(load(options.results))
    judged = runs[runs["run"].map(begun_at).isna()]
    tables = {
        "runs": runs,
        "arms": one_line_an_arm(judged),
        "families": one_line_a_family(judged),
        "copies": one_line_a_family(judged[judged["run"] != judged["family"]]),
    }
    for name, table in tables.items():
        if table.empty:
            continue
        table.to_csv(options.results / f"{name}.csv", index=False, float_format="%.5g")
        print(table.to_string(index=False))


if __name__ == "__main__":
    main()
