"""What is measured of one packed run: its failure, and the growth of its logits."""

from __future__ import annotations

import numpy as np
import pandas as pd

from studies.rescue.packed import LOSS_STEPS

#: Nats above the matched run's loss, and the steps over which it is averaged.
MARGIN, WINDOW = 0.1, 500

#: A large logit, and the steps before and after which its growth is told.
GROWN, GROWTH_WINDOW = 1000, 1500

#: What is not finite counts as so many nats.
_LARGE = 1e3


def series(run: pd.DataFrame, indicator: str) -> pd.Series:
    """The largest value of an indicator of a run's telemetry over all heads, by step."""
    return run[run["indicator"] == indicator].groupby("step")["value"].max()


def loss_departure(loss: pd.Series, reference: pd.Series) -> int | None:
    """First step at which a run's loss has left the matched run's; None if it has not.

    Its mean over `WINDOW` steps lies `MARGIN` nats above.

    Args:
        loss: By step.
        reference: The same of the matched run.
    """
    failing = excess_loss(loss, reference).rolling(WINDOW // LOSS_STEPS).mean() > MARGIN
    steps = failing.index[failing]
    return int(steps[0]) if len(steps) else None


def excess_loss(loss: pd.Series, reference: pd.Series) -> pd.Series:
    """How far a loss lies above another, in nats, by step; where it is not finite, far."""
    return (loss.where(np.isfinite, _LARGE) - reference).dropna()


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
        NaN where these hold less than three finite samples.
    """
    last = logits.index.searchsorted(step, side="right") - 1
    grown = logits.columns[logits.iloc[last] > GROWN]
    around = logits.loc[step - GROWTH_WINDOW : step + GROWTH_WINDOW, grown]
    logs = np.log(around.clip(lower=1).where(np.isfinite))
    return pd.DataFrame(
        {"before": _slopes(logs.loc[:step]), "after": _slopes(logs.loc[step + 1 :])},
        index=grown,
        dtype=float,
    )


def _slopes(logs: pd.DataFrame) -> np.ndarray:
    """Of the straight line through each column's known values, in 1,000 steps."""
    values = logs.to_numpy(float)
    known = ~np.isnan(values)
    counts = known.sum(axis=0)
    steps = np.where(known, logs.index.to_numpy()[:, None] / 1000, 0)
    steps = np.where(known, steps - steps.sum(axis=0) / np.maximum(counts, 1), 0)
    products = np.where(known, steps * values, 0).sum(axis=0)
    unknown = np.full(len(counts), np.nan)
    return np.divide(products, (steps**2).sum(axis=0), out=unknown, where=counts >= 3)


def switches_made(events: pd.DataFrame) -> pd.DataFrame:
    """The switches among the events, without undoings; refusals are events of another kind."""
    return events[(events["kind"] == "switch") & (events["stabilizer"] != "none")]
