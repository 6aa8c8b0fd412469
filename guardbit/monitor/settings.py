"""The settings of a monitor, checked before a run begins."""

from __future__ import annotations

import inspect
import math
import os
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from guardbit.catalog import INDICATORS
from guardbit.monitor.detectors import DEFAULT_RULES, Detectors, Rule
from guardbit.monitor.detectors.rule import judges_heads, levels_of, reads_of
from guardbit.monitor.policy import Policy
from guardbit.monitor.stages import log
from guardbit.records import Alarm

#: Seconds after which an examination begins nothing more, by default.
PREFLIGHT_SECONDS = 60.0

#: Megabytes of snapshots that a run keeps by default.
SNAPSHOT_MEGABYTES = 64

F = TypeVar("F", bound=Callable[..., None])

_OF_POLICY = (
    "stabilizer", "scope", "always", "agreeing_rules", "agreement_steps", "escalate", "quiet_steps",
    "qk_clip",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What sessions and callbacks take alike.

    Attributes:
        every_n_train_steps: Cadence in optimizer steps: steps 0, n, 2n, ... are sampled. If step
            numbers jump, the first step at or after each of these is sampled.
        sites: Names or patterns (``"*.attn"``) of the attention modules to watch; None for all.
        indicators: What to measure, of `guardbit.INDICATORS`; None for all.
        num_rows: Query rows of each call to recompute in FP32, evenly spread; None for all. Sums
            over rows (`delta_bias`) are then over these rows.
        num_audited_heads: Number of heads of each site whose dQ is audited at a sampled step, in
            turn; alarmed heads are audited in addition.
        rules: The detectors' rules, with their thresholds.
        policy: Decides what alarms lead to; None to watch only.
        dry_run: Record the policy's decisions without switching anything.
        dirpath: Folder of the telemetry.
        snapshot_megabytes: How much of the inputs of alarmed heads to keep in `dirpath` for
            `guardbit diagnose`; 0 for nothing.
        audit_repeats: Whether to run the backward of sampled calls a second time, and to report
            where it differs: a race, or additions in any order.
        preflight: Whether the engines are examined at the calls of the first sampled step, when it
            has ended, on the first rank; True for a minute at most, or a number of seconds.
        on_alarm: Called on rank 0 with each alarm, once it is recorded; training waits for it. Its
            errors end nothing: the first is recorded, and it is called again at the next alarm.
        strict: Raise errors of the monitor itself, instead of logging them and going on.
    """

    every_n_train_steps: int = 50
    sites: Sequence[str] | None = None
    indicators: Sequence[str] | None = None
    num_rows: int | None = None
    num_audited_heads: int = 1
    rules: tuple[Rule, ...] = DEFAULT_RULES
    policy: Policy | None = None
    dry_run: bool = False
    dirpath: str | os.PathLike[str] | None = None
    snapshot_megabytes: float = SNAPSHOT_MEGABYTES
    audit_repeats: bool = False
    preflight: bool | float = False
    on_alarm: Callable[[Alarm], object] | None = None
    strict: bool = False

    def __post_init__(self) -> None:
        self._check_numbers()
        self._check_names()
        Detectors(self.rules)
        for setting in ("audit_repeats", "dry_run"):
            if not isinstance(getattr(self, setting), bool):
                given = getattr(self, setting)
                raise ValueError(f"{setting} is {given!r}; it must be True or False")
        if self.policy is not None and not isinstance(self.policy, Policy):
            raise ValueError(f"policy is {self.policy!r}; it must be a guardbit.Policy, or None")
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
        return INDICATORS if self.indicators is None else tuple(self.indicators)

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
            **{name: self.policy and getattr(self.policy, name) for name in _OF_POLICY},
            "dry_run": self.dry_run,
        }

    def _check_numbers(self) -> None:
        whole = {"every_n_train_steps": 1, "num_audited_heads": 0, "num_rows": 1}
        for setting, least in whole.items():
            value = getattr(self, setting)
            if setting == "num_rows" and value is None:
                continue
            if not isinstance(value, int) or isinstance(value, bool):
                raise ValueError(f"{setting} is {value!r}; it must be a whole number")
            if value < least:
                more = ", or None for all rows" if setting == "num_rows" else ""
                raise ValueError(f"{setting} is {value}; it must be at least {least}{more}")
        megabytes, preflight = self.snapshot_megabytes, self.preflight
        if isinstance(megabytes, bool) or not _is_amount(megabytes):
            raise ValueError(
                f"snapshot_megabytes is {megabytes!r}; it must be a number from 0 on, 0 for none"
            )
        if not _is_amount(preflight):
            raise ValueError(
                f"preflight is {preflight!r}; it must be True, False, or a number of seconds from 0"
                " on"
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


def takes_settings(init: F) -> F:
    """Shows the `Settings` that a constructor takes as `**settings` in its signature."""
    signature = inspect.signature(init)
    own = {name: p for name, p in signature.parameters.items() if p.kind is not p.VAR_KEYWORD}
    more = [p for name, p in inspect.signature(Settings).parameters.items() if name not in own]
    init.__signature__ = signature.replace(  # pyright: ignore[reportFunctionMemberAccess]
        parameters=[*own.values(), *more]
    )
    return init


def _is_amount(number: object) -> bool:
    return isinstance(number, int | float) and 0 <= number < math.inf


def check_folder(dirpath: object) -> None:
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
