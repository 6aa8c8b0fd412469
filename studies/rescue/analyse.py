"""The study's tables: which runs failed, which were warned, which were saved, and what they show.

    python -m studies.rescue.analyse pack runs/rescue studies/rescue/results
    python -m studies.rescue.analyse table studies/rescue/results

`pack` thins each run for the repository: its journal, the losses and gradient norms of every 20th
step, the audited errors of dQ and, of every 200th step, what else rules and figures read of all
heads, to three digits. What it writes is a run as any other, for `guardbit report`, `live` and
`replay`. `table` prints one line a run, one an arm, one a family, and what large logits do by
themselves.

A run has failed when it leaves the matched run, the one whose heads are all compensated from the
start, with the same seed and batches, in one of two ways. (Its rate is the same, 1.5e-3 for higher
ones, at which that arm is not stable either. Of a seed without such a run, the one whose heads were
all switched to `compensated` at its first alarm stands in and is taken to be sound; the column
`matched` says so.)

- its loss, averaged over the 500 steps before, lies 0.1 nats above. Recorded stable runs on the
  same batches (`tests/data/runs`) lie 0.045 above one another at most, the failing one 0.17 above
  each. A loss that is not finite is large.
- its largest W_Q spectral norm, the median over 1,000 steps, is twice as large. In the recorded
  stable runs it is 1.62 times another's at most, in the shifted one, where it was rising, 1.99
  times; in the failing one 2.8 to 4.5 times that of each stable run.

What has not failed counts as such from 15,000 compared steps on, about the length planned for all
runs. Highest gradient norms and logits are those since the first alarm, or since step 1,000; other
columns hold the last values. The largest mean bias is that of the head whose delta biases sum up to
the largest part of their absolute values, over the samples kept.

Runs that begin as copies of one stock run, at its last checkpoint before its first alarm, are a
family, that one included. They differ by what was switched, and by chance. The third table tells
how often chance alone would part them as they did, had the switch no say.

What a switch does is told by the heads whose largest logit is above 1,000 at the first alarm, where
heads were switched then by those of them: how fast it grew in the 1,500 steps before, and in the
1,500 after, and how far the audited dQ was off. An alarm comes where growth is steepest, so that
what follows is slower in any case: the fourth table tells what such heads do by themselves.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

import numpy as np
import pandas as pd
from scipy.stats import beta, hypergeom

from studies.rescue.measures import (
    GROWTH_WINDOW,
    logit_growth,
    logits_by_head,
    loss_departure,
    median_errors_of_dq,
    norm_departure,
    series,
    speed,
    switches_made,
)
from studies.rescue.packed import Run, load, pack

RATE = 1.5e-3
LENGTH = 15_000


def one_line_a_run(runs: list[Run]) -> pd.DataFrame:
    """Step of failure, alarm and switch, lead, verdict and last loss of every packed run."""
    return pd.DataFrame(_line(*run, _matched(run, runs)) for run in runs)


def _line(
    name: str, facts: dict, run: pd.DataFrame, events: pd.DataFrame, twin: Run | None
) -> dict:
    loss = series(run, "loss")
    last = int(loss.index[-1])
    loss_failed = norm_failed = above = None
    compared = 0
    if twin is not None:
        loss_failed = loss_departure(loss, series(twin.frame, "loss"))
        norm_failed = norm_departure(
            *(series(each, "w_q_spectral_norm") for each in (run, twin.frame))
        )
        difference = (loss - series(twin.frame, "loss")).dropna()
        compared = int(difference.index[-1])
        above = difference[difference.index > difference.index[-1] - 500].mean()
    alarms, verdicts = (events[events["kind"] == kind] for kind in ("alarm", "verdict"))
    switches = switches_made(events)
    sums = run[run["indicator"] == "delta_bias_cumulative"]
    sums = sums.loc[sums["step"] == sums["step"].max(), "value"]
    bias, scale = (
        run[run["indicator"] == indicator].groupby(["site", "head"])["value"].sum()
        for indicator in ("delta_bias", "delta_bias_abs")
    )
    alarm = None if alarms.empty else int(alarms["step"].iloc[0])
    since = 1000 if alarm is None else alarm
    switch = None if switches.empty else int(switches["step"].iloc[0])
    logits = logits_by_head(run)
    if switch is not None:
        first = switches[switches["step"] == switch].itertuples()
        switched = {(row.site, head) for row in first for head in row.heads}
        logits = logits[[head for head in logits if head in switched]]
    growth = logit_growth(logits, last if alarm is None else alarm)
    errors = median_errors_of_dq(run, growth.index, last if alarm is None else alarm)
    return {
        "run": name,
        # A stock run gone through again shares what came before with the first one.
        "arm": "again" if facts["arm"] == "stock" and facts["branched_from"] else facts["arm"],
        "backend": facts["backend"],
        "stabilizer": facts["stabilizer"] or "",
        "learning_rate": facts["learning_rate"],
        "seed": facts["seed"],
        "family": Path(facts["branched_from"]).parent.name if facts["branched_from"] else name,
        "steps": last,
        "matched": "" if twin is None else twin.facts["arm"],
        "compared_steps": compared,
        "norm_failed_at": norm_failed,
        "loss_failed_at": loss_failed,
        "first_alarm": alarm,
        "rule": "" if alarms.empty else alarms["rule"].iloc[0],
        "lead_on_norm": None if norm_failed is None or alarm is None else norm_failed - alarm,
        "lead_on_loss": None if loss_failed is None or alarm is None else loss_failed - alarm,
        "verdict": "" if verdicts.empty else verdicts["rule"].iloc[-1],
        "alarmed_heads": len(
            {(row.site, head) for row in alarms.itertuples() for head in row.heads}
        ),
        "first_switch": switch,
        "switches": len(switches),
        "grown_heads": len(growth),
        "growth_before": _median_and_range(growth["before"]),
        "growth_after": _median_and_range(growth["after"]),
        "dq_error_before": errors["before"].median(),
        "dq_error_after": errors["after"].median(),
        "last_loss": loss[loss.index > last - 500].mean(),
        "above_matched": above,
        "highest_gradient_norm": series(run, "grad_norm").loc[since:].max(),
        "highest_logit": series(run, "max_logit").loc[since:].max(),
        "largest_norm": series(run, "w_q_spectral_norm").iloc[-1],
        "largest_logit": series(run, "max_logit").iloc[-1],
        "bf16_maxima": series(run, "multiple_maxima_bf16").iloc[-1],
        "largest_dq_error": series(run, "dq_relative_error").loc[1000:].max(),
        "largest_mean_bias": (bias / scale).abs().max(),
        "bias_up": sums[sums > 0].sum(),
        "bias_down": sums[sums < 0].sum(),
        "speed_before": speed(facts, 300, switch or last),
        "speed_after": float("nan") if switch is None else speed(facts, switch + 100, last),
    }


def _matched(run: Run, runs: list[Run]) -> Run | None:
    """The run a run is compared with; None where there is none, or it is the stand-in itself."""
    for arm in ("from_start", "rescue_all"):
        wanted = {
            "arm": arm,
            "stabilizer": "compensated",
            "seed": run.facts["seed"],
            "learning_rate": min(RATE, run.facts["learning_rate"]),
        }
        for other in runs:
            if all(other.facts[key] == value for key, value in wanted.items()):
                return None if other is run and arm == "rescue_all" else other
    return None


def _median_and_range(values: pd.Series) -> str:
    known = values.dropna()
    if known.empty:
        return ""
    return f"{known.median():+.2f} ({known.min():+.2f} to {known.max():+.2f})"


def one_line_an_arm(runs: pd.DataFrame) -> pd.DataFrame:
    """How many runs of each arm failed, with the exact 95 % interval (Clopper and Pearson).

    What has not failed counts from `LENGTH` compared steps on; as lengths differ, and a failure
    counts whenever it comes, the interval is a rough one.
    """
    rows = []
    keys = ["arm", "backend", "stabilizer", "learning_rate"]
    has_failed = runs[["norm_failed_at", "loss_failed_at"]].notna().any(axis=1)
    counted = (runs["matched"] != "") & (has_failed | (runs["compared_steps"] >= LENGTH))
    for key, group in runs[counted].groupby(keys):
        failed, total = int(has_failed[group.index].sum()), len(group)
        low = beta.ppf(0.025, failed, total - failed + 1) if failed else 0.0
        high = beta.ppf(0.975, failed + 1, total - failed) if failed < total else 1.0
        rows.append(
            {
                **dict(zip(keys, key, strict=True)),
                "runs": total,
                "failed": failed,
                "failed_95": f"{low:.2f} to {high:.2f}",
                "alarmed": int(group["first_alarm"].notna().sum()),
                "least_lead_on_norm": group["lead_on_norm"].min(),
                "least_lead_on_loss": group["lead_on_loss"].min(),
                "above_matched": f"{group['above_matched'].min():+.3f} to "
                f"{group['above_matched'].max():+.3f}",
            }
        )
    return pd.DataFrame(rows)


def one_line_a_family(runs: pd.DataFrame) -> pd.DataFrame:
    """How runs that share their first steps parted: which failed, switched to `compensated` or not.

    Returns:
        A row for each family in which both were tried, and one for `all`: number of runs `without`
        (switched to something else, or not) and `with_it`, and how many of them failed; those that
        stand in as the matched run do not count. `chance` is that of as many failures or more
        among those without it, if all runs of a family were as likely to fail (exact, one-sided; a
        permutation within each family).
    """
    runs = runs[runs["matched"] != ""]
    has_failed = runs[["norm_failed_at", "loss_failed_at"]].notna().any(axis=1)
    with_it = runs["arm"].str.startswith("rescue") & (runs["stabilizer"] == "compensated")
    counts = pd.DataFrame(
        {
            "without": ~with_it,
            "failed_without": ~with_it & has_failed,
            "with_it": with_it,
            "failed_with_it": with_it & has_failed,
        }
    ).astype(int)
    families = counts.groupby(runs["family"]).sum().query("without > 0 and with_it > 0")
    failures, ways = families["failed_without"].to_numpy(), np.ones(1)
    chances = []
    for line in families.itertuples():
        failed = line.failed_without + line.failed_with_it
        one = hypergeom(line.without + line.with_it, failed, line.without)
        chances.append(one.sf(line.failed_without - 1))
        ways = np.convolve(ways, one.pmf(np.arange(line.without + 1)))
    table = families.assign(chance=chances)
    table.loc["all"] = [*families.sum(), ways[failures.sum() :].sum()]
    return table.reset_index().astype(dict.fromkeys(families, int))


def growth_without_a_switch(runs: list[Run]) -> pd.DataFrame:
    """What becomes of fast growing large logits by themselves, to compare a switch with.

    Every sample of every head without a stabilizer at the study's rate counts, up to the first
    switch, whose logit is above `GROWN` and has grown by an e-fold in 1,000 steps or faster. What a
    run has copied from another counts there.

    Returns:
        A row a run: number of such samples and of heads, the median growth after them, and the
        shares that fall, at all and by half an e-fold in 1,000 steps or faster.
    """
    rows = []
    for run in runs:
        if run.facts["arm"] == "from_start" or run.facts["learning_rate"] != RATE:
            continue
        switches = switches_made(run.events)
        logits = logits_by_head(run.frame)
        if not switches.empty:
            logits = logits.loc[: switches["step"].iloc[0]]
        copied = int(re.sub(r"\D", "", Path(run.facts["branched_from"] or "0").stem))
        steps = logits.loc[copied + 1 : logits.index[-1] - GROWTH_WINDOW].index
        if steps.empty:
            continue
        growth = pd.concat([logit_growth(logits, step) for step in steps])
        after = growth.loc[growth["before"] >= 1, "after"].dropna()
        rows.append(
            {
                "run": run.name,
                "samples": len(after),
                "heads": after.index.nunique(),
                "growth_after": after.median(),
                "falling": (after < 0).mean(),
                "falling_fast": (after <= -0.5).mean(),
            }
        )
    return pd.DataFrame(rows)


def main(command: str, *folders: str) -> None:
    """Packs, or prints all tables and writes them beside the data."""
    if command == "pack":
        pack(Path(folders[0]), Path(folders[1]))
        return
    results = Path(folders[0])
    packed = load(results)
    runs = one_line_a_run(packed)
    tables = {
        "runs": runs,
        "arms": one_line_an_arm(runs),
        "families": one_line_a_family(runs),
        "unswitched": growth_without_a_switch(packed),
    }
    for name, table in tables.items():
        digits = "%.3g" if name == "unswitched" else "%.5g"
        table.to_csv(results / f"{name}.csv", index=False, float_format=digits)
        print(table.to_string(index=False))


if __name__ == "__main__":
    main(*sys.argv[1:])
