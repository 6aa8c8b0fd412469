"""What a rule is: it looks at a snapshot of the telemetry and returns findings.

The values of heads are FP64 arrays while rules compute, and plain lists in their states.
"""

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, ClassVar, Protocol

import numpy as np
from numpy.typing import NDArray

from guardbit.records import Role

Values = NDArray[np.float64]
State = dict[str, Any]

#: Stands for inf, which JSON has not: the largest FP32 number.
OVERFLOW = float(np.finfo(np.float32).max)


def to_plain(values: Values) -> list[float | None]:
    """Returns one plain float per head, None for NaN, which JSON lacks."""
    if not np.isnan(values).any():  # by far the most
        return values.tolist()
    return [None if math.isnan(value) else value for value in values.tolist()]


def from_plain(values: list[float | None], heads: int = 0) -> Values:
    """Undoes `to_plain`; pads with NaN up to `heads` heads."""
    return padded(np.array(values, np.float64), heads)  # NumPy reads None as NaN


def padded(values: Values, heads: int) -> Values:
    """Returns values padded with NaN up to `heads` heads."""
    missing = max(0, heads - len(values))
    return np.concatenate([values, np.full(missing, math.nan)]) if missing else values


#: Factors by which a head's largest logit, or its W_Q norm, must have grown since the run began to
#: count as changed: more than they scatter between samples in a head that does not learn.
BEGUN = MappingProxyType({"max_logit": 2.0, "w_q_spectral_norm": 1.2})


@dataclass(frozen=True, slots=True)
class Snapshot:
    """All that was measured at one step."""

    step: int  # optimizer step
    # What was measured at this very step: indicator -> site -> one FP64 value per head, NaN if
    # missing, +-`OVERFLOW` for +-inf. All arrays of a site are as long as its highest head so far.
    now: Mapping[str, Mapping[str, Values]]
    # The same, every site with its last known values, this step's included.
    latest: Mapping[str, Mapping[str, Values]]
    # Sites where the size of W_Q does not reach the scores, as under QK norm.
    normalised: frozenset[str] = frozenset()
    # Site -> whether each head's W_Q or W_K changes; sites without known weights are absent.
    trains: Mapping[str, NDArray[np.bool_]] = dataclasses.field(default_factory=dict)
    # Indicator -> site -> what each head had when it was measured first, of `BEGUN`.
    begun: Mapping[str, Mapping[str, Values]] = dataclasses.field(default_factory=dict)

    def of(self, indicator: str) -> Mapping[str, Values]:
        """Returns site -> this step's values; empty where the indicator was not measured."""
        return self.now.get(indicator, {})

    def last_of(self, indicator: str, site: str, heads: int) -> Values:
        """Returns a site's last known values, `heads` of them, NaN where nothing is known."""
        return padded(self.latest.get(indicator, {}).get(site, np.empty(0))[:heads], heads)

    def of_trained(self, indicator: str) -> dict[str, Values]:
        """Returns site -> this step's values; NaN for heads that do not train."""
        found = {}
        for site, values in self.of(indicator).items():
            trains = self.trains.get(site)
            found[site] = values if trains is None else np.where(trains, values, np.nan)
        return found

    def has_moved(self, site: str, heads: int) -> NDArray[np.bool_]:
        """Whether heads are no longer as they were at first; true where nothing is known."""
        known, moved = np.zeros(heads, bool), np.zeros(heads, bool)
        for name, factor in BEGUN.items():
            begun = self.begun.get(name, {}).get(site, np.empty(0))
            bound = factor * np.abs(padded(begun, heads)[:heads])
            sizes = np.abs(self.last_of(name, site, heads))
            known |= ~np.isnan(sizes)
            moved |= sizes >= bound
        return moved | ~known


@dataclass(frozen=True, slots=True)
class Finding:
    """What a rule sees in one attention module."""

    site: str  # name of the module; "" for the whole run
    heads: tuple[int, ...]  # the heads concerned, ascending; none for the whole run
    # One sentence, or a function that makes it from the heads that the alarm will name. These are
    # the finding's heads that have not alarmed lately; () for the whole run.
    why: str | Callable[[tuple[int, ...]], str]


class Rule(Protocol):
    """One-sided test for one kind of trouble; it holds thresholds only, its state is handed in.

    A rule may have more attributes:

    - `reads`: the indicators without which it can judge nothing. In place of one there may be a
      tuple of alternatives, one of which is enough. The user is warned if they are not measured.
    - `role`, a `guardbit.records.Role`: what it judges. Without one it judges single heads.
    """

    @property
    def name(self) -> str:
        """Name of the rule in alarms."""
        ...

    def examine(self, snapshot: Snapshot, state: State, /) -> list[Finding]:
        """Updates `state`, a dict of plain JSON values, and returns what is wrong at this step."""
        ...


def reads_of(rule: Rule) -> list[list[str]]:
    """Returns what a rule needs: of each list one indicator."""
    needed = getattr(rule, "reads", ())
    return [[either] if isinstance(either, str) else list(either) for either in needed]


def heads_judged_by(rules: Iterable[Rule]) -> dict[str, list[list[str]]]:
    """Returns what each rule needs that alarms heads."""
    roles = ((rule, role_of(rule)) for rule in rules)
    return {r.name: reads_of(r) for r, of in roles if of.judges == "head" and not of.is_advisory}


def role_of(rule: Rule) -> Role:
    return getattr(rule, "role", Role())


# --- what several rules need ---------------------------------------------------------------------


def heads_where(mask: np.ndarray) -> tuple[int, ...]:
    """Returns the numbers of the heads for which a mask, (heads,), is true."""
    return tuple(np.flatnonzero(mask).tolist())


class Checked:
    """Base of rules that are dataclasses: refuses thresholds that are no numbers, or too small."""

    __slots__ = ()
    smallest: ClassVar[dict[str, int]] = {}  # field -> smallest value, where that is not 0

    def __post_init__(self: Any) -> None:
        for field in dataclasses.fields(self):
            if field.name == "name":
                continue
            value, bound = getattr(self, field.name), self.smallest.get(field.name, 0)
            for number in value if isinstance(value, tuple) else (value,):
                of = f"{self.name}.{field.name}"
                if isinstance(number, bool) or not isinstance(number, int | float):
                    raise ValueError(f"{of} is {number!r}; it must be a number")
                if not number >= bound:
                    raise ValueError(f"{of} is {number}; it must be >= {bound}")


def smaller_of_last_two(state: State, site: str, values: Values) -> Values:
    """Returns each head's smaller value of this sample and its last one; NaN for the first."""
    previous = from_plain(state.get(site, []), len(values))
    state[site] = to_plain(np.where(np.isnan(values), previous, values))
    return np.minimum(previous, values)


#: A logit is a difference of logarithms of probabilities, in nats. In any model smaller ones are
#: noise, and count as this.
FLAT = 16.0

#: Smallest number of attention modules that has a majority without one of them.
MODULES = 3


def growth_of_model(state: State, snapshot: Snapshot) -> float:
    """Returns the lower quartile of growth of trained modules' largest logits, 1 if unknown."""
    growths = []
    for site, logits in snapshot.latest.get("max_logit", {}).items():
        trains = snapshot.trains.get(site)
        # NaN is a head that was not measured.
        top = float(np.fmax.reduce(np.abs(logits)))
        if top == top and (trains is None or trains.any()):
            growths.append(top / state.setdefault("first", {}).setdefault(site, max(top, FLAT)))
    return sorted(growths)[(len(growths) - 1) // 4] if len(growths) >= MODULES else 1.0
