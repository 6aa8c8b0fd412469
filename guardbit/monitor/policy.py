"""From alarms to decisions, by the roles that alarms carry, never by the names of their rules."""

import copy
import functools
import inspect
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from types import MappingProxyType
from typing import Any, TypeVar

from guardbit.records import STABILIZERS, Alarm, Decision, nearest

F = TypeVar("F", bound=Callable[..., None])
#: By attention module: what its heads are asked to run, and which heads must stay switched.
Asked = Mapping[str, Sequence[str]]
Restless = Mapping[str, Collection[int]]

#: What is switched: the heads that alarms name, all heads of their modules, or of the model.
SCOPES: tuple[str, ...] = ("head", "layer", "model")

#: Steps after an alarm on the whole model in which only a measured cause qualifies heads.
HOLD_STEPS = 5000

#: Steps for which an alarm qualifies a head that could not be switched at once.
RECENT_STEPS = 2000

#: Steps that a switch has to show an effect: in all switched copies of the rescue study the median
#: of the switched heads' logits fell within them (docs/evidence.md).
SETTLING_STEPS = 1500

#: If this many heads of one attention module alarm within WITHIN_STEPS, the whole module counts.
HEADS_OF_ONE_MODULE, WITHIN_STEPS = 3, 1000


def is_whole(number: object, least: int) -> bool:
    return isinstance(number, int) and not isinstance(number, bool) and number >= least


def check_settings(owner: object, must_be: Mapping[str, tuple[Callable[[Any], Any], str]]) -> None:
    """Refuses attributes that fail their test; `must_be` says in words what they must be."""
    for name, (is_right, words) in must_be.items():
        value = getattr(owner, name)
        if not is_right(value):
            raise ValueError(f"{name} is {value!r}; it must be {words}")


def says_what_was_meant(
    init: F,
    signature: inspect.Signature | None = None,
    hint: Callable[[str, Iterable[str]], str] = nearest,
    refusing: Callable[[], AbstractContextManager[None]] = nullcontext,
) -> F:
    """Has a constructor refuse unknown arguments by its own name, and say which one was meant."""
    known = inspect.signature(init) if signature is None else signature

    @functools.wraps(init)
    def checked(self: object, *args: Any, **settings: Any) -> None:
        with refusing():
            try:
                known.bind(self, *args, **settings)
            except TypeError as error:
                # Python refuses the first unknown one.
                unknown = [name for name in settings if name not in known.parameters]
                meant = hint(unknown[0], known.parameters) if unknown else ""
                raise TypeError(f"{type(self).__name__}.__init__() {error}{meant}") from None
        init(self, *args, **settings)

    return checked  # pyright: ignore[reportReturnType]


def is_finite(number: Any) -> bool:
    is_number = isinstance(number, int | float) and not isinstance(number, bool)
    return is_number and abs(number) < float("inf")


_MUST_BE: dict[str, tuple[Callable[[Any], Any], str]] = {
    "stabilizer": (lambda name: name in STABILIZERS[1:], f"one of {', '.join(STABILIZERS[1:])}"),
    "scope": (lambda scope: scope in SCOPES, f"one of {', '.join(SCOPES)}"),
    "always": (lambda flag: isinstance(flag, bool), "True or False"),
    "escalate": (lambda flag: isinstance(flag, bool), "True or False"),
    "quiet_steps": (lambda n: n is None or is_whole(n, 1), "a whole number, at least 1, or None"),
    "on_nonfinite": (lambda how: how in ("keep", "skip"), "keep or skip"),
    "qk_clip": (
        lambda n: n is None or (is_finite(n) and n > 0),
        "a finite number above 0, or None",
    ),
}

#: The attributes that a checkpoint keeps; the first two whatever the scope was.
_STATE = (
    "_model_alarm", "_causes", "_alarmed", "_switched", "_groups", "_since", "_widened", "advice",
    "clipping",
)  # fmt: skip


class Policy:
    """Decides which heads are stabilized.

    >>> from guardbit import HuggingFaceMonitor, Policy
    >>> watch = HuggingFaceMonitor(policy=Policy(scope="model", quiet_steps=2000))

    A head qualifies once a rule has named it, because a needless switch is cheap. For `HOLD_STEPS`
    after the logits of all layers ran away at once, the rule must have measured the cause in it.

    The scope says what is switched when a head qualifies: "head", that head; "layer", all heads of
    its attention module; "model", all heads of the model, including modules that are called later.
    Heads that somebody else has switched are left alone.

    Unless `escalate` is False, the scope widens for good: to the layer once three of its heads are
    alarmed within 1,000 steps; and one wider if a head is alarmed 1,500 steps or more after its
    switch. Once the whole model is switched, `qk_clip` then bounds logits at every sampled step,
    which changes weights; without it, or if it has not helped either, `advice` says so.

    With `quiet_steps` heads go back to "none" once no rule has named one of those switched together
    for that many steps and their logits are small. Heads that are alarmed again stay switched. Make
    it longer than the detectors' cool-down, after which a rule repeats itself. After two of three
    undoings in the rescue study (docs/evidence.md) logits grew again.

    Args:
        stabilizer: What heads are switched to, one of `guardbit.STABILIZERS` except "none". None
            is "exact_delta"; with `always`, where no forward has bits to keep, "compensated", which
            costs about half as much (benchmarks/README.md).
        scope: Which heads, one of `SCOPES`.
        always: Whether to switch all heads at the end of the first step, without an alarm; heads of
            modules that are called later follow at the next sampled step.
        escalate: Whether the scope widens if a switch does not help.
        quiet_steps: Steps without an alarm after which a switch is undone; None for never.
        qk_clip: Largest logit that heads keep once no switch has helped; None never clips. Needs
            `escalate`. MuonClip uses 100 (arXiv 2507.20534).
        on_nonfinite: "skip" leaves out steps whose loss or gradients are not finite, at most 10 in
            a row, which waits for the device once a step; "keep" changes nothing.

    Attributes:
        clipping: Since which step heads are clipped, and why; None as long as they are not.
        advice: What the user should do once no wider switch is left; None before.

    Raises:
        ValueError: If an argument is outside its range, or two of them contradict each other.
    """

    @says_what_was_meant
    def __init__(
        self,
        stabilizer: str | None = None,
        *,
        scope: str = "layer",
        always: bool = False,
        escalate: bool = True,
        quiet_steps: int | None = None,
        qk_clip: float | None = None,
        on_nonfinite: str = "keep",
    ) -> None:
        cheapest = "compensated" if always else "exact_delta"
        self.stabilizer = cheapest if stabilizer is None else stabilizer
        self.scope, self.always = scope, always
        self.escalate, self.quiet_steps, self.qk_clip = escalate, quiet_steps, qk_clip
        self.on_nonfinite = on_nonfinite
        check_settings(self, _MUST_BE)
        if always and quiet_steps is not None:
            raise ValueError(
                f"quiet_steps is {quiet_steps} and always is True: always=True undoes no switch, so"
                " remove one of them"
            )
        if qk_clip is not None and not escalate:
            raise ValueError(
                f"qk_clip is {qk_clip} and escalate is False: heads are clipped once wider switches"
                " have not helped, so remove one of them"
            )
        self.advice: str | None = None
        self.clipping: tuple[int, str] | None = None
        self._model_alarm: int | None = None
        # Names of the rules that have fired and measure the cause.
        self._causes: list[str] = []
        # Site -> head, as text as in JSON -> rule -> step of its last alarm.
        self._alarmed: dict[str, dict[str, dict[str, int]]] = {}
        # Site -> head -> "on" (switched), "undone", "kept" (switched for good), or "taken"
        # (somebody else had switched it when its group was switched).
        self._switched: dict[str, dict[str, str]] = {}
        # The same for groups of heads that are switched together: site, or "" for the model.
        self._groups: dict[str, str] = {}
        # Site -> head -> step since which this policy stabilizes it, or would without a dry run.
        self._since: dict[str, dict[str, int]] = {}
        # Site, or "" for the model -> step and reason of the widening.
        self._widened: dict[str, tuple[int, str]] = {}

    def decide(
        self,
        alarms: Iterable[Alarm],
        step: int,
        stabilizers: Asked,
        restless: Restless = MappingProxyType({}),
    ) -> list[Decision]:
        """Takes the alarms raised since the last call and returns what to do now.

        Each module in `stabilizers`, which says what is asked for in those called so far, gets at
        most one decision to switch heads and one to undo that. `restless` heads stay switched.
        """
        alarms = [alarm for alarm in alarms if not alarm.role.is_advisory]
        for alarm in alarms:
            if alarm.role.judges == "model":
                self._model_alarm = alarm.step
            if alarm.role.measures_cause and alarm.rule not in self._causes:
                self._causes.append(alarm.rule)
            for head in alarm.heads if alarm.role.judges == "head" else ():
                rules = self._alarmed.setdefault(alarm.site, {}).setdefault(str(head), {})
                rules[alarm.rule] = alarm.step
        if self.escalate:
            self._widen(alarms, step)
        why = "from the start (always=True)" if self.always else self._widened.get("", (0, ""))[1]
        if why:
            return list(self._switch_all(step, stabilizers, "kept", why))
        if self.scope == "head":
            return list(self._of_heads(step, stabilizers, restless))
        if self.scope == "model":
            return list(self._of_group("", step, stabilizers, restless))
        return [
            decision
            for site, names in stabilizers.items()
            for decision in self._of_group(site, step, {site: names}, restless)
        ]

    def was_refused(self, site: str, heads: Iterable[int]) -> None:
        """Takes that heads were not switched as decided: of them no effect is expected."""
        for head in heads:
            self._since.get(site, {}).pop(str(head), None)

    @property
    def is_due(self) -> bool:
        """Whether heads must be switched without waiting for a sample."""
        return self.always and not self._switched

    @property
    def remedy(self) -> str:
        """How to train from an earlier checkpoint where no switch has helped."""
        lower = "at a lower learning rate"
        return lower if self.always else f"with always=True, or {lower}"

    def state_dict(self) -> dict[str, Any]:
        """Returns all that is remembered, as plain dicts, lists, numbers, texts and None."""
        return copy.deepcopy({"kind": self._kind, **{name: vars(self)[name] for name in _STATE}})

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on from a `state_dict`; of another scope only alarms on the model are taken over."""
        state = copy.deepcopy(state)
        for name in _STATE if state["kind"] == self._kind else _STATE[:2]:
            setattr(self, name, state[name])
        if self.qk_clip is None:
            self.clipping = None

    @property
    def _kind(self) -> str:
        return "always" if self.always else self.scope

    def _widen(self, alarms: Iterable[Alarm], step: int) -> None:
        """Widens what is switched by the alarms of this step, where it has not been enough."""
        for alarm in alarms:
            if alarm.role.judges != "head":
                continue
            known = self._alarmed.get(alarm.site, {})  # none if the alarm names no head
            since = self._since.get(alarm.site, {})
            qualified = [head for head in alarm.heads if self._reasons(known[str(head)], step)]
            lasting = {head: alarm.step - since.get(str(head), alarm.step) for head in qualified}
            if again := [head for head in qualified if lasting[head] >= SETTLING_STEPS]:
                self._widen_from(alarm, again[0], step, lasting[again[0]])
            elif qualified and self.scope == "head" and not self.always:
                recent = [
                    head
                    for head, rules in known.items()
                    if any(at >= alarm.step - WITHIN_STEPS for at in rules.values())
                ]
                if len(recent) >= HEADS_OF_ONE_MODULE and alarm.site not in self._widened:
                    why = (
                        f"{len(recent)} heads of {alarm.site} are alarmed within {WITHIN_STEPS:,}"
                        " steps, so all of its heads are switched"
                    )
                    self._widened[alarm.site] = step, why

    def _widen_from(self, alarm: Alarm, head: int, step: int, lasting: int) -> None:
        """Goes one step wider than what a head was switched with, once that has settled."""
        why = (
            f"head {head} of {alarm.site} is alarmed {lasting:,} steps after it was asked to run"
            f" {self.stabilizer}"
        )
        if self.always or self.scope == "model" or "" in self._widened:
            last, _ = self.clipping or self._widened.get("", (-SETTLING_STEPS, ""))
            if alarm.step - last < SETTLING_STEPS or self.advice is not None:
                return
            no_help = self._all_did_not_help(f"head {head} of {alarm.site}")
            if self.qk_clip is not None and self.clipping is None:
                self.clipping = step, no_help
            else:
                self.advice = no_help
        elif self.scope == "head" and alarm.site not in self._widened:
            self._widened[alarm.site] = step, f"{why}, so all of its layer's heads are switched"
        else:
            last, _ = self._widened.get(alarm.site, (-SETTLING_STEPS, ""))
            if alarm.step - last >= SETTLING_STEPS:
                self._widened[""] = step, f"{why}, so all heads of the model are switched"

    def _all_did_not_help(self, head: str) -> str:
        last = max(step for steps in self._since.values() for step in steps.values())
        clipped = (
            f", their logits are clipped since step {self.clipping[0]}" if self.clipping else ""
        )
        return (
            f"all heads that could be switched were asked to run {self.stabilizer} from step"
            f" {last} on{clipped}, and {head} is alarmed again"
        )

    def _of_heads(self, step: int, stabilizers: Asked, restless: Restless) -> Iterator[Decision]:
        for site, names in stabilizers.items():
            if site not in self._alarmed:
                continue
            if site in self._widened:
                yield from self._switch_all(step, {site: names}, "kept", self._widened[site][1])
                continue
            states = self._switched.setdefault(site, {})
            taken = {str(head) for head, name in enumerate(names) if name != "none"}
            switch, undo, reasons = [], [], set()
            for head, rules in self._alarmed[site].items():
                state = states.get(head)
                if state in (None, "undone"):
                    if head in taken:
                        rules.clear()  # should it be free again, old alarms do not count
                    elif why := self._reasons(rules, step):
                        states[head] = "on" if state is None else "kept"
                        switch.append(head)
                        reasons |= why
                elif (
                    state == "on"
                    and self._is_quiet([rules], step)
                    and int(head) not in restless.get(site, ())
                ):
                    states[head] = "undone"
                    rules.clear()
                    undo.append(head)
            if switch:
                yield self._switch(step, site, switch, f"alarmed by {', '.join(sorted(reasons))}")
            if undo:
                yield self._undo(step, site, undo)

    def _of_group(
        self, group: str, step: int, stabilizers: Asked, restless: Restless
    ) -> Iterator[Decision]:
        """Decides about heads that are switched, and switched back, together."""
        sites = [group] if group else list(self._alarmed)
        alarmed = [rules for site in sites for rules in self._alarmed.get(site, {}).values()]
        what = f"the heads of {group} are" if group else "the model is"
        state, why = self._groups.get(group, ""), f"{what} switched"
        are_restless = any(
            int(head) in restless.get(site, ())
            for site in sites
            for head in self._switched.get(site, ())
        )
        if state == "on" and self._is_quiet(alarmed, step) and not are_restless:
            state = self._groups[group] = "undone"
            for rules in alarmed:
                rules.clear()
        if state in ("", "undone"):
            # After a resumption some modules are called long after the undoing. By then
            # `quiet_steps` may be None, and nothing more is undone.
            for site in [site for site in stabilizers if site in self._switched]:
                heads = self._switched.pop(site)
                if self.quiet_steps is not None:
                    yield self._undo(step, site, [h for h in heads if heads[h] != "taken"])
            reasons = set().union(*(self._reasons(rules, step) for rules in alarmed))
            state = "kept" if state else "on"
            why = f"a head alarmed by {', '.join(sorted(reasons))}"
            if not reasons or not any("none" in names for names in stabilizers.values()):
                return
        self._groups[group] = state
        yield from self._switch_all(step, stabilizers, state, why)

    def _switch_all(
        self, step: int, stabilizers: Asked, state: str, why: str
    ) -> Iterator[Decision]:
        """Switches the heads of some modules, except those known already or taken."""
        for site, names in stabilizers.items():
            known = self._switched.setdefault(site, {})
            is_wider = site in self._widened or "" in self._widened
            unknown = (None, "undone") if is_wider else (None,)
            new = {str(h): name for h, name in enumerate(names) if known.get(str(h)) in unknown}
            known.update({h: state if name == "none" else "taken" for h, name in new.items()})
            if switch := [head for head, name in new.items() if name == "none"]:
                yield self._switch(step, site, switch, why)

    def _switch(self, step: int, site: str, heads: Collection[str], why: str) -> Decision:
        self._since.setdefault(site, {}).update({head: step for head in heads})
        return Decision(step, site, _ascending(heads), self.stabilizer, why)

    def _undo(self, step: int, site: str, heads: Collection[str]) -> Decision:
        for head in heads:
            self._since.get(site, {}).pop(head, None)
        why = f"no alarm for {self.quiet_steps} steps"
        return Decision(step, site, _ascending(heads), "none", why)

    def _reasons(self, rules: dict[str, int], step: int) -> set[str]:
        """Returns the rules that have named a head lately; empty if it does not qualify."""
        recent = {rule for rule, at in rules.items() if step - at <= RECENT_STEPS}
        if self._model_alarm is None or recent.intersection(self._causes):
            return recent
        return set() if step - self._model_alarm < HOLD_STEPS else recent

    def _is_quiet(self, alarmed: Iterable[dict[str, int]], step: int) -> bool:
        last = max(at for rules in alarmed for at in rules.values())
        return self.quiet_steps is not None and step - last >= self.quiet_steps


def _ascending(heads: Iterable[str]) -> tuple[int, ...]:
    return tuple(sorted(map(int, heads)))
