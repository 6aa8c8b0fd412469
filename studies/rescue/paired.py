"""What is a correction worth before anything fails? Losses of copies on the same batches.

    python -m studies.rescue.paired runs/rescue --csv studies/rescue/results/paired.csv
    python -m studies.rescue.paired studies/rescue/results/paired.csv

`doses.py --ways losses` makes the copies. The first command writes a row a copy; the second tests
the order of their losses, set before the runs (README). Those that end early are left out.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pandas as pd
from scipy.stats import t

from guardbit import read_events, read_run
from studies.rescue.branches import what_was_done
from studies.rescue.counterfactual import alarms
from studies.rescue.dose_response import counts_in_order, in_order
from studies.rescue.doses import STEPS_OF
from studies.rescue.measures import WINDOW, series
from studies.rescue.packed import Run, again_of, begun_at

UNCHANGED, SHAM = "nothing", "exact delta and 1 of its error, alarmed layers"
EXACT, CLIPPED = "exact_delta, alarmed layers", "logits clipped at 1,000"
ROW_MAX = "row_max, alarmed layers"

#: The ways that were expected to have the same loss, those with the lowest first.
GROUPS = ((EXACT,), (CLIPPED,), (UNCHANGED, SHAM))

_STEPS = STEPS_OF["losses"]


def collect(folder: Path) -> pd.DataFrame:
    """What became of each copy.

    Args:
        folder: Of the originals and their copies, as `train.py` wrote them.

    Returns:
        A row a copy: `seed`, the step at which it `begins`, its `round`, what was `done` to it, how
        many `steps` it went on for, its mean `loss` over the last 500 of 1,500 (NaN if it ended
        before), and at its last sample the growth (`grew`) of log sigma of the head that was
        alarmed first in the original, in log points, and the largest `logit` of all heads; how many
        heads have been `alarmed`, the original's before it began not counted.
    """
    rows = []
    for about in sorted(folder.glob("*-from*/about.json")):
        run = read(about.parent)
        begin = begun_at(run.name)
        assert begin is not None, run.name
        origin = read(folder / Path(run.facts["branched_from"]).parent.name)
        head = next(iter(alarms(origin)))
        own = run.frame[run.frame["step"] > begin]
        loss, logit = series(own, "loss"), series(own, "max_logit")
        sigma = _sigma(own, head)
        end = begin + _STEPS
        # Of a run of N steps the last loss is of step N or of the one before.
        ended = loss.index.max() >= end - 1
        rows.append(
            {
                "seed": run.facts["seed"],
                "begins": begin,
                "round": again_of(run.name),
                "done": what_was_done(run),
                "steps": int(loss.index.max()) - begin,
                "loss": loss.loc[end - WINDOW + 1 : end].mean() if ended else np.nan,
                "grew": 100 * np.log(sigma.iloc[-1] / _sigma(origin.frame, head).loc[begin]),
                "logit": logit.iloc[-1],
                "alarmed": len(set(alarms(run, end)) - set(alarms(run, begin))),
            }
        )
    return pd.DataFrame(rows)


def read(folder: Path) -> Run:
    """A run as `train.py` wrote it."""
    facts = json.loads((folder / "about.json").read_text())
    return Run(folder.name, facts, read_run(folder), read_events(folder))


def _sigma(frame: pd.DataFrame, head: tuple[int, int]) -> pd.Series:
    of_head = (frame["layer"] == head[0]) & (frame["head"] == head[1])
    return frame[of_head & (frame["indicator"] == "w_q_spectral_norm")].set_index("step")["value"]


def tested(found: pd.DataFrame) -> tuple[float, int, float]:
    """The test of `GROUPS`, which deals the losses out anew within each family.

    Args:
        found: Rows of `collect`.

    Returns:
        How many pairs of two groups are in the expected order, of how many, and the part of all
        ways to deal the losses out that have as many (Jonckheere's test, stratified, exact).
    """
    pairs, every, counts = 0.0, 0, np.array([1], dtype=object)
    for _, family in found.dropna(subset="loss").groupby(["seed", "begins"]):
        groups = [family.loc[family["done"].isin(ways), "loss"].to_list() for ways in GROUPS]
        pairs += in_order(groups)
        own = counts_in_order([len(group) for group in groups])
        every += len(own) - 1
        counts = np.convolve(counts, own)
    return pairs, every, float(sum(counts[int(np.ceil(pairs)) :]) / sum(counts))


def difference(found: pd.DataFrame, ways: Sequence[str], others: Sequence[str]) -> np.ndarray:
    """How far the mean losses of two groups lie apart, and the ends of the 95 % interval of that.

    Families count alike; copies scatter as much in one way as in another (a t interval).
    """
    means, variances, degrees = [], [], 0
    for _, family in found.dropna(subset="loss").groupby(["seed", "begins"]):
        one, other = (family.loc[family["done"].isin(some), "loss"] for some in (ways, others))
        if len(one) < 2 or len(other) < 2:
            continue
        own = len(one) + len(other) - 2
        pooled = ((len(one) - 1) * one.var() + (len(other) - 1) * other.var()) / own
        means.append(one.mean() - other.mean())
        variances.append(pooled * (1 / len(one) + 1 / len(other)))
        degrees += own
    if not means:
        return np.full(3, np.nan)
    half = t.ppf(0.975, degrees) * np.sqrt(sum(variances)) / len(means)
    return np.mean(means) + half * np.array([0, -1, 1])


def told(found: pd.DataFrame) -> str:
    """Means of the ways in each family, the differences, and the test."""
    families = found.groupby(["seed", "begins"])
    above = found["loss"] - families["loss"].transform("min")
    rows = found.assign(loss=1000 * above).groupby(["seed", "begins", "done"])
    table = rows.agg(
        copies=("loss", "count"),
        loss=("loss", "mean"),
        scatter=("loss", "std"),
        grew=("grew", "mean"),
        logit=("logit", "max"),
        alarmed=("alarmed", "mean"),
    )
    pairs, every, chance = tested(found)
    rest = (UNCHANGED, SHAM)
    lines = [
        f"{what}: {1000 * mean:+.2f} [{1000 * low:.2f}, {1000 * high:.2f}]"
        for what, some, others in (
            ("exact delta less what has no correction", (EXACT,), rest),
            ("exact delta less clip", (EXACT,), (CLIPPED,)),
            ("clip less what has no correction", (CLIPPED,), rest),
            ("sham less unchanged", (SHAM,), (UNCHANGED,)),
            ("exact delta less sham", (EXACT,), (SHAM,)),
            ("row_max less what has no correction", (ROW_MAX,), rest),
        )
        for mean, low, high in [difference(found, some, others)]
    ]
    return f"""{table.to_string(float_format="{:,.2f}".format)}

loss: mean of the last {WINDOW} steps above the family's lowest, thousandths of a nat. scatter: of
copies. grew: sigma of the head alarmed first in the original, log points. alarmed: heads, a copy.

Differences of losses, thousandths of a nat, with 95 % intervals:
{chr(10).join(lines)}

Expected: exact delta < clip < unchanged and sham. Pairs in this order: {pairs:g} of {every};
by chance as many in {chance:.2g} of all ways to deal the losses out."""


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("source", type=Path, help="folder of runs with --csv, else the table")
    parser.add_argument("--csv", type=Path, help="where to write the table of a folder's copies")
    options = parser.parse_args(arguments)
    if options.csv:
        collect(options.source).to_csv(options.csv, index=False, float_format="%.7g")
    print(told(pd.read_csv(options.csv or options.source)))


if __name__ == "__main__":
    main()
