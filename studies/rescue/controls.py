"""Is it the correction, or our kernel? Runs of one seed with and without it from the first step.

    python -m studies.rescue.controls studies/rescue/results

The measure was set before the runs were made: the logarithm of the largest logit at step 8,000.
A seed's runs share weights and batches.
"""

from __future__ import annotations

from itertools import product

import numpy as np
import pandas as pd

from studies.rescue.measures import WINDOW, excess_loss, series
from studies.rescue.packed import Run, load, options_of

#: Where logits are compared.
STEP = 8000


def is_uncorrected(run: Run) -> bool:
    """Whether a run was on GuardBit's kernel without a stabilizer from its first step on."""
    facts = run.facts
    return (facts["arm"], facts["backend"]) == ("stock", "guardbit") and facts[
        "branched_from"
    ] is None


def is_corrected(run: Run) -> bool:
    """Whether delta was corrected in all heads from the start, at the study's rate, to `STEP`."""
    facts = run.facts
    is_corrected = facts["arm"] == "from_start" and facts["stabilizer"] != "row_max"
    return is_corrected and facts["learning_rate"] == 1.5e-3 and run.last >= STEP


def table(runs: list[Run]) -> pd.DataFrame:
    """A row a seed that has both.

    Returns:
        What corrected the one; the largest logit at step 8,000 of both; the steps both have, and
        over the last 500 of them the mean loss of the uncorrected one above the other, in nats;
        the first alarm of both.
    """
    corrected = {run.facts["seed"]: run for run in runs if is_corrected(run)}
    rows = []
    for run in sorted(filter(is_uncorrected, runs), key=lambda run: run.facts["seed"]):
        other = corrected.get(run.facts["seed"])
        if other is None:
            continue
        logits = [series(each.frame, "max_logit") for each in (run, other)]
        excess = excess_loss(*(series(each.frame, "loss") for each in (run, other)))
        alarms = [each.events.query("kind == 'alarm'")["step"] for each in (run, other)]
        rows.append(
            {
                "seed": run.facts["seed"],
                "corrected_by": other.facts["stabilizer"],
                "logit": logits[0].loc[:STEP].iloc[-1],
                "logit_corrected": logits[1].loc[:STEP].iloc[-1],
                "steps": int(excess.index[-1]),
                "loss_above": excess.loc[excess.index[-1] - WINDOW + 1 :].mean(),
                **{
                    name: None if steps.empty else int(steps.min())
                    for name, steps in zip(("alarm", "alarm_corrected"), alarms, strict=True)
                },
            }
        )
    return pd.DataFrame(rows)


def chance_of_pairs(ratios: np.ndarray) -> float:
    """How often the signs of paired differences alone would make a sum as large, exactly.

    Args:
        ratios: A logarithm of a ratio for each pair.
    """
    sums = [np.dot(signs, ratios) for signs in product((1, -1), repeat=len(ratios))]
    return float(np.mean(np.array(sums) >= ratios.sum() - 1e-12))


def main(arguments: list[str] | None = None) -> None:
    found = table(load(options_of(__doc__, arguments).results))
    print(found.to_string(index=False, float_format=lambda x: f"{x:.4g}"))
    one, other = (np.log(found[name].to_numpy()) for name in ("logit", "logit_corrected"))
    factor = np.exp((one - other).mean())
    print(f"{factor:.3g} times as large in the geometric mean")
    print(f"chance, by pairs: {chance_of_pairs(one - other):.4g}")


if __name__ == "__main__":
    main()
