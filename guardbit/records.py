"""The plain records that stages hand each other; standard library only.

A run is described by `Sample` (what was measured), `Alarm` (what a detector saw in it) and
`Decision` (what is done about it).
"""

import difflib
import math
import operator
import re
import unicodedata
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, get_args

#: The ways to compute a head's attention. "none" leaves it as it is.
STABILIZERS: tuple[str, ...] = (
    "none",
    "exact_delta",  # the same kernel; its backward gets an exact delta
    "centered_keys",  # the same kernel; its keys are given without their mean
    "compensated",  # our forward keeps what rounding takes from O, for the backward's delta
    "row_max",  # arXiv 2510.04212, Algorithm 3, made safe
)

EventKind = Literal["alarm", "advisory", "switch", "clip", "refusal", "verdict", "monitor_error"]

#: What a rule can judge: single heads, the whole model at once, or the loss.
Subject = Literal["head", "model", "loss"]
SUBJECTS: tuple[Subject, ...] = get_args(Subject)

Verdict = Literal["stable", "rounding", "not-rounding", "learning-rate", "unclear"]

#: How a run ended; one that was killed has no time to say.
RunEnd = Literal["finished", "interrupted", "crashed"]
RUN_ENDS: tuple[RunEnd, ...] = get_args(RunEnd)

#: Most characters of an alarm's line.
LINE = 160


def printable(text: str) -> str:
    r"""Returns a text as one line for a terminal, with control characters escaped, as in `\x1b`."""
    return "".join(
        letter.encode("unicode_escape").decode()
        if unicodedata.category(letter) in ("Cc", "Cf", "Cs", "Zl", "Zp")
        else letter
        for letter in str(text)
    )


def from_zero(number: Any, name: str) -> int:
    """Returns a number that is whole, of whatever kind, and 0 or more; else raises ValueError."""
    try:
        checked = operator.index(number)
    except TypeError:
        checked = -1
    if checked < 0:
        raise ValueError(f"{name} is {number!r}; it must be a whole number, at least 0")
    return checked


def nearest(name: str, allowed: Iterable[str]) -> str:
    """Returns a question after the allowed name that is most like another, "" if none is."""
    found = difflib.get_close_matches(name, allowed, n=1)
    return f"; did you mean {found[0]}?" if found else ""


@dataclass(frozen=True, slots=True)
class Sample:
    """One indicator of one attention module at one optimizer step."""

    step: int  # optimizer step (Lightning's `global_step`) the values belong to
    site: str  # dotted name of the attention module; "" for indicators of the whole run
    layer: int  # position of the module in the model, counting from 0; -1 for the whole run
    indicator: str  # one of `guardbit.INDICATORS`
    # One value per head, NaN where a head was not measured; a single value for the whole run.
    values: tuple[float, ...]

    def rows(self) -> Iterator[tuple[int, str, int, int, str, float]]:
        """Yields (step, site, layer, head, indicator, value) for every measured head.

        >>> list(Sample(10, "h.0.attn", 0, "max_logit", (3.5, math.nan)).rows())
        [(10, 'h.0.attn', 0, 0, 'max_logit', 3.5)]
        """
        for index, value in enumerate(self.values):
            if math.isnan(value) and self.site:
                continue
            head = index if self.site else -1
            yield self.step, self.site, self.layer, head, self.indicator, value


class ModuleRow(NamedTuple):
    """One number of the audit of a module at one optimizer step, see `guardbit.layers.audit`."""

    step: int
    module: str  # dotted name; "" is the model
    kind: str  # a key of `audit.LIMITS` or `audit.OF_WEIGHTS`
    tensor: str  # "output", "input" (its gradient), or the name of a weight (its gradient)
    statistic: str  # "gain", "relative_error", "slope", "residual_error" or "repeated"
    value: float
    limit: float  # sound modules stay below it in size; infinite if there is none

    @property
    def excess(self) -> float:
        """How many times the value is as large as its limit; 0 if it is NaN."""
        return 0.0 if math.isnan(self.value) else abs(self.value) / self.limit


class Role(NamedTuple):
    """What a rule judges; policy and verdict go by this, never by a rule's name."""

    judges: Subject = "head"
    # Whether the rule measures the cause of a rounding failure, which is a bias. Other rules see
    # its consequences, such as growth.
    measures_cause: bool = False
    # Whether what the rule finds is no alarm: it is recorded and audited more closely, and neither
    # switches a head nor changes the verdict.
    is_advisory: bool = False


_OF_HEADS = Role()


@dataclass(frozen=True, slots=True)
class Alarm:
    """A detector's rule has fired for some heads of one attention module."""

    step: int  # step of the sample that made the rule fire
    site: str  # name of the attention module
    heads: tuple[int, ...]  # the heads concerned, ascending
    rule: str  # name of the rule, as documented in `guardbit.monitor.detectors`
    why: str  # one sentence with the figures that made it fire
    role: Role = _OF_HEADS  # what the rule judges
    # "critical" with logits above 10,000, a loss that is not finite, or one that rises
    severity: Literal["warning", "critical"] = "warning"


@dataclass(frozen=True, slots=True)
class Decision:
    """What the policy wants done to some heads of one attention module."""

    step: int  # step after which the decision takes effect
    site: str  # name of the attention module
    heads: tuple[int, ...]  # the heads concerned, ascending
    stabilizer: str  # one of `STABILIZERS`; "none" undoes an earlier switch
    why: str  # one sentence naming the alarms behind it


@dataclass(frozen=True, slots=True)
class Event:
    """Something that happened in a run and is written down."""

    step: int  # optimizer step
    kind: EventKind  # "refusal": a switch that was not made; "advisory": a find that is no alarm
    site: str  # name of the attention module; "" where the event concerns the whole run
    heads: tuple[int, ...]  # the heads concerned, ascending; empty where it concerns all or none
    why: str  # one sentence a person understands
    rule: str = ""  # of an alarm or an advisory, the rule that fired; else ""
    stabilizer: str = ""  # of a switch, what runs from now on; of a refusal, what was to; else ""
    verdict: str = ""  # of a verdict, one of `Verdict`; else ""
    judges: str = ""  # of an alarm or an advisory, what its rule judges: `SUBJECTS`; else ""


def named(heads: Iterable[int]) -> str:
    """Heads in words: "head 6", "heads 0 to 11", "heads 6, 11".

    >>> named([7, 0, 1, 2, 4, 5])
    'heads 0 to 2, 4, 5, 7'
    """
    rows: list[list[int]] = []
    for head in sorted(heads):
        if rows and head == rows[-1][-1] + 1:
            rows[-1].append(head)
        else:
            rows.append([head])
    parts = (
        [f"{row[0]} to {row[-1]}"] if len(row) > 2 else [str(head) for head in row] for row in rows
    )
    listed = ", ".join(part for some in parts for part in some)
    return f"head {listed}" if listed.isdecimal() else f"heads {listed}"


def place_of(event: Alarm | Event) -> str:
    """The module of an event and its heads, "" where it is of the whole run."""
    return f"{event.site} {named(event.heads)}" if event.heads else event.site


def line_of(alarm: Alarm | Event, advice: str = "") -> str:
    """An alarm's line: of its sentence the first clauses that leave room for what to do."""
    why, end = printable(alarm.why), f"; {advice}" if advice else ""
    # The sentence names the head, of several the worst.
    is_named = len(alarm.heads) == 1 and why.startswith("head ")
    where = alarm.site if is_named else place_of(alarm)
    where = f" {where}" if where else ""
    begin = printable(f"GuardBit: step {alarm.step:,}: alarm{where}: ")
    clauses = re.split(r"(?<=[^;,])(?=[;,] )", why)
    kept = clauses[0]
    for clause in clauses[1:]:
        if len(begin + kept + clause + end) > LINE:
            break
        kept += clause
    room = LINE - len(begin) - len(end)
    return begin + (kept if len(kept) <= room else f"{kept[: room - 3]}...") + end


def event_of(alarm: Alarm, more: str = "") -> Event:
    """Returns an alarm, or an advisory, as an event, its sentence followed by `more`."""
    kind = "advisory" if alarm.role.is_advisory else "alarm"
    return Event(
        alarm.step,
        kind,
        alarm.site,
        alarm.heads,
        alarm.why + more,
        rule=alarm.rule,
        judges=alarm.role.judges,
    )
