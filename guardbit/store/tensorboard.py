"""Reads the scalars that `AttentionMonitor` logged to TensorBoard."""

from __future__ import annotations

from pathlib import Path

import pandas as pd

from guardbit.catalog import LOGGED_KEYS, RUN_INDICATORS

#: Loggers get only the largest value over all heads; this site stands for that head.
SITE = "largest over all heads"

_FILES = "*tfevents*"


def is_tensorboard_log(path: Path) -> bool:
    """Whether this is an event file of TensorBoard or a folder that holds one."""
    return path.match(_FILES) if path.is_file() else any(path.glob(_FILES))


def read_tensorboard(path: Path) -> pd.DataFrame:
    """Reads a log, a file or a folder of them.

    Returns:
        The columns of a run's samples, float64 values as they were logged (float32), in the order
        of the log.

    Raises:
        ValueError: The package tensorboard is missing, or the log holds none of GuardBit's keys.
    """
    try:
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    except ImportError:
        raise ValueError(
            f"reading the TensorBoard log at {path} needs the package tensorboard: "
            "pip install 'guardbit[tensorboard]'"
        ) from None
    log = EventAccumulator(str(path), size_guidance={"scalars": 0})
    log.Reload()
    tags = [tag for tag in log.Tags()["scalars"] if tag in LOGGED_KEYS]
    if not tags:
        raise ValueError(
            f"there is no run at {path}: the TensorBoard log has none of GuardBit's keys, "
            f"such as {next(iter(LOGGED_KEYS))}"
        )
    rows: list[tuple[int, str, int, int, str, float]] = []
    for tag in tags:
        indicator = LOGGED_KEYS[tag]
        site, index = ("", -1) if indicator in RUN_INDICATORS else (SITE, 0)
        rows += [
            (event.step, site, index, index, indicator, event.value) for event in log.Scalars(tag)
        ]
    return pd.DataFrame(rows, columns=["step", "site", "layer", "head", "indicator", "value"])
