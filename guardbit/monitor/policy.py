"""From alarms to decisions: which heads to switch, when to undo it, and what kind of trouble it is.

The policy knows rules by the role that their alarms carry, and never by their names, which are the
user's: some speak of the whole model or of the loss, every other of the heads its alarms name.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from guardbit.monitor import earlier
from guardbit.records import STABILIZERS, Alarm, Decision

#: What is switched: the heads that alarms name, all heads of their sites, or all of the model.
SCOPES: tuple[str, ...] = ("head", "layer", "model")

#: Steps after an alarm of the whole model for which only a measured delta bias is a case for
#: switching heads.
HOLD_STEPS = 5000


class Policy:
    """Decides which heads are stabilized.

    A head qualifies when `agreeing_rules` different rules have named it within
    `agreement_steps`. One is the default, because a false switch is cheap: the default
    stabilizer computes the same softmax and only makes delta exact. When all layers' logits run
    away at once (a rule of the whole model) the cause is not one head's rounding, and for
    `HOLD_STEPS` only a measured delta bias still qualifies a head.

    With the scope "head" the heads that qualify are switched, with the scope "layer" all heads of
    a site as soon as one of them does, with the scope "model" all heads as soon as any does, and
    those of sites that are called later as soon as they are known. Heads that somebody else has
    switched by then are left alone.

    With `always` no alarm is waited for: all heads are switched at the end of the first step, and
    those of sites that are called later at the first sampled step after it. Scope and agreement
    do not matter then.

    What is switched stays switched, unless `calm_steps` is given: then it goes back to "none" when
    no rule has named the head (with a wider scope, any of the heads) for so long, once. What is
    alarmed again after that stays switched for good, so that nothing swings to and fro. How soon a
    rule repeats itself is the detectors' cool-down; `calm_steps` must be longer. Undoing gains one
    or two per cent of speed; after two of the rescue study's three undos logits grew again.

    Args:
        stabilizer: What heads are switched to, one of `guardbit.records.STABILIZERS`.
        scope: Which heads, one of `SCOPES`.
        always: Whether to switch all heads from the start, without an alarm.
        agreeing_rules: Number of different rules that must name a head, at least 1.
        agreement_steps: Steps within which they must do so.
        calm_steps: Steps without an alarm after which a switch is undone; None: never.

    Raises:
        ValueError: If an argument is outside its range, or `calm_steps` is given with `always`.
    """

    def __init__(
        self,
        stabilizer: str = "exact_delta",
        *,
        scope: str = "layer",
        always: bool = False,
        agreeing_rules: int = 1,
        agreement_steps: int = 2000,
        calm_steps: int | None = None,
    ) -> None:
        if stabilizer not in STABILIZERS or stabilizer == "none":
            allowed = ", ".join(name for name in STABILIZERS if name != "none")
            raise ValueError(f"stabilizer must be one of {allowed}, got {stabilizer!r}")
        if scope not in SCOPES:
            raise ValueError(f"scope must be one of {', '.join(SCOPES)}, got {scope!r}")
        if not isinstance(always, bool):
            raise ValueError(f"always must be True or False, got {always!r}")
        if always and calm_steps is not None:
            raise ValueError(
                f"calm_steps is {calm_steps} and always is True: what is to be always switched is"
                " never given back, so leave one of them out"
            )
        whole = {"agreeing_rules": agreeing_rules, "agreement_steps": agreement_steps}
        if calm_steps is not None:
            whole["calm_steps"] = calm_steps
        for name, value in whole.items():
            if not isinstance(value, int) or isinstance(value, bool):
                raise ValueError(f"{name} must be a whole number, got {value!r}")
        if agreeing_rules < 1:
            raise ValueError(f"agreeing_rules must be >= 1, got {agreeing_rules}")
        if agreement_steps < 0:
            raise ValueError(f"agreement_steps must be >= 0, got {agreement_steps}")
        if calm_steps is not None and calm_steps < 1:
            raise ValueError(f"calm_steps must be >= 1 or None, got {calm_steps}")
        self.stabilizer = stabilizer
        self.scope = scope
        self.always = always
        self.agreeing_rules = agreeing_rules
        self.agreement_steps = agreement_steps
        self.calm_steps = calm_steps
        # Site -> head, as text as in JSON -> rule -> step of its last alarm.
        self._alarmed: dict[str, dict[str, dict[str, int]]] = {}
        # Rules that measure the cause itself, as far as they have fired.
        self._causes: set[str] = set()
        # Site -> head -> "on" (switched), "undone", "kept" (switched for good), or "taken" (by
        # somebody else, when its group was switched).
        self._switched: dict[str, dict[str, str]] = {}
        # The same of groups of heads that are switched together, where that is the scope: by site,
        # or "" for the model.
        self._groups: dict[str, str] = {}
        self._model_alarm: int | None = None

    def decide(
        self, alarms: Iterable[Alarm], step: int, stabilizers: Mapping[str, Sequence[str]]
    ) -> list[Decision]:
        """Takes the alarms raised since the last call and returns what to do now.

        Args:
            alarms: In the order of their steps; may be empty.
            step: The current optimizer step, not before the last call's.
            stabilizers: What the heads of the sites called so far run now: site -> one name a
                head. Nothing is decided about other sites.

        Returns:
            At most one decision a site to switch heads and one to undo that, in the order of sites.
        """
        for alarm in alarms:
            if alarm.role.judges == "model":
                self._model_alarm = alarm.step
            if alarm.role.measures_cause:
                self._causes.add(alarm.rule)
            if alarm.role.judges == "head":
                for head in alarm.heads:
                    rules = self._alarmed.setdefault(alarm.site, {}).setdefault(str(head), {})
                    rules[alarm.rule] = alarm.step
        if self.always:
            return list(self._switch_all(step, stabilizers, "kept", "from the start (always=True)"))
        if self.scope == "head":
            return list(self._of_heads(step, stabilizers))
        groups = {"": stabilizers}
        if self.scope == "layer":
            groups = {site: {site: names} for site, names in stabilizers.items()}
        return [
            decision
            for group, sites in groups.items()
            for decision in self._of_group(group, step, sites)
        ]

    @property
    def is_due(self) -> bool:
        """Whether heads are to be switched without waiting for a sample."""
        return self.always and not self._switched

    def state_dict(self) -> dict[str, Any]:
        """Returns all that is remembered, as plain dicts, lists, numbers, texts and None."""
        state = {
            "scope": self._kind,
            "alarmed": self._alarmed,
            "switched": self._switched,
            "groups": self._groups,
            "model_alarm": self._model_alarm,
            "causes": sorted(self._causes),
        }
        return copy.deepcopy(state)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues where the policy stood whose `state_dict` this is.

        From a policy of another scope, or from one with `always` by one without or the other way
        round, it is only taken over that all logits have run away: what that one has switched
        stays.
        """
        state = copy.deepcopy(earlier.policy_state(state))
        self._model_alarm = state["model_alarm"]
        self._causes |= set(state["causes"])
        if state["scope"] != self._kind:
            return
        self._alarmed = state["alarmed"]
        self._switched = state["switched"]
        self._groups = state["groups"]

    @property
    def _kind(self) -> str:
        return "always" if self.always else self.scope

    def _of_heads(self, step: int, stabilizers: Mapping[str, Sequence[str]]) -> Iterator[Decision]:
        for site, names in stabilizers.items():
            if site not in self._alarmed:
                continue
            states = self._switched.setdefault(site, {})
            taken = {str(head) for head, name in enumerate(names) if name != "none"}
            switch, undo, reasons = [], [], set()
            for head, rules in self._alarmed[site].items():
                state = states.get(head)
                if state in (None, "undone"):
                    if head in taken:
                        rules.clear()  # should it be free again, old alarms do not count
                    elif agreeing := self._agreeing(rules, step):
                        states[head] = "on" if state is None else "kept"
                        switch.append(head)
                        reasons |= agreeing
                elif state == "on" and self._calm([rules], step):
                    states[head] = "undone"
                    rules.clear()
                    undo.append(head)
            if switch:
                yield self._switch(step, site, switch, f"alarmed by {', '.join(sorted(reasons))}")
            if undo:
                yield self._undo(step, site, undo)

    def _of_group(
        self, group: str, step: int, stabilizers: Mapping[str, Sequence[str]]
    ) -> Iterator[Decision]:
        """Decides about heads that are switched and given back together.

        Args:
            group: Name of the only site, or "" for the model.
            step: The current step.
            stabilizers: Those of the group's sites.
        """
        what = f"the heads of {group} are" if group else "the model is"
        sites = [group] if group else list(self._alarmed)
        alarmed = [rules for site in sites for rules in self._alarmed.get(site, {}).values()]
        state, why = self._groups.get(group, ""), f"{what} switched"
        if state == "on" and self._calm(alarmed, step):
            state = self._groups[group] = "undone"
            for rules in alarmed:
                rules.clear()
        if state in ("", "undone"):
            # Of a run that was resumed, some sites may be called long after the undoing, and by
            # then nothing more may be undone.
            for site in [site for site in stabilizers if site in self._switched]:
                heads = self._switched.pop(site)
                if self.calm_steps is not None:
                    yield self._undo(step, site, [h for h in heads if heads[h] != "taken"])
            agreeing = set().union(*(self._agreeing(rules, step) for rules in alarmed))
            state = "kept" if state else "on"
            why = f"a head alarmed by {', '.join(sorted(agreeing))}"
            if not agreeing or not any("none" in names for names in stabilizers.values()):
                return
        self._groups[group] = state
        yield from self._switch_all(step, stabilizers, state, why)

    def _switch_all(
        self, step: int, stabilizers: Mapping[str, Sequence[str]], state: str, why: str
    ) -> Iterator[Decision]:
        """Switches what is not known yet, and not taken, of some sites' heads."""
        for site, names in stabilizers.items():
            known = self._switched.setdefault(site, {})
            switch = []
            for head, name in enumerate(names):
                if str(head) not in known:
                    known[str(head)] = state if name == "none" else "taken"
                    switch += [str(head)] if name == "none" else []
            if switch:
                yield self._switch(step, site, switch, why)

    def _switch(self, step: int, site: str, heads: Iterable[str], why: str) -> Decision:
        return Decision(step, site, _ascending(heads), self.stabilizer, why)

    def _undo(self, step: int, site: str, heads: Iterable[str]) -> Decision:
        why = f"no alarm for {self.calm_steps} steps"
        return Decision(step, site, _ascending(heads), "none", why)

    def _agreeing(self, rules: dict[str, int], step: int) -> set[str]:
        """Returns the rules that name the head now, empty where they are too few to switch."""
        recent = {rule for rule, at in rules.items() if step - at <= self.agreement_steps}
        if len(recent) < self.agreeing_rules:
            return set()
        if self._model_alarm is None or self._causes & recent:
            return recent
        return set() if step - self._model_alarm < HOLD_STEPS else recent

    def _calm(self, alarmed: Iterable[dict[str, int]], step: int) -> bool:
        last = max(at for rules in alarmed for at in rules.values())
        return self.calm_steps is not None and step - last >= self.calm_steps


def _ascending(heads: Iterable[str]) -> tuple[int, ...]:
    return tuple(sorted(map(int, heads)))
