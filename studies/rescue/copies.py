"""Which correction holds alarmed heads best? Six copies of each run, from step 6,400.

    python -m studies.rescue.copies studies/rescue/results

The measure was set before the runs were made (README, `-again10`): the logarithm of a copy's
largest logit over its original's, at the last step that all copies of a seed have. What became of
single heads was looked at afterwards.
"""

from __future__ import annotations

import numpy as np
import pandas as pd

from studies.rescue.branches import STEP, WAYS, branches, what_was_done
from studies.rescue.controls import chance_of_pairs
from studies.rescue.measures import series
from studies.rescue.packed import Run, load, options_of

#: What the originals are called among the copies.
ORIGINAL = "the original"

Head = tuple[str, int]


def families(runs: list[Run]) -> list[tuple[list[Run], pd.DataFrame]]:
    """The originals that were copied at `STEP`, each with its copies and their logits.

    Returns:
        Of each family its runs, the original first, and a column a run of the largest logits, by
        the steps that all have: runs end at steps of their own, and packed ones keep the logits of
        some steps only. Families without such a step are left out.
    """
    found: dict[str, list[Run]] = {}
    for run, origin, step in branches(runs):
        if step == STEP:
            found.setdefault(origin.name, [origin]).append(run)
    families = []
    for family in found.values():
        columns = [series(run.frame, "max_logit") for run in family]
        logits = pd.concat(columns, axis=1, join="inner").sort_index()
        if not logits.empty:
            families.append((family, logits))
    return families


def ratios(runs: list[Run]) -> pd.DataFrame:
    """How large the logits of the copies from `STEP` are beside their original's.

    Returns:
        A row a copy: its `seed`; `what` was done; the last `step` of which the original and all
        copies of the seed have logits; and the `ratio`, log10 of the copy's largest logit then
        over the original's.
    """
    rows = []
    for family, logits in families(runs):
        own, *others = np.log10(logits.iloc[-1])
        rows += [
            {
                "seed": run.facts["seed"],
                "what": what_was_done(run),
                "step": logits.index[-1],
                "ratio": other - own,
            }
            for run, other in zip(family[1:], others, strict=True)
        ]
    return pd.DataFrame(rows)


def over_seeds(found: pd.DataFrame) -> pd.DataFrame:
    """What the seeds say together.

    Args:
        found: What `ratios` returned.

    Returns:
        A row a way, with the ratio of each seed, and: `factor`, how many times as large as the
        original's the logit is, the geometric mean; `below` and `seeds`, in how many seeds it is
        smaller, and of how many; and `chance`, how often the signs of the ratios alone would take
        their mean as far from 0, to either side, exactly.
    """
    table = found.pivot(index="what", columns="seed", values="ratio")
    table = table.sort_index(key=lambda ways: ways.map(WAYS.index))
    rows = []
    for _, row in table.iterrows():
        known = row.dropna().to_numpy()
        rows.append(
            {
                "factor": 10 ** known.mean(),
                "below": (known < 0).sum(),
                "seeds": len(known),
                # Turned so that the sum is positive; the other side is as frequent.
                "chance": min(1.0, 2 * chance_of_pairs(known * np.sign(known.sum()))),
            }
        )
    return table.rename(columns="seed {}".format).join(pd.DataFrame(rows, index=table.index))


def without_each(found: pd.DataFrame) -> pd.DataFrame:
    """The factors of `over_seeds` with one seed left out, a row a way and a column a seed."""
    factors = {
        f"seed {seed}": over_seeds(found[found["seed"] != seed])["factor"]
        for seed in sorted(found["seed"].unique())
    }
    return pd.DataFrame(factors)


def alarmed(run: Run, first: float, last: float, without: str = "") -> set[Head]:
    """The heads that alarms of a run name from one step to another, but for those of one rule."""
    events = run.events.query("kind == 'alarm' and @first <= step <= @last and rule != @without")
    return {
        (site, head)
        for site, heads in zip(events["site"], events["heads"], strict=True)
        for head in heads
    }


def fallen(runs: list[Run]) -> pd.DataFrame:
    """How many of the heads that had been alarmed by `STEP` have smaller logits than then.

    Returns:
        A row a way, that of the originals first, and a column for each step that all runs of a
        seed have, summed over seeds.
    """
    rows = []
    for family, shared in families(runs):
        origin = family[0]
        before, heads = head_logits(origin, STEP), alarmed(origin, 0, STEP)
        for run in family:
            counts = {}
            for step in shared.index:
                logits = head_logits(run, step)
                counts[step] = sum(logits[head] < before[head] for head in heads)
            rows.append({"what": way(run, origin), **counts})
    return by_way(rows)


def newly_alarmed(runs: list[Run]) -> pd.DataFrame:
    """How many heads have been alarmed for the first time after `STEP`.

    Returns:
        A row a way, that of the originals first: how many heads had been `alarmed` by `STEP`; how
        many others have been since (`newly`), up to the last step that all runs of the seed have,
        and by a rule that does not judge the audited error (`by_growth`); and in how many of the
        `seeds` there are such (`in_seeds`).
    """
    rows = []
    for family, shared in families(runs):
        origin, last = family[0], shared.index[-1]
        before = alarmed(origin, 0, STEP)
        for run in family:
            newly = alarmed(run, STEP + 1, last) - before
            grown = alarmed(run, STEP + 1, last, without="gradient_error") - before
            counts = {"alarmed": len(before), "newly": len(newly), "by_growth": len(grown)}
            rows.append({"what": way(run, origin), **counts, "in_seeds": bool(newly), "seeds": 1})
    return by_way(rows)


def way(run: Run, origin: Run) -> str:
    """What was done to a run of a family."""
    return ORIGINAL if run is origin else what_was_done(run)


def by_way(rows: list[dict]) -> pd.DataFrame:
    """Rows of runs, added up by `what` was done."""
    table = pd.DataFrame(rows).groupby("what").sum()
    return table.sort_index(key=lambda ways: ways.map([ORIGINAL, *WAYS].index))


def head_logits(run: Run, step: float) -> pd.Series:
    """The largest logit of each head at a step, by module and head."""
    frame = run.frame
    rows = frame[(frame["indicator"] == "max_logit") & (frame["step"] == step)]
    return rows.set_index(["site", "head"])["value"]


def told(runs: list[Run]) -> str:
    """What `over_seeds`, `fallen` and `newly_alarmed` find, with what their columns mean."""
    found = ratios(runs)
    steps = found.groupby("seed")["step"].first()
    compared = ", ".join(f"{step:,} (seed {seed})" for seed, step in steps.items())
    count = len(steps)
    digits = {"float_format": "{:.3f}".format, "formatters": {"chance": "{:.4f}".format}}
    return f"""Copies from {STEP:,}: log10 of the largest logit over the original's.
At the last step that the original and all copies of a seed have: {compared}.

{over_seeds(found).rename_axis(None).to_string(**digits)}

factor: the copy's largest logit over the original's, the geometric mean over seeds.
below: in how many of the seeds it is smaller than the original's.
chance: how often the mean would be as far from 0, to either side, if a coin gave each sign.
If all {count} seeds lie to one side: 2 in {2**count}; to a side named before: 1 in {2**count}.

The factor without each seed:

{without_each(found).rename_axis(None).to_string(float_format="{:.3f}".format)}

What follows was looked at afterwards.

Heads alarmed up to {STEP:,} whose largest logit is smaller than then, by step:

{fallen(runs).rename_axis(None).to_string()}

Other heads, alarmed since, up to the last step:

{newly_alarmed(runs).rename_axis(None).to_string()}

alarmed: heads named by alarms up to {STEP:,}. newly: others since, by_growth: by other rules than
gradient_error, which judges what exact_delta corrects. in_seeds: in how many seeds."""


def main(arguments: list[str] | None = None) -> None:
    print(told(load(options_of(__doc__, arguments).results)))


if __name__ == "__main__":
    main()
