"""Runs the rules over samples of a live run or of a recorded one, and keeps their states."""

import copy
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import groupby
from operator import attrgetter

import numpy as np

from guardbit.catalog import INDICATORS
from guardbit.monitor.detectors.rule import (
    BEGUN,
    OVERFLOW,
    Finding,
    Rule,
    Snapshot,
    State,
    Values,
    from_plain,
    heads_where,
    padded,
    reads_of,
    role_of,
    to_plain,
)
from guardbit.monitor.detectors.rules import DEFAULT_RULES
from guardbit.records import SUBJECTS, Alarm, Role, Sample

#: Logits from which on a head must stay switched: the reciprocal of BF16's rounding error, beyond
#: which delta's rounding does not make up for what keys have in common.
RESTLESS = 256.0

#: A head trains if its W_Q or W_K has moved in this many last samples: some optimizers are
#: stepped less often than others, and norms recorded in three digits do not always show it.
STILL = 10
_WEIGHTS = ("w_q_spectral_norm", "w_k_spectral_norm")
# A norm that is computed anew may differ in its last bits.
_UNMOVED = 1e-6


class Detectors:
    """Samples in, alarms out; one object for a live run and for a replay."""

    #: For how many steps a rule does not name a head again.
    cool_down_steps = 1000

    def __init__(self, rules: tuple[Rule, ...] = DEFAULT_RULES) -> None:
        if isinstance(rules, str) or not isinstance(rules, Sequence):
            raise ValueError(f"rules is {rules!r}; it must be a tuple of rules")
        for rule in rules:
            if not isinstance(getattr(rule, "name", None), str) or not hasattr(rule, "examine"):
                raise ValueError(f"rules holds {rule!r}; each must be a rule, such as HeadGrowth()")
        self.roles: Mapping[str, Role] = {rule.name: role_of(rule) for rule in rules}
        for name, role in self.roles.items():
            if not isinstance(role, Role) or role.judges not in SUBJECTS:
                raise ValueError(
                    f"the role of {name} is {role!r}; it must be a guardbit.records.Role that"
                    f" judges one of {', '.join(SUBJECTS)}"
                )
        names = [rule.name for rule in rules]
        if len(set(names)) < len(names):
            raise ValueError(f"the rules' names are {names}; they must differ")
        self.rules = tuple(rules)
        # Modules where the size of W_Q does not reach the scores, as under QK norm: set by the
        # caller, who knows the model.
        self.normalised: frozenset[str] = frozenset()
        # Indicator -> site -> last known values.
        self._latest: dict[str, dict[str, Values]] = {}
        # What `_training` and `_begun` return, for the latest step that measured heads.
        self._of_heads: tuple[dict[str, np.ndarray], dict[str, dict[str, Values]]] | None = None
        self._memory: State = {
            "rules": {name: {} for name in names},
            "last_step": {},  # indicator -> site -> step
            "widths": {},  # site -> number of heads
            "begun": {name: {} for name in BEGUN},  # indicator -> site -> first values
            "moved": {name: {} for name in _WEIGHTS},  # norm -> site -> the one it last moved to
            "still": {},  # site -> samples for which neither has moved
            "trains": {},  # site -> whether each head trains, see `STILL`
            # Rule -> site -> head (-1: the whole run), as text for JSON -> step of the last alarm.
            "fired": {name: {} for name in names},
        }

    def update(self, samples: Iterable[Sample]) -> list[Alarm]:
        """Takes the samples of one step or of several and returns the alarms they raise."""
        alarms = []
        known = [sample for sample in samples if sample.indicator in INDICATORS]
        known.sort(key=attrgetter("step", "layer", "site"))
        for step, group in groupby(known, key=attrgetter("step")):
            snapshot = self._snapshot(step, group)
            for rule in self.rules:
                for finding in rule.examine(snapshot, self._memory["rules"][rule.name]):
                    if heads := self._not_cooling(rule.name, step, finding):
                        heads = () if heads == (-1,) else heads
                        why = finding.why if isinstance(finding.why, str) else finding.why(heads)
                        errors = _measured_errors(snapshot, finding.site, heads)
                        why = f"{why}; {errors}" if errors else why
                        role = self.roles[rule.name]
                        alarms.append(Alarm(step, finding.site, heads, rule.name, why, role))
        return alarms

    def unjudged(self, indicators: Collection[str]) -> dict[str, list[str]]:
        """Returns the rules that cannot raise an alarm, each with the indicators that it lacks."""
        missing: dict[str, list[str]] = {}
        for rule in self.rules:
            for either in reads_of(rule):
                if not self.roles[rule.name].is_advisory and not set(either) & set(indicators):
                    missing.setdefault(rule.name, []).extend(either)
        return missing

    def restless(self) -> dict[str, tuple[int, ...]]:
        """Returns the heads that must stay switched, even if no rule names them for long."""
        return {
            site: heads
            for site, logits in self._latest.get("max_logit", {}).items()
            if (heads := heads_where(np.abs(logits) >= RESTLESS))
        }

    def state_dict(self) -> State:
        """Returns all that is remembered, as plain dicts, lists, numbers, texts and None."""
        latest = {
            indicator: {site: to_plain(values) for site, values in sites.items()}
            for indicator, sites in self._latest.items()
        }
        return copy.deepcopy({**self._memory, "latest": latest})

    def load_state_dict(self, state: State) -> None:
        if state["rules"].keys() != self.roles.keys():
            raise ValueError(
                f"the state of Detectors is of the rules {sorted(state['rules'])}, "
                f"but the rules are {sorted(self.roles)}; give the run the rules it had"
            )
        self._memory = copy.deepcopy({name: state[name] for name in self._memory})
        self._of_heads = None
        self._latest = {
            indicator: {site: from_plain(values) for site, values in sites.items()}
            for indicator, sites in state["latest"].items()
        }

    def _snapshot(self, step: int, samples: Iterable[Sample]) -> Snapshot:
        new: list[Sample] = []
        widths = self._memory["widths"]
        for sample in samples:
            last_step = self._memory["last_step"].setdefault(sample.indicator, {})
            if sample.values and step > last_step.get(sample.site, -math.inf):
                last_step[sample.site] = step
                new.append(sample)
                widths[sample.site] = max(len(sample.values), widths.get(sample.site, 0))
        now: dict[str, dict[str, Values]] = {}
        for sample in new:
            values = padded(np.array(sample.values, np.float64), widths[sample.site])
            values = values.clip(-OVERFLOW, OVERFLOW)
            now.setdefault(sample.indicator, {})[sample.site] = values
            latest = self._latest.setdefault(sample.indicator, {})
            before = padded(latest.get(sample.site, values), len(values))
            latest[sample.site] = np.where(np.isnan(values), before, values)
        if self._of_heads is None or any(sample.site for sample in new):
            self._of_heads = self._training(now), self._begun()
        return Snapshot(step, now, self._latest, self.normalised, *self._of_heads)

    def _training(self, now: Mapping[str, Mapping[str, Values]]) -> dict[str, np.ndarray]:
        """Returns which heads train, for each site whose weights are known."""
        still, moved = self._memory["still"], self._memory["moved"]
        for site in dict.fromkeys(site for name in _WEIGHTS for site in now.get(name, {})):
            width, is_new = self._memory["widths"][site], site not in still
            moves, known = np.zeros(width, bool), np.zeros(width, bool)
            for name in _WEIGHTS:
                norms = padded(now.get(name, {}).get(site, np.empty(0)), width)
                before = from_plain(moved[name].get(site, []), width)
                moves |= (has_moved := np.abs(norms - before) > _UNMOVED * np.abs(before))
                known |= ~np.isnan(norms)
                moved[name][site] = to_plain(np.where(has_moved | np.isnan(before), norms, before))
            # What has not moved from the first sample to the second does not train yet.
            counts = np.array([*still.get(site, []), *[STILL] * width][:width])
            counts = np.where(moves, 0, np.minimum(counts + known, STILL))
            still[site] = counts.tolist()
            self._memory["trains"][site] = ((counts < STILL) | is_new | ~known).tolist()
        widths = self._memory["widths"]
        return {
            site: np.array([*trains, *[True] * (widths[site] - len(trains))], bool)
            for site, trains in self._memory["trains"].items()
        }

    def _begun(self) -> dict[str, dict[str, Values]]:
        """Returns what heads had when they were measured first."""
        found: dict[str, dict[str, Values]] = {}
        for name, sites in self._memory["begun"].items():
            for site, values in self._latest.get(name, {}).items():
                first = from_plain(sites.get(site, []), len(values))
                first = np.where(np.isnan(first), values, first)
                sites[site] = to_plain(first)
                found.setdefault(name, {})[site] = first
        return found

    def _not_cooling(self, rule: str, step: int, finding: Finding) -> tuple[int, ...]:
        """Returns the finding's heads that may fire now, (-1,) for the whole run, and notes it."""
        fired = self._memory["fired"][rule].setdefault(finding.site, {})
        is_advisory = self.roles[rule].is_advisory
        ready = tuple(
            int(head)  # a rule's own may be NumPy's
            for head in finding.heads or (-1,)
            if str(head) not in fired
            or (not is_advisory and step >= fired[str(head)] + self.cool_down_steps)
        )
        fired.update({str(head): step for head in ready})
        return ready


def _measured_errors(snapshot: Snapshot, site: str, heads: tuple[int, ...]) -> str:
    """Describes the rounding errors last measured in alarmed heads."""
    width = max(heads, default=-1) + 1
    sums, scales, relative, coherent = (
        snapshot.last_of(indicator, site, width)
        for indicator in ("delta_bias", "delta_bias_abs", "dq_relative_error", "dq_coherent_error")
    )
    ratio = np.divide(sums, scales, out=np.full(width, np.nan), where=scales > 0)
    clauses = []
    if (head := _largest(ratio, heads)) is not None:
        part = f"{100 * ratio[head]:+.3g} % of their sizes"
        clauses.append(f"against FP32, delta's errors in head {head} sum to {part}")
    if (head := _largest(relative, heads)) is not None:
        clauses.append(
            f"dQ of head {head} is off by {relative[head]:.2g} times its norm, and by"
            f" {100 * coherent[head]:+.3g} % along W_Q's top direction"
        )
    return "; ".join(clauses)


def _largest(values: Values, heads: tuple[int, ...]) -> int | None:
    known = [head for head in heads if not np.isnan(values[head])]
    return max(known, key=lambda head: abs(values[head]), default=None)
