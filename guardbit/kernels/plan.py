"""Decides what each head of a call runs: the stabilizer it is asked for, or a substitute.

An engine's backward serves all heads in one launch if it is proved to read O for delta only
(`guardbit.kernels.engines.proof`). A stabilized head then hands it an O' that carries the delta to
use.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple

from torch import Tensor

from guardbit.kernels import dispatch
from guardbit.kernels.attention_call import Call
from guardbit.kernels.engines import Engine
from guardbit.kernels.engines.proof import proof_of
from guardbit.kernels.key_shifts import KEY_SHIFTS
from guardbit.kernels.spec import AttentionSpec


def _exact(*tensors: Tensor, **how: Any) -> Tensor:
    return dispatch.carry_exact_delta(*tensors, **how).out


#: Stabilizer -> what writes the O' with its delta: see `reference.carry_exact_delta` for the
#: arguments; returns O'. A row that sees no key, or whose delta is not finite, keeps its O.
DELTAS: dict[str, Callable[..., Tensor]] = {"exact_delta": _exact}

#: The stabilizers that need our forward. With the others the engine's forward runs.
OWN_FORWARD = frozenset({"compensated", "row_max"})


class Plan(NamedTuple):
    """What the heads of a call run.

    Attributes:
        names: One stabilizer a head.
        own: The heads whose forward our kernel computes.
        deltas: Those of `DELTAS` that run, each with the heads whose backward gets it.
        compensated: The heads whose forward keeps the rounding residual of O.
    """

    names: tuple[str, ...]
    own: tuple[int, ...]
    deltas: tuple[tuple[str, tuple[int, ...]], ...]
    compensated: tuple[int, ...]

    @property
    def own_names(self) -> tuple[str, ...]:
        """The stabilizer of each head in `own`, as our kernels know it."""
        names = (self.names[head] for head in self.own)
        return tuple(name if name in OWN_FORWARD else "none" for name in names)


@lru_cache(maxsize=1024)
def plan_of(names: tuple[str, ...], native: bool) -> Plan:
    """Groups the heads of a call by what they run."""

    def heads(*kinds: str) -> tuple[int, ...]:
        return tuple(head for head, name in enumerate(names) if name in kinds)

    own = heads(*OWN_FORWARD) if native else tuple(range(len(names)))
    deltas = tuple((name, heads(name)) for name in DELTAS if name in names)
    return Plan(names, own, deltas, heads("compensated"))


def resolve(
    call: Call, asked: tuple[str, ...], engine: Engine | None, keeps_residual: bool
) -> tuple[tuple[str, ...], bool, str]:
    """Settles what each head runs, with a substitute where a stabilizer cannot run in this call."""
    if engine is None and call.spec.extras:
        raise ValueError(f"GuardBit's own kernels take {_none_of(call.spec.extras)}.")
    asked, unshifted = _without_shifts(call.spec, asked)
    names, shared, why = _resolved(call, asked, engine, keeps_residual)
    return names, shared, "; ".join(filter(None, (unshifted, why)))


def _without_shifts(spec: AttentionSpec, asked: tuple[str, ...]) -> tuple[tuple[str, ...], str]:
    """Replaces shifts of the keys where they would change the result, and says why, or ""."""
    seeing = [field for field in spec.extras if field in ("soft cap", "sinks")]
    shifts = [name for name in KEY_SHIFTS if name in asked]
    if not seeing or not shifts:
        return asked, ""
    names = tuple("none" if name in shifts else name for name in asked)
    what = f"{' and '.join(shifts)} would change what the softmax makes of {' and '.join(seeing)}"
    return names, what


def _resolved(
    call: Call, asked: tuple[str, ...], engine: Engine | None, keeps_residual: bool
) -> tuple[tuple[str, ...], bool, str]:
    """Does what `resolve` says, after its checks."""
    beyond_ours = _beyond_ours(call)
    stabilized = set(asked) - {"none", *KEY_SHIFTS}
    if not stabilized:
        return asked, False, ""
    if engine is None:
        deltas = [name for name in DELTAS if name in asked]
        if call.spec.dropout_p == 0 or not deltas:
            return asked, False, ""
        # Our backward knows what our forward dropped, and its compensated delta is as exact.
        names = tuple("compensated" if name in deltas else name for name in asked)
        why = (f"compensated runs instead of {name}, which knows no dropout" for name in deltas)
        return names, False, "; ".join(why)
    if call.spec.dropout_p > 0:
        shared = False
        obstacle = (
            f"{engine.title} drops entries of P (dropout {call.spec.dropout_p}) and"
            " does not tell which, so delta cannot be computed again"
        )
    else:
        proof = proof_of(engine, call.q, call.k, call.v, call.spec, call.wants_mask)
        shared = not proof.failure
        is_plain = call.library is None and not beyond_ours
        if shared and (stabilized <= DELTAS.keys() or (keeps_residual and is_plain)):
            return asked, True, ""
        obstacle = f"{engine.title} ({proof.configuration}): {proof.failure}"
    ours, takes = "take it" if keeps_residual else "have no room", ""
    if beyond_ours:
        ours, takes = "refuse", f"takes {_none_of(beyond_ours)}"
    if call.library is not None:
        ours, takes = "refuse", f"does not take the place of {call.library.title}"
    settled: dict[str, tuple[str, str]] = {}
    for name in dict.fromkeys(asked):
        kind = "a delta" if name in DELTAS else name
        runs, why = _SUBSTITUTES.get((kind, shared, ours), (name, ""))
        settled[name] = runs, why.format(name=name, takes=takes, obstacle=obstacle)
    why = "; ".join(reason for _, reason in settled.values() if reason)
    return tuple(settled[name][0] for name in asked), shared, why


#: What is asked for, whether the engine's backward takes another delta, and what our kernels say of
#: the call ("have no room": in the compiled graph, for the residual) -> what runs instead, and why.
#: What is not listed runs as it is asked for.
_SUBSTITUTES = {
    ("a delta", False, "take it"): (
        "compensated", "compensated runs instead of {name}: {obstacle}",
    ),
    ("a delta", False, "have no room"): ("none", "{name} is not possible: {obstacle}"),
    ("a delta", False, "refuse"): (
        "none", "{name} is not possible: {obstacle}; no kernel takes its place",
    ),
    ("compensated", True, "have no room"): (
        "exact_delta",
        "exact_delta runs instead of compensated, for which the compiled graph has no room",
    ),
    ("compensated", False, "have no room"): (
        "none", "the compiled graph has no room for compensated, and {obstacle}",
    ),
    ("compensated", True, "refuse"): (
        "exact_delta", "exact_delta runs instead of compensated, which {takes}",
    ),
    ("compensated", False, "refuse"): (
        "none", "{name} {takes}, and exact_delta is not possible: {obstacle}",
    ),
    ("row_max", True, "refuse"): ("none", "{name} {takes}: exact_delta would work"),
    ("row_max", False, "refuse"): (
        "none", "{name} {takes}, and exact_delta is not possible: {obstacle}",
    ),
}  # fmt: skip


def _beyond_ours(call: Call) -> tuple[str, ...]:
    """What a call asks for that our own kernels do not take."""
    has_other_width = call.q.size(3) != call.v.size(3)
    return (
        *(["mask"] if call.spec.mask is not None else []),
        *call.spec.extras,
        *(["values of another head size than keys"] if has_other_width else []),
    )


def _none_of(fields: tuple[str, ...]) -> str:
    """Returns words such as "no mask" or "no mask, no window"."""
    return ", ".join(f"no {field}" for field in fields)
