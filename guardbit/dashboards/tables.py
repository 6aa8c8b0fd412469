"""The samples of a run as tables: by head, and of the whole run.

Samples have one value a row: step, site, layer, head, indicator, value. They are accepted as a CSV
reader leaves them (NaN for an empty site), empty, or without any column.
"""

from __future__ import annotations

from typing import cast

import numpy as np
import pandas as pd

from guardbit.catalog import HEAD_INDICATORS
from guardbit.judgement.evidence import Head as Head
from guardbit.store.files import COLUMNS, check_columns

_CHECKED = "guardbit.checked"


def check_samples(frame: pd.DataFrame) -> pd.DataFrame:
    """Returns the samples with "" for a missing site, as a shallow copy."""
    if frame.attrs.get(_CHECKED):
        return frame
    if frame.empty:
        return pd.DataFrame(columns=COLUMNS)
    check_columns(frame.columns, COLUMNS, "the table of samples")
    if np.asarray(frame["site"].isna()).any():
        frame = frame.assign(site=frame["site"].astype(object).fillna(""))
    frame = frame.copy(deep=False)
    frame.attrs[_CHECKED] = True
    return frame


def rows_of(table: pd.DataFrame, chosen: object) -> pd.DataFrame:
    """Returns the chosen rows; type checkers do not see that they are a table."""
    return cast(pd.DataFrame, table[cast(pd.Series, chosen)])


def of_heads(frame: pd.DataFrame) -> pd.DataFrame:
    samples = check_samples(frame)
    return rows_of(samples, samples["site"] != "")


def by_head(frame: pd.DataFrame, indicator: str) -> pd.DataFrame:
    """One indicator with a row a step and a column a head; NaN where a head was not measured."""
    samples = of_heads(frame)
    samples = rows_of(samples, samples["indicator"] == indicator)
    samples = samples.drop_duplicates(["step", "layer", "head"], keep="last")
    table = samples.pivot(index="step", columns=["layer", "head"], values="value")
    return table.astype(float).sort_index().sort_index(axis=1)


def of_run(frame: pd.DataFrame, indicator: str) -> pd.Series:
    """An indicator of the whole run (`loss`, `grad_norm`) by step, float64; non-finite is kept."""
    samples = check_samples(frame)
    samples = rows_of(samples, (samples["indicator"] == indicator) & (samples["site"] == ""))
    samples = samples.drop_duplicates(["step"], keep="last").set_index("step")
    return cast(pd.Series, samples["value"]).astype(float).sort_index()


def latest_values(frame: pd.DataFrame) -> pd.DataFrame:
    """The last recorded value of every head."""
    samples = of_heads(frame)
    samples = rows_of(samples, samples["indicator"].isin(HEAD_INDICATORS))
    samples = samples.sort_values(["step"], kind="stable")
    samples = samples.drop_duplicates(["layer", "head", "indicator"], keep="last")
    table = samples.pivot(index=["layer", "head"], columns="indicator", values="value")
    recorded = [name for name in HEAD_INDICATORS if name in table.columns]
    return table.reindex(columns=recorded).astype(float)


def head_label(layer: int, head: int, heads_in_layer: int) -> str:
    """The name of a head in figures and tables."""
    return f"layer {layer}" if heads_in_layer <= 1 else f"layer {layer}, head {head}"
