"""Checks the settings of a monitor before a run begins."""

from __future__ import annotations

import math
from collections.abc import Sequence

from guardbit.catalog import INDICATORS
from guardbit.doctor.rival import Rival
from guardbit.monitor.detectors import Detectors, Rule

#: Seconds after which an examination begins nothing more, unless it is told otherwise.
PREFLIGHT_SECONDS = 60.0

#: Megabytes of snapshots that a run keeps unless it is told otherwise.
SNAPSHOT_MEGABYTES = 64


def check_snapshot_megabytes(megabytes: float) -> None:
    """Refuses a size that is none.

    Raises:
        ValueError: Naming the value and what is allowed.
    """
    is_number = isinstance(megabytes, int | float) and not isinstance(megabytes, bool)
    if not is_number or not 0 <= megabytes < math.inf:
        raise ValueError(
            f"snapshot_megabytes is {megabytes!r}; it must be a number from 0 on, 0 for none"
        )


def check_examinations(compare: str | None, audit_repeats: bool, preflight: bool | float) -> None:
    """Refuses what `compare`, `audit_repeats` and `preflight` cannot be.

    Raises:
        ValueError: Naming the value and what is allowed.
    """
    if compare is not None:
        Rival(compare)
    if not isinstance(audit_repeats, bool):
        raise ValueError(f"audit_repeats is {audit_repeats!r}; it must be True or False")
    if not isinstance(preflight, bool | int | float) or not 0 <= preflight < math.inf:
        raise ValueError(
            f"preflight is {preflight!r}; it must be True, False, or a number of seconds from 0 on"
        )


def check_on_alarm(on_alarm: object) -> None:
    """Refuses what cannot be called with an alarm.

    Raises:
        ValueError: Naming the value and what is allowed.
    """
    if on_alarm is not None and not callable(on_alarm):
        raise ValueError(f"on_alarm is {on_alarm!r}; it must be a function of one alarm, or None")


def check_settings(
    every_n_train_steps: int,
    sites: Sequence[str] | None,
    indicators: Sequence[str] | None,
    num_rows: int | None,
    num_audited_heads: int,
    rules: tuple[Rule, ...],
) -> None:
    """Refuses settings of `MonitorSession` that make no sense, in one sentence.

    Raises:
        ValueError: Naming the value and what is allowed.
    """
    whole = {
        "every_n_train_steps": every_n_train_steps,
        "num_audited_heads": num_audited_heads,
        **({} if num_rows is None else {"num_rows": num_rows}),
    }
    for setting, value in whole.items():
        if not isinstance(value, int) or isinstance(value, bool):
            raise ValueError(f"{setting} is {value!r}; it must be a whole number")
    if every_n_train_steps < 1:
        raise ValueError(f"every_n_train_steps is {every_n_train_steps}; it must be at least 1")
    for setting, names in (("sites", sites), ("indicators", indicators)):
        if isinstance(names, str):
            raise ValueError(f"{setting} is {names!r}; it must be a list of names, [{names!r}] say")
        if names is None:
            continue
        if not isinstance(names, Sequence) or not all(isinstance(name, str) for name in names):
            raise ValueError(f"{setting} is {names!r}; it must be a list of names, or None for all")
        if not names:
            raise ValueError(f"{setting} is empty; name at least one, or pass None for all")
    for name in indicators or ():
        if name not in INDICATORS:
            raise ValueError(f"indicator {name!r} is unknown; allowed are {', '.join(INDICATORS)}")
    if num_rows is not None and num_rows < 1:
        raise ValueError(f"num_rows is {num_rows}; it must be at least 1, or None for all rows")
    if num_audited_heads < 0:
        raise ValueError(f"num_audited_heads is {num_audited_heads}; it must be at least 0")
    Detectors(rules)
