"""Is rounding's share, as GuardBit told it in a run, borne out by the run's corrected twin?

    python -m studies.rescue.causes studies/rescue/results/causes.csv

prints a row a start and head whose share was told. Its growth is that of log sigma, in log points,
in the start and in copies of it. `doses.py --ways twins` makes a corrected twin of each start, and
growth is that of the 600 steps after the start's first alarm. `--ways low` makes several copies,
and growth is that from their checkpoint to the last step that all of them have. The first command

    python -m studies.rescue.causes causes.csv --collect runs/a runs/b

takes the file from the telemetry of the folders that `doses.py` wrote.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import pandas as pd

from guardbit.judgement import cause_by
from studies.rescue.branches import what_was_done
from studies.rescue.counterfactual import alarms, sigmas
from studies.rescue.packed import Run, begun_at, kind_of
from studies.rescue.paired import read
from studies.rescue.shares import AFTER

#: In the place of what was done to a copy.
START = "start"

_SHARES = {"rounding_share": "share", "rounding_share_low": "low", "rounding_share_high": "high"}


def collect(folder: Path) -> pd.DataFrame:
    """What was told of the heads of one start, and what became of them in it and its copies.

    Args:
        folder: Of the start and its copies, also of a call that was cut off.

    Returns:
        A row a head and run. `kind`, `rate`, `seed` and the step of the first `alarm` are the
        start's; `is_first` tells the heads that were alarmed then. `done` is what was done to the
        run, `grew` its growth from the step `since` to `until`, NaN if it ended before. `share`,
        `low` and `high` are what GuardBit told last until then, at the step `told`, if anything.
    """
    starts = (about.parent for about in folder.glob("*/about.json"))
    start = read(next(each for each in starts if begun_at(each.name) is None))
    copies = [read(about.parent) for about in sorted(folder.glob("**/*-from*/about.json"))]
    found = alarms(start)
    alarm = min(found.values())
    since, until = alarm, alarm + AFTER
    if len(copies) > 1:
        since = begun_at(copies[0].name)
        until = min(int(sigmas(run).index.max()) for run in (start, *copies))
    rows = []
    for run in (start, *copies):
        logs = 100 * np.log(sigmas(run).reindex([since, until]))
        grew = (logs.loc[until] - logs.loc[since]).rename("grew")
        about = {"kind": kind_of(start), "rate": start.facts["learning_rate"],
                 "seed": start.facts["seed"], "alarm": alarm, "since": since, "until": until,
                 "done": START if run is start else what_was_done(run)}  # fmt: skip
        rows.append(pd.concat([grew, _told(run, since, until)], axis=1).assign(**about))
    table = pd.concat(rows).rename_axis(["layer", "head"]).reset_index()
    is_told = table.groupby(["layer", "head"])["share"].transform("count") > 0
    heads = zip(table["layer"], table["head"], strict=True)
    table["is_first"] = [found.get(head) == alarm for head in heads]
    return table[is_told].sort_values(["layer", "head"], kind="stable")


def _told(run: Run, since: int, until: int) -> pd.DataFrame:
    """The last shares of heads after a step and up to another, a row a head."""
    frame = run.frame[run.frame["indicator"].isin(_SHARES)]
    frame = frame[frame["step"].between(since, until, inclusive="right")]
    told = frame.pivot(index=["layer", "head", "step"], columns="indicator", values="value")
    told = told.reindex(columns=list(_SHARES)).rename(columns=_SHARES).reset_index("step")
    return told.rename(columns={"step": "told"}).groupby(["layer", "head"]).last()


def table(rows: pd.DataFrame) -> pd.DataFrame:
    """A row a head and run whose share was told.

    Args:
        rows: Of `collect`.

    Returns:
        Beside what was told its `verdict`; mean growth of the head `without` a correction and
        `with_exact`, in log points; and the `truth`: "rounding" if `exact_delta` takes more than
        half of the growth away, "not rounding" if it takes less, "" if the copies ended too soon or
        the head did not grow.
    """
    of_head = ["kind", "rate", "seed", "alarm", "layer", "head"]
    is_exact = rows["done"] == "exact_delta"
    with_exact = rows[is_exact].groupby(of_head)["grew"].mean().rename("with_exact")
    without = rows[~is_exact].groupby(of_head)["grew"].mean().rename("without")
    told = rows[rows["share"].notna()].join(without, on=of_head).join(with_exact, on=of_head)
    triples = told[["share", "low", "high"]].itertuples(index=False)
    told["verdict"] = [cause_by(*three).what for three in triples]
    is_moved = told["with_exact"] < told["without"] / 2
    told["truth"] = np.where(is_moved, "rounding", "not rounding")
    told.loc[told["with_exact"].isna() | ~(told["without"] > 0), "truth"] = ""
    return told.drop(columns=["since", "until", "grew"])


def copies(rows: pd.DataFrame) -> str:
    """Growth of each copy of the starts that have several, a line a head and what was done."""
    of_head = ["kind", "rate", "seed", "since", "until", "layer", "head", "done"]
    many = rows[rows.groupby(of_head)["grew"].transform("count") > 1]
    return many.groupby(of_head)["grew"].apply(lambda grew: sorted(grew)).to_string()


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("csv", type=Path)
    parser.add_argument("--collect", type=Path, nargs="+", help="folders to be read first")
    options = parser.parse_args(arguments)
    if options.collect:
        rows = pd.concat([collect(folder) for folder in options.collect])
        rows.to_csv(options.csv, index=False, float_format="%.4g")
    rows = pd.read_csv(options.csv)
    found = table(rows)
    print(found.to_string(index=False, float_format="{:,.4g}".format))
    wrong = (found["truth"] != "") & (found["verdict"] != "not settled")
    wrong &= found["truth"] != found["verdict"]
    print(f"\nverdicts that copies contradict: {wrong.sum()} of {(found['truth'] != '').sum()}")
    print("\nwhere there are several copies of a kind, their growth:\n" + copies(rows))


if __name__ == "__main__":
    main()
