"""What is measured of one packed run: its failure, the growth of its logits, its speed."""

from __future__ import annotations

import numpy as np
import pandas as pd

from studies.rescue.packed import HEAD_STEPS, LOSS_STEPS

MARGIN, WINDOW = 0.1, 500
RATIO, NORM_WINDOW = 2.0, 1000
GROWN, GROWTH_WINDOW = 1000, 1500

_LARGE_LOSS = 1e3


def series(run: pd.DataFrame, indicator: str) -> pd.Series:
    """The largest value of an indicator over all heads, by step."""
    return run[run["indicator"] == indicator].groupby("step")["value"].max()


def loss_departure(loss: pd.Series, reference: pd.Series) -> int | None:
    """First step at which a run's loss has left the matched run's; None if it has not.

    Its mean over `WINDOW` steps lies `MARGIN` nats above.

    Args:
        loss: By step.
        reference: The same of the matched run.
    """
    excess = (loss.where(np.isfinite, _LARGE_LOSS) - reference).dropna()
    average = excess.rolling(WINDOW // LOSS_STEPS, min_periods=1).mean()
    return _first(average > MARGIN)


def norm_departure(norm: pd.Series, reference: pd.Series) -> int | None:
    """First step at which a run's largest W_Q norm is `RATIO` times the matched run's, or None.

    The ratio is a median over `NORM_WINDOW` steps.

    Args:
        norm: The largest W_Q spectral norm over all heads, by step.
        reference: The same of the matched run.
    """
    ratio = (norm / reference).dropna()
    return _first(ratio.rolling(NORM_WINDOW // HEAD_STEPS).median() >= RATIO)


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


def median_errors_of_dq(run: pd.DataFrame, heads: pd.Index, step: int) -> pd.DataFrame:
    """How far the audited dQ of heads is off around a step.

    Args:
        run: Telemetry of the run.
        heads: Pairs of site and head.
        step: The step.

    Returns:
        A row a head, (site, head): the norm of dQ's error as a part of dQ's, the median of the
        audits of the `GROWTH_WINDOW` steps `before`, that one included, and of those `after`; NaN
        where there are none.
    """
    audits = run[run["indicator"] == "dq_relative_error"]
    spans = {
        "before": audits["step"].between(step - GROWTH_WINDOW, step),
        "after": audits["step"].between(step + 1, step + GROWTH_WINDOW),
    }
    medians = {
        name: audits[span].groupby(["site", "head"])["value"].median()
        for name, span in spans.items()
    }
    return pd.DataFrame(medians, columns=list(spans)).reindex(heads)


def switches_made(events: pd.DataFrame) -> pd.DataFrame:
    """Those that were made, undone ones left out."""
    return events[(events["kind"] == "switch") & ~events["stabilizer"].isin(["", "none"])]


def speed(facts: dict, first: int, last: int) -> float:
    """Steps a second between two steps, from the clock; NaN where it says nothing."""
    steps, seconds = (np.array(facts.get("clock", {}).get(key, [])) for key in ("steps", "seconds"))
    chosen = (steps[:-1] >= first) & (steps[1:] <= last) & (np.diff(seconds) > 0)
    # The median passes over pauses and, where a run was resumed, over the clock's new start.
    rates = (np.diff(steps) / np.diff(seconds))[chosen]
    return float(np.median(rates)) if rates.size else float("nan")


def _first(failing: pd.Series) -> int | None:
    steps = failing.index[failing]
    return int(steps[0]) if len(steps) else None
