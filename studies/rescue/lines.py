"""One line of the study's table for each run."""

from __future__ import annotations

from pathlib import Path

import pandas as pd

from studies.rescue.measures import (
    WINDOW,
    excess_loss,
    logit_growth,
    logits_by_head,
    loss_departure,
    series,
    switches_made,
)
from studies.rescue.packed import Run, kind_of

#: The study's learning rate.
RATE = 1.5e-3

#: Arm and stabilizer of what others are held against, the first that there is.
_CORRECTED = (
    ("from_start", "compensated"),
    ("rescue_all", "compensated"),
    ("from_start", "exact_delta"),
)


def one_line_a_run(runs: list[Run]) -> pd.DataFrame:
    """What each run was and what became of it; `studies.rescue.analyse` explains the columns."""
    return pd.DataFrame(_line(run, matched_run(run, runs)) for run in runs)


def matched_run(run: Run, runs: list[Run]) -> Run | None:
    """The run that a run is held against.

    Returns:
        The one of the same kind of model and seed whose heads were compensated from the start, or,
        if there is none, from the first alarm to the end, or else whose heads were on exact delta
        from the start; its rate is the run's, or the study's if that is lower. None if there is no
        such run, or it is the run itself.
    """
    alike = [other for other in runs if kind_of(other) == kind_of(run)]
    for arm, stabilizer in _CORRECTED:
        wanted = {
            "arm": arm,
            "stabilizer": stabilizer,
            "seed": run.facts["seed"],
            "learning_rate": min(RATE, run.facts["learning_rate"]),
        }
        for other in alike:
            fits = all(other.facts[key] == value for key, value in wanted.items())
            if fits and (arm == "from_start" or _stayed_switched(other)):
                return None if other is run else other
    return None


def _stayed_switched(run: Run) -> bool:
    was_undone = (run.events["kind"] == "switch") & (run.events["stabilizer"] == "none")
    return not switches_made(run.events).empty and not was_undone.any()


def _line(run: Run, twin: Run | None) -> dict:
    line = _what_it_was(run)
    line |= _failure(run, twin)
    line |= _warning(run, line["failed_at"])
    line |= _switch(run, line["steps"] if line["first_alarm"] is None else line["first_alarm"])
    return line | _telemetry(run, 1000 if line["first_alarm"] is None else line["first_alarm"])


def _what_it_was(run: Run) -> dict:
    origin = run.facts["branched_from"]
    return {
        "run": run.name,
        "arm": _arm(run),
        "backend": run.facts["backend"],
        "stabilizer": run.facts["stabilizer"] or "",
        "learning_rate": run.facts["learning_rate"],
        "seed": run.facts["seed"],
        "family": Path(origin).parent.name if origin else run.name,
        "steps": int(series(run.frame, "loss").index[-1]),
    }


def _arm(run: Run) -> str:
    if run.facts["arm"] != "stock":
        return run.facts["arm"]
    # An untouched run that is repeated from a checkpoint shares the steps before with the first;
    # one that is begun once more, at step 1, shares weights and batches.
    if run.facts["branched_from"]:
        return "again"
    return "restart" if run.name.rpartition("-again")[2].isdigit() else "stock"


def _failure(run: Run, twin: Run | None) -> dict:
    if twin is None:
        return {
            "matched": "",
            "compared_steps": 0,
            "failed_at": None,
            "above_matched": None,
        }
    loss = [series(each.frame, "loss") for each in (run, twin)]
    excess = excess_loss(*loss)
    compared = int(excess.index[-1])
    return {
        "matched": twin.facts["arm"],
        "compared_steps": compared,
        "failed_at": loss_departure(*loss),
        "above_matched": excess.loc[compared - WINDOW + 1 :].mean(),
    }


def _warning(run: Run, failed: int | None) -> dict:
    alarms, verdicts = (run.events[run.events["kind"] == kind] for kind in ("alarm", "verdict"))
    first = None if alarms.empty else int(alarms["step"].iloc[0])
    heads = {(alarm.site, head) for alarm in alarms.itertuples() for head in alarm.heads}
    return {
        "first_alarm": first,
        "rule": "" if alarms.empty else alarms["rule"].iloc[0],
        "lead": None if failed is None or first is None else failed - first,
        "verdict": "" if verdicts.empty else verdicts["verdict"].iloc[-1],
        "alarmed_heads": len(heads),
    }


def _switch(run: Run, alarm: int) -> dict:
    switches, logits = switches_made(run.events), logits_by_head(run.frame)
    step = None if switches.empty else int(switches["step"].iloc[0])
    if step is not None:
        at_once = switches[switches["step"] == step].itertuples()
        switched = {(switch.site, head) for switch in at_once for head in switch.heads}
        logits = logits[[head for head in logits if head in switched]]
    growth = logit_growth(logits, alarm)
    return {
        "first_switch": step,
        "switches": len(switches),
        "grown_heads": len(growth),
        "growth_before": _median_and_range(growth["before"]),
        "growth_after": _median_and_range(growth["after"]),
    }


def _telemetry(run: Run, since: int) -> dict:
    loss, logit, norm = (
        series(run.frame, name) for name in ("loss", "max_logit", "w_q_spectral_norm")
    )
    return {
        "last_loss": loss.loc[loss.index[-1] - WINDOW + 1 :].mean(),
        "highest_logit": logit.loc[since:].max(),
        "largest_norm": norm.iloc[-1],
        "largest_logit": logit.iloc[-1],
    }


def _median_and_range(values: pd.Series) -> str:
    known = values.dropna()
    if known.empty:
        return ""
    return f"{known.median():+.2f} ({known.min():+.2f} to {known.max():+.2f})"
