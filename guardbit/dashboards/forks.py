"""Copies of one run: where they fork, and whose loss diverges from another's.

Two copies of a run, such as one that was switched at an alarm and one that was left alone, have the
same losses up to the fork. From there on each is compared with the others, which shows a divergence
that a loss alone does not show.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import cast

import numpy as np
import pandas as pd

from guardbit.dashboards.loading import LoadedRun
from guardbit.dashboards.tables import of_run
from guardbit.judgement import Judgement, State

#: Losses in common that make two runs copies of one.
FEWEST_SHARED = 20
#: A loss has diverged from another when its mean over WINDOW steps lies MARGIN nats above, as in
#: the rescue study (`docs/evidence.md`): there, runs on the same batches lay at most 0.045 apart.
WINDOW, MARGIN = 500, 0.1
#: Stands for a loss that is not finite.
_LARGE = 1e3


def fork_of(losses: Mapping[str, pd.Series]) -> int | None:
    """The last step up to which all losses are equal; None if they share too few or all of them."""
    if len(losses) < 2:
        return None
    table = pd.concat(losses, axis=1, join="inner").dropna()
    same = table.nunique(axis=1).to_numpy() == 1
    shared = int(same.argmin()) if len(same) else 0
    return int(table.index[shared - 1]) if shared >= FEWEST_SHARED else None


def departure(loss: pd.Series, other: pd.Series) -> int | None:
    """The first step at which a loss has diverged from another, None if it has not."""
    finite = loss.where(np.isfinite(loss.to_numpy()), _LARGE)
    above = cast(pd.Series, finite - other).dropna()
    if len(above) < 2:
        return None
    steps = above.index.to_numpy()
    every = float(np.median(np.diff(steps)))
    mean = cast(pd.Series, above.rolling(max(round(WINDOW / every), 1)).mean())
    left = steps[mean.to_numpy() > MARGIN]
    return int(left[0]) if len(left) else None


def outcomes_of(runs: Mapping[str, LoadedRun]) -> dict[str, Judgement]:
    """The outcomes of runs; copies of one run are held against each other."""
    losses = {name: of_run(run.samples, "loss") for name, run in runs.items()}
    return against_each_other({name: run.judgement for name, run in runs.items()}, losses)


def against_each_other(
    outcomes: Mapping[str, Judgement], losses: Mapping[str, pd.Series]
) -> dict[str, Judgement]:
    """The outcomes of copies of one run, with the divergences that only the copies show."""
    if fork_of(losses) is None:
        return dict(outcomes)
    left = {
        (name, other): departure(losses[name], losses[other])
        for name in outcomes
        for other in outcomes
        if name != other
    }
    # A copy that diverges itself is nothing to compare others with.
    sound = {
        name
        for name, outcome in outcomes.items()
        if outcome.departed is None
        and not any(left[name, other] for other in outcomes if other != name)
    }
    found: dict[str, Judgement] = {}
    for name, outcome in outcomes.items():
        steps = [left[name, other] for other in sound if other != name]
        departed = min((step for step in steps if step is not None), default=None)
        if departed is None or (not outcome.alarmed and outcome.state == "learning-rate"):
            found[name] = outcome
            continue
        departed = min(departed, outcome.departed or departed)
        if not outcome.alarmed:
            found[name] = replace(outcome, state="lost", severity="critical", departed=departed)
            continue
        lead = departed - outcome.first_alarm if outcome.first_alarm is not None else None
        is_unclear = outcome.state in ("unclear", "learning-rate")
        state: State = outcome.state if is_unclear else "lost"
        found[name] = replace(
            outcome, state=state, severity="critical", departed=departed, lead=lead
        )
    return found
