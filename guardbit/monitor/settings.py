"""The settings of a monitor, checked before a run begins."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, fields
from typing import Any

from guardbit.catalog import INDICATORS
from guardbit.monitor.detectors import DEFAULT_RULES, Detectors, Rule
from guardbit.monitor.detectors.rule import judges_heads, levels_of, reads_of
from guardbit.monitor.policy import Policy
from guardbit.monitor.stages import log
from guardbit.records import Alarm

#: Seconds after which an examination begins nothing more, unless it is told otherwise.
PREFLIGHT_SECONDS = 60.0

#: Megabytes of snapshots that a run keeps unless it is told otherwise.
SNAPSHOT_MEGABYTES = 64


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What sessions and callbacks take alike; `MonitorSession` says what each means."""

    every_n_train_steps: int = 50
    sites: Sequence[str] | None = None
    indicators: Sequence[str] | None = None
    num_rows: int | None = None
    num_audited_heads: int = 1
    rules: tuple[Rule, ...] = DEFAULT_RULES
    snapshot_megabytes: float = SNAPSHOT_MEGABYTES
    audit_repeats: bool = False
    preflight: bool | float = False
    on_alarm: Callable[[Alarm], object] | None = None

    def __post_init__(self) -> None:
        self._check_numbers()
        self._check_names()
        Detectors(self.rules)
        self._check_examinations()
        if self.on_alarm is not None and not callable(self.on_alarm):
            raise ValueError(
                f"on_alarm is {self.on_alarm!r}; it must be a function of one alarm, or None"
            )

    @property
    def preflight_seconds(self) -> float:
        """After how long the examination of the first step begins nothing more; 0 for none."""
        return PREFLIGHT_SECONDS if self.preflight is True else float(self.preflight)

    @property
    def measured(self) -> tuple[str, ...]:
        """Names of the indicators."""
        return INDICATORS if self.indicators is None else tuple(self.indicators)

    def arguments(self) -> dict[str, Any]:
        """Returns all by name, as a session takes them."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    def described(self) -> dict[str, Any]:
        """Returns what is kept of them with a run, as plain data."""
        return {
            "every_n_train_steps": self.every_n_train_steps,
            "indicators": list(self.measured),
            "num_rows": self.num_rows,
            "num_audited_heads": self.num_audited_heads,
            "audit_repeats": self.audit_repeats,
            "rules": [str(rule) for rule in self.rules],
            "levels": levels_of(self.rules),
            "heads_judged_by": {r.name: reads_of(r) for r in self.rules if judges_heads(r)},
        }

    def _check_numbers(self) -> None:
        whole: dict[str, object] = {
            "every_n_train_steps": self.every_n_train_steps,
            "num_audited_heads": self.num_audited_heads,
            **({} if self.num_rows is None else {"num_rows": self.num_rows}),
        }
        for setting, value in whole.items():
            if not isinstance(value, int) or isinstance(value, bool):
                raise ValueError(f"{setting} is {value!r}; it must be a whole number")
        every, rows, heads = self.every_n_train_steps, self.num_rows, self.num_audited_heads
        if every < 1:
            raise ValueError(f"every_n_train_steps is {every}; it must be at least 1")
        if rows is not None and rows < 1:
            raise ValueError(f"num_rows is {rows}; it must be at least 1, or None for all rows")
        if heads < 0:
            raise ValueError(f"num_audited_heads is {heads}; it must be at least 0")
        megabytes = self.snapshot_megabytes
        is_number = isinstance(megabytes, int | float) and not isinstance(megabytes, bool)
        if not is_number or not 0 <= megabytes < math.inf:
            raise ValueError(
                f"snapshot_megabytes is {megabytes!r}; it must be a number from 0 on, 0 for none"
            )

    def _check_names(self) -> None:
        for setting, names in (("sites", self.sites), ("indicators", self.indicators)):
            if isinstance(names, str):
                raise ValueError(
                    f"{setting} is {names!r}; it must be a list of names, [{names!r}] say"
                )
            if names is None:
                continue
            if not isinstance(names, Sequence) or not all(isinstance(name, str) for name in names):
                raise ValueError(
                    f"{setting} is {names!r}; it must be a list of names, or None for all"
                )
            if not names:
                raise ValueError(f"{setting} is empty; name at least one, or pass None for all")
        for name in self.indicators or ():
            if name not in INDICATORS:
                raise ValueError(
                    f"indicator {name!r} is unknown; allowed are {', '.join(INDICATORS)}"
                )

    def _check_examinations(self) -> None:
        if not isinstance(self.audit_repeats, bool):
            raise ValueError(f"audit_repeats is {self.audit_repeats!r}; it must be True or False")
        preflight = self.preflight
        if not isinstance(preflight, bool | int | float) or not 0 <= preflight < math.inf:
            raise ValueError(
                f"preflight is {preflight!r}; it must be True, False, or a number of seconds from 0"
                " on"
            )


def check_policy(policy: object, dry_run: object) -> None:
    """Refuses what is no policy, or does not say how it is to act."""
    if not isinstance(dry_run, bool):
        raise ValueError(f"dry_run is {dry_run!r}; it must be True or False")
    if policy is not None and not isinstance(policy, Policy):
        raise ValueError(f"policy is {policy!r}; it must be a guardbit.Policy, or None")


def check_folder(dirpath: object) -> None:
    """Refuses what is no folder for a run."""
    if dirpath is not None and (not dirpath or not isinstance(dirpath, str | os.PathLike)):
        raise ValueError(f"dirpath is {dirpath!r}; it must be a path, or None")
    if dirpath is not None and os.path.isfile(dirpath):
        raise ValueError(f"dirpath is {os.fspath(dirpath)!r}, a file; a run needs a folder")


def warn_of_settings(
    indicators: Collection[str], policy: Policy | None, detectors: Detectors
) -> None:
    """Warns of settings that go badly together."""
    quiet = policy.quiet_steps if policy else None
    if quiet is not None and quiet <= detectors.cool_down_steps:
        log.warning(
            "quiet_steps is %d, but a lasting alarm is repeated only every %d steps: heads that"
            " still diverge will be switched back",
            quiet,
            detectors.cool_down_steps,
        )
    if not detectors.roles:
        log.warning("rules is empty: no alarm can come, and a policy has nothing to act on")
    unjudged = detectors.unjudged(indicators)
    if unjudged:
        log.warning(
            "some rules cannot raise an alarm, because indicators that they need are not"
            " measured: %s",
            "; ".join(f"{rule} lacks {', '.join(names)}" for rule, names in unjudged.items()),
        )
