"""The settings of a monitor, checked before a run begins."""

import inspect
import os
import typing
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeVar

from guardbit.catalog import INDICATORS
from guardbit.guard import refusing
from guardbit.monitor.detectors import DEFAULT_RULES, Detectors, Rule
from guardbit.monitor.detectors.rule import heads_judged_by
from guardbit.monitor.policy import Policy, check_settings, is_finite, is_whole, says_what_was_meant
from guardbit.monitor.stages import log
from guardbit.records import Alarm, nearest

F = TypeVar("F", bound=Callable[..., None])

_OF_POLICY = tuple(inspect.signature(Policy).parameters)


# Arguments that others take, and names that other libraries give to ours.
_ELSEWHERE = {
    **dict.fromkeys(_OF_POLICY, "it belongs to guardbit.Policy, in Lightning to AutoStabilizer"),
    "policy": "in Lightning AutoStabilizer takes the arguments of a policy",
    "dry_run": "in Lightning it belongs to AutoStabilizer",
    **dict.fromkeys(("every", "log_freq"), "did you mean every_n_train_steps?"),
}


def takes(function: Any, count: int) -> bool:
    """Whether a function can be called with `count` arguments."""
    with suppress(ValueError):  # of a builtin, which has no signature
        try:
            inspect.signature(function).bind(*range(count))
        except TypeError:
            return False
    return True


def _are_names(names: Any) -> bool:
    is_list = isinstance(names, Sequence) and not isinstance(names, str) and len(names) > 0
    return names is None or (is_list and all(isinstance(name, str) for name in names))


#: Settings -> what they must be, as a test and in words.
_MUST_BE: dict[str, tuple[Callable[[Any], bool], str]] = {
    "every_n_train_steps": (lambda n: is_whole(n, 1), "a whole number, at least 1"),
    "num_audited_heads": (lambda n: is_whole(n, 0), "a whole number, at least 0"),
    "num_rows": (
        lambda n: n is None or is_whole(n, 1),
        "a whole number, at least 1, or None for all rows",
    ),
    "snapshot_megabytes": (lambda n: is_finite(n) and n >= 0, "a number, at least 0, 0 for none"),
    "sites": (_are_names, "a list of names, at least one, or None for all"),
    "indicators": (_are_names, "a list of names, at least one, or None for all"),
    "dry_run": (lambda flag: isinstance(flag, bool), "True or False"),
    "locate_nonfinite": (lambda flag: isinstance(flag, bool), "True or False"),
    "audit_modules": (lambda flag: isinstance(flag, bool), "True or False"),
    "policy": (lambda p: p is None or isinstance(p, Policy), "a guardbit.Policy, or None"),
    "on_alarm": (lambda f: f is None or takes(f, 1), "a function of one alarm, or None"),
    "dirpath": (
        lambda path: path is None or (path and isinstance(path, str | os.PathLike)),
        "a path, or None",
    ),
}


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
        locate_nonfinite: If the loss or a gradient is not finite, run the step's batches once more
            and name the first place, at most 3 times a run. Keeps a step's batches, each with 32 KB
            of random state, and waits for the device once a step. `guardbit.locate_nonfinite` says
            what is as before afterwards.
        audit_modules: On rank 0, run a part of modules' calls once more, as they ran and in FP32,
            and compare: all modules at the first sample after step 0, then some in turn. State
            outside modules that a forward changes, such as a global generator, is not put back:
            do not use it on such models. Models without attention are taken, if no policy is given.
        on_alarm: Called on rank 0 with each `guardbit.records.Alarm`, once it is recorded, to send
            a mail or a message; training waits for it. Its errors end nothing: the first is
            recorded, and it is called again at the next alarm.
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
    snapshot_megabytes: float = 64
    locate_nonfinite: bool = False
    audit_modules: bool = False
    on_alarm: Callable[[Alarm], object] | None = None
    strict: bool = False

    def __post_init__(self) -> None:
        check_settings(self, _MUST_BE)
        if self.dirpath is not None:
            if os.path.isfile(self.dirpath):
                raise ValueError(
                    f"dirpath is {os.fspath(self.dirpath)!r}, a file; it must be a folder"
                )
            # The program may change its directory in mid-run.
            object.__setattr__(self, "dirpath", os.path.abspath(self.dirpath))
        for name in self.indicators or ():
            if name not in INDICATORS:
                raise ValueError(
                    f"indicator {name!r} is unknown; allowed are {', '.join(INDICATORS)}"
                    f"{nearest(name, INDICATORS)}"
                )
        Detectors(self.rules)

    @property
    def measured(self) -> tuple[str, ...]:
        return INDICATORS if self.indicators is None else tuple(self.indicators)

    @property
    def advice(self) -> str:
        """What the user should do, at the end of an alarm's line."""
        if self.policy is None:
            return "add AutoStabilizer, or a policy"
        return "dry_run: nothing is switched" if self.dry_run else ""

    def described(self) -> dict[str, Any]:
        """Returns what is kept of them with a run, as plain data."""
        names = "every_n_train_steps", "num_rows", "num_audited_heads", "dry_run"
        return {
            **{name: getattr(self, name) for name in (*names, "locate_nonfinite", "audit_modules")},
            "indicators": list(self.measured),
            "rules": [str(rule) for rule in self.rules],
            "heads_judged_by": heads_judged_by(self.rules),
            **{name: self.policy and getattr(self.policy, name) for name in _OF_POLICY},
        }


def _hint(name: str, allowed: Iterable[str]) -> str:
    """Says where an argument belongs, or which one was meant, if that is known."""
    if name in _ELSEWHERE:
        return f"; {_ELSEWHERE[name]}"
    is_setting = name in Settings.__dataclass_fields__
    others = (*_ELSEWHERE, *Settings.__dataclass_fields__)
    return "; it belongs to AttentionMonitor" if is_setting else nearest(name, [*allowed, *others])


def passes_to(kind: type, *but: str) -> Callable[[F], F]:
    """Gives a constructor that takes `**settings` the parameters and hints of a class but some."""

    def decorate(init: F) -> F:
        own = inspect.signature(init)
        taken = {name: p for name, p in own.parameters.items() if p.kind is not p.VAR_KEYWORD}
        of_kind = inspect.signature(kind).parameters
        more = [p for name, p in of_kind.items() if name not in {*taken, *but}]
        signature = own.replace(parameters=[*taken.values(), *more])
        hints = typing.get_type_hints(kind if kind is Settings else kind.__init__)

        checked = says_what_was_meant(init, signature, _hint, refusing)
        checked.__signature__ = signature  # pyright: ignore[reportAttributeAccessIssue]
        checked.__annotations__ |= {p.name: hints[p.name] for p in more}
        return checked

    return decorate


def warn_of_settings(settings: Settings, detectors: Detectors) -> None:
    quiet = settings.policy.quiet_steps if settings.policy else None
    if quiet is not None and quiet <= detectors.cool_down_steps:
        log.warning(
            "quiet_steps is %d, but a lasting alarm is repeated only every %d steps: heads that"
            " still diverge will be switched back",
            quiet,
            detectors.cool_down_steps,
        )
    if not detectors.roles:
        log.warning("rules is empty: no alarm can come, and a policy has nothing to act on")
    unjudged = detectors.unjudged(settings.measured)
    if unjudged:
        log.warning(
            "some rules cannot raise an alarm, because indicators that they need are not"
            " measured: %s",
            "; ".join(f"{rule} lacks {', '.join(names)}" for rule, names in unjudged.items()),
        )
