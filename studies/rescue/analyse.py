"""The study's table: which runs failed, which were warned, which were saved.

    python -m studies.rescue.analyse pack runs/rescue studies/rescue/results
    python -m studies.rescue.analyse table studies/rescue/results

`pack` thins each run for the repository: its journal, the losses and gradient norms of every 20th
step, the audited errors of dQ and, of every 200th step, what else rules and figures read of all
heads, to three digits. What it writes is a run as any other, for `guardbit report`, `live` and
`replay`. `table` prints one line a run and one an arm.

A run has failed when it leaves the matched run, the one whose heads are all compensated from the
start, with the same seed and batches, in one of two ways. (Its rate is the same, 1.5e-3 for higher
ones, at which that arm is not stable either. Of a seed without such a run, the one whose heads were
all switched at its first alarm stands in and is taken to be sound; the column `matched` says so.)

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

What a switch does is told by the heads whose largest logit is above 1,000 at the first alarm: how
fast it grew in the 1,500 steps before, and in the 1,500 after. An alarm comes where growth is
steepest, so that what follows is slower in any case: a third table tells what such heads do by
themselves.
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pandas as pd
from scipy.stats import beta

from guardbit import read_events, read_run
from guardbit.monitor.replay import samples
from guardbit.records import Event
from guardbit.store import RunWriter, read_metadata

MARGIN, WINDOW = 0.1, 500
RATIO, NORM_WINDOW = 2.0, 1000
RATE = 1.5e-3
LENGTH = 15_000
GROWN, GROWTH_WINDOW = 1000, 1500

_LARGE_LOSS = 1e3

_HEAD_STEPS, _LOSS_STEPS = 200, 20
_KEPT = (
    "w_q_spectral_norm", "w_k_spectral_norm", "qk_spectral_norm", "max_logit", "multiple_maxima",
    "multiple_maxima_bf16", "attention_entropy", "delta_bias", "delta_bias_abs",
    "delta_bias_cumulative",
)  # fmt: skip
_AUDITED = ("dq_relative_error", "dq_coherent_error")


class Run(NamedTuple):
    """A packed run: its folder's name, what `about.json` said, its telemetry and its journal."""

    name: str
    facts: dict
    frame: pd.DataFrame
    events: pd.DataFrame


def pack(runs: Path, results: Path) -> None:
    """Thins every run below a folder; what was packed before under its name is replaced."""
    for about in sorted(runs.glob("*/about.json")):
        folder = about.parent
        frame = read_run(folder)
        scalar = frame["site"] == ""
        thin = scalar & (frame["step"] % _LOSS_STEPS == 0)
        thin |= (frame["step"] % _HEAD_STEPS == 0) & frame["indicator"].isin(_KEPT)
        # One head of a layer in turn: thinned, some would never be seen.
        thin |= frame["indicator"].isin(_AUDITED)
        digits = np.where(scalar, 5, 3)[thin]
        kept = frame[thin].copy()
        kept["value"] = [float(f"{x:.{n}g}") for x, n in zip(kept["value"], digits, strict=True)]
        study = json.loads(about.read_text())
        if (clock := folder / "clock.csv").exists():
            steps, seconds = np.loadtxt(clock, delimiter=",", ndmin=2).T
            study["clock"] = {"steps": steps.tolist(), "seconds": seconds.tolist()}
        target = results / folder.name
        shutil.rmtree(target, ignore_errors=True)
        metadata = {**read_metadata(folder), "study": study}
        with RunWriter(target, metadata=metadata, flush_every=1 << 30) as writer:
            writer.add(samples(kept))
            for event in read_events(folder).to_dict("records"):
                writer.event(Event(**event))


def load(results: Path) -> list[Run]:
    """Reads every packed run below a folder."""
    folders = sorted(path.parent for path in results.glob("*/session-*.json"))
    return [
        Run(each.name, read_metadata(each)["study"], read_run(each), read_events(each))
        for each in folders
    ]


def series(run: pd.DataFrame, indicator: str) -> pd.Series:
    """The largest value of an indicator over all heads, by step."""
    return run[run["indicator"] == indicator].groupby("step")["value"].max()


def loss_departure(loss: pd.Series, reference: pd.Series) -> int | None:
    """First step at which a run's loss has left the matched run's, see above; None if it has not.

    Args:
        loss: By step.
        reference: The same of the matched run.
    """
    excess = (loss.where(np.isfinite, _LARGE_LOSS) - reference).dropna()
    average = excess.rolling(WINDOW // _LOSS_STEPS, min_periods=1).mean()
    return _first(average > MARGIN)


def norm_departure(norm: pd.Series, reference: pd.Series) -> int | None:
    """First step at which a run's largest W_Q norm is twice the matched run's; see above.

    Args:
        norm: The largest W_Q spectral norm over all heads, by step.
        reference: The same of the matched run.
    """
    ratio = (norm / reference).dropna()
    return _first(ratio.rolling(NORM_WINDOW // _HEAD_STEPS).median() >= RATIO)


def logits_by_head(run: pd.DataFrame) -> pd.DataFrame:
    """The largest logit of every head: a row a step, a column a head, (site, head)."""
    logits = run[run["indicator"] == "max_logit"]
    return logits.pivot_table(index="step", columns=["site", "head"], values="value")


def logit_growth(logits: pd.DataFrame, step: int) -> pd.DataFrame:
    """How fast the logits grow of the heads whose largest one is above `GROWN` at a step.

    Args:
        logits: Those of `logits_by_head`.
        step: The step.

    Returns:
        A row a head, (site, head): e-folds of its largest logit in 1,000 steps, a straight line's
        through the `GROWTH_WINDOW` steps `before`, that one included, and through those `after`;
        NaN where these hold less than three samples.
    """
    grown = logits.columns[(logits.loc[:step].tail(1) > GROWN).any()]
    logs = np.log(logits[grown].clip(lower=1))
    spans = {
        "before": logs.loc[step - GROWTH_WINDOW : step],
        "after": logs.loc[step + 1 : step + GROWTH_WINDOW],
    }
    return pd.DataFrame(
        {
            name: np.polyfit(span.index / 1000, span.to_numpy(), 1)[0]
            for name, span in spans.items()
            if len(span) > 2 and len(grown)
        },
        index=grown,
        columns=list(spans),
        dtype=float,
    )


def growth_without_a_switch(runs: list[Run]) -> pd.DataFrame:
    """What becomes of fast growing large logits by themselves, to compare a switch with.

    Every sample of every head of PyTorch's kernels at the study's rate counts, up to the first
    switch, whose logit is above `GROWN` and has grown by an e-fold in 1,000 steps or faster.

    Returns:
        A row a run: number of such samples and of heads, the median growth after them, and the
        shares that fall, at all and by half an e-fold in 1,000 steps or faster.
    """
    rows = []
    for run in runs:
        if run.facts["arm"] == "from_start" or run.facts["learning_rate"] != RATE:
            continue
        switches = _switches(run.events)
        logits = logits_by_head(run.frame)
        if not switches.empty:
            logits = logits.loc[: switches["step"].iloc[0]]
        steps = logits.index[logits.index <= logits.index[-1] - GROWTH_WINDOW]
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


def _switches(events: pd.DataFrame) -> pd.DataFrame:
    """Those that were made, undone ones left out."""
    return events[(events["kind"] == "switch") & ~events["stabilizer"].isin(["", "none"])]


def _first(failing: pd.Series) -> int | None:
    steps = failing.index[failing]
    return int(steps[0]) if len(steps) else None


def speed(facts: dict, first: int, last: int) -> float:
    """Steps a second between two steps, from the clock; NaN where it says nothing."""
    steps, seconds = (np.array(facts.get("clock", {}).get(key, [])) for key in ("steps", "seconds"))
    chosen = (steps[:-1] >= first) & (steps[1:] <= last) & (np.diff(seconds) > 0)
    # The median passes over pauses and, where a run was resumed, over the clock's new start.
    rates = (np.diff(steps) / np.diff(seconds))[chosen]
    return float(np.median(rates)) if rates.size else float("nan")


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
    switches = _switches(events)
    sums = run[run["indicator"] == "delta_bias_cumulative"]
    sums = sums.loc[sums["step"] == sums["step"].max(), "value"]
    bias, scale = (
        run[run["indicator"] == indicator].groupby(["site", "head"])["value"].sum()
        for indicator in ("delta_bias", "delta_bias_abs")
    )
    alarm = None if alarms.empty else int(alarms["step"].iloc[0])
    since = 1000 if alarm is None else alarm
    switch = None if switches.empty else int(switches["step"].iloc[0])
    growth = logit_growth(logits_by_head(run), last if alarm is None else alarm)
    return {
        "run": name,
        # A stock run gone through again shares what came before with the first one.
        "arm": "again" if facts["arm"] == "stock" and facts["branched_from"] else facts["arm"],
        "backend": facts["backend"],
        "stabilizer": facts["stabilizer"] or "",
        "learning_rate": facts["learning_rate"],
        "seed": facts["seed"],
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


def main(command: str, *folders: str) -> None:
    """Packs, or prints all tables and writes them beside the data."""
    if command == "pack":
        pack(Path(folders[0]), Path(folders[1]))
        return
    results = Path(folders[0])
    packed = load(results)
    runs = one_line_a_run(packed)
    arms = one_line_an_arm(runs)
    unswitched = growth_without_a_switch(packed)
    runs.to_csv(results / "runs.csv", index=False, float_format="%.5g")
    arms.to_csv(results / "arms.csv", index=False, float_format="%.5g")
    unswitched.to_csv(results / "unswitched.csv", index=False, float_format="%.3g")
    print(runs.to_string(index=False))
    print(arms.to_string(index=False))
    print(unswitched.to_string(index=False))


if __name__ == "__main__":
    main(*sys.argv[1:])
