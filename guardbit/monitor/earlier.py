"""Turns states that earlier versions have put into checkpoints into those of this version."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

from guardbit.records import Alarm, Role, Subject

#: The only rule that measured a cause when states did not yet say which rules do.
_CAUSES = ["delta_bias"]


def role_named(name: str) -> Role:
    """Returns the role that was written as one word; "cause" meant heads, judged by the cause."""
    return Role("head", True) if name == "cause" else Role(cast(Subject, name))


def alarm_of(fields: Sequence[Any], roles: Mapping[str, Role]) -> Alarm:
    """Returns an alarm from its fields.

    Args:
        fields: Those of `Alarm` in their order. The role may be written as one word or be missing.
        roles: Rule -> its role, for alarms that have none.
    """
    step, site, heads, rule, why, *rest = fields
    if not rest:
        role = roles.get(rule, Role())
    elif isinstance(rest[0], str):
        role = role_named(rest[0])
    else:
        role = Role(*rest[0])
    return Alarm(step, site, tuple(heads), rule, why, role)


def policy_state(state: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the state of a policy with all keys that this version writes.

    The first states did not say which rules measure the cause, and knew no groups but the model.
    Later ones knew no widening, then no clipping.
    """
    return {
        "causes": _CAUSES,
        "groups": {"": state.get("model", "")},
        "since": {},
        "widened": {},
        "advice": None,
        "clipping": None,
        **state,
    }
