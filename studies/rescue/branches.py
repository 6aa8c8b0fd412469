"""Is there a point of no return? A table of the branches that `--branch-step` began.

    python -m studies.rescue.branches studies/rescue/results

Within a family all branches see the same batches as the run that they are of, so losses are
compared step by step; seeds without a matched run are left out.
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path

import pandas as pd

from studies.rescue.lines import matched_run
from studies.rescue.measures import WINDOW, excess_loss, series
from studies.rescue.packed import Run, begun_at, load

#: Copies from here on are compared over seeds, by a rule set before (`copies.py`).
STEP = 6400

#: How the stabilizer is called of copies that are handed a multiple of delta's error.
ERROR = "error"

#: Rate's factor of an untouched branch -> what it did.
_DONE = {1.0: "nothing", 0.5: "rate halved"}

#: Arm of a switched branch -> which heads were switched.
_SWITCHED = {"late": "", "late_layers": ", alarmed layers", "late_heads": ", alarmed heads",
             "rescue_layer": ", layers once alarmed"}  # fmt: skip

#: What branches did, in the order of tables.
WAYS = (
    "exact_delta", "exact_delta, alarmed layers", "exact_delta, alarmed heads", "centered_keys",
    "logits clipped at 100", "logits clipped at 1,000", "rate halved", "nothing",
)  # fmt: skip


def branches(runs: list[Run]) -> list[tuple[Run, Run, int]]:
    """The runs that went on from a checkpoint that was named, their originals, and the steps."""
    by_name = {run.name: run for run in runs}
    found = []
    for run in runs:
        step = begun_at(run.name)
        if step is not None:
            origin = by_name[Path(run.facts["branched_from"]).parent.name]
            found.append((run, origin, step))
    return sorted(found, key=lambda entry: (entry[1].name, entry[2], entry[0].name))


def is_before_alarm(origin: Run, step: int) -> bool:
    """Whether a copy from a step began before a head of its original was alarmed."""
    steps = origin.events.query("kind == 'alarm' and site != ''")["step"]
    return bool(step < steps.min())


def held(runs: list[Run]) -> list[tuple[Run, Run, int, Run]]:
    """The `branches` whose seed has a matched run, with that."""
    matched = [(run, origin, step, matched_run(run, runs)) for run, origin, step in branches(runs)]
    return [(*entry, reference) for *entry, reference in matched if reference is not None]


def what_was_done(run: Run) -> str:
    if run.facts["arm"] == "qk_clip":
        # Runs made before there was another bound do not tell theirs.
        return f"logits clipped at {run.facts.get('bound', 100):,.0f}"
    if run.facts["arm"] == "stock":
        return _DONE[run.facts["rate_factor"]]
    what = run.facts["stabilizer"]
    if what.startswith(ERROR):
        what = f"exact delta and {what.removeprefix(ERROR)} of its error"
    return what + _SWITCHED[run.facts["arm"]]


def table(runs: list[Run], until: float = math.inf) -> pd.DataFrame:
    """A row a branch.

    Args:
        runs: All runs, among them the matched ones.
        until: The step up to which they are compared; later branches are left out.

    Returns:
        How many steps the branch went on for (as long as its original did); the largest logits (of
        a sampled step) when it began, at its end, and of the original then; and the mean loss above
        that of the matched run, in nats, over the last 500 steps before the branch began, over the
        last 500 of the `compared` steps, and that of the original over the same. Where the matched
        run ended before the branch, `compared` is the smaller.
    """
    rows = []
    for run, origin, step, reference in held(runs):
        if step >= until:
            continue
        logit, of_origin = (series(each.frame, "max_logit") for each in (run, origin))
        matched = series(reference.frame, "loss")
        losses = [series(each.frame, "loss") for each in (run, origin)]
        end = min(until, *(each.index[-1] for each in losses))
        loss, own = (excess_loss(each, matched) for each in losses)
        last = min(end, loss.index[-1], own.index[-1])
        if logit.loc[:end].empty:  # the showcase's originals end once they are copied
            continue
        rows.append(
            {
                "seed": run.facts["seed"],
                "from": step,
                "what": what_was_done(run),
                "steps": int(end - step),
                "compared": int(last - step),
                "logit_before": of_origin.loc[:step].iloc[-1],
                "logit_after": logit.loc[:end].iloc[-1],
                "logit_original": of_origin.loc[:end].iloc[-1],
                "above_before": own.loc[step - WINDOW + 1 : step].mean(),
                "above_after": loss.loc[last - WINDOW + 1 : last].mean(),
                "above_original": own.loc[last - WINDOW + 1 : last].mean(),
            }
        )
    return pd.DataFrame(rows)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("results", type=Path)
    parser.add_argument("--until", type=float, default=math.inf, help="compare up to this step")
    options = parser.parse_args(arguments)
    runs = load(options.results)
    print(table(runs, options.until).to_string(index=False, float_format="{:.3f}".format))
    print(f"left out, without a matched run: {len(branches(runs)) - len(held(runs))} branches")


if __name__ == "__main__":
    main()
