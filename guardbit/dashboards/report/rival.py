"""The engine that `compare` named beside the one in use, as a table of a report."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pandas as pd

from guardbit.dashboards.report import words
from guardbit.dashboards.report.document import Table

_PAIRS = (
    ("dq_relative_error", "compared_dq_relative_error"),
    ("w_q_push", "compared_w_q_push"),
)


def beside_another_engine(frame: pd.DataFrame, metadata: Mapping[str, Any]) -> Table | None:
    """Errors of both on the same inputs; None where no other engine ran."""
    rows: list[list[str]] = []
    for used, compared in _PAIRS:
        both = _side_by_side(frame, used, compared)
        if both.empty:
            continue
        for what, values in (
            ("median size", both.abs().median()),
            ("largest size", both.abs().max()),
        ):
            rows.append(
                [
                    f"{words.LABELS[used]}, {what}",
                    *(f"{values[name]:.3g}" for name in (used, compared)),
                ]
            )
    if not rows:
        return None
    name = str(metadata.get("compare") or "the other engine")
    return Table(["", "in use", name], rows, numbers_from=1)


def _side_by_side(frame: pd.DataFrame, used: str, compared: str) -> pd.DataFrame:
    wanted = frame[frame["indicator"].isin([used, compared])]
    table = wanted.pivot_table(
        index=["step", "site", "head"], columns="indicator", values="value", aggfunc="last"
    )
    return table.reindex(columns=[used, compared]).dropna()
