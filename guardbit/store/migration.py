"""Turns the events of earlier versions into those of this one, when they are read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

#: What the rules that judged anything but single heads judged, while alarms did not say it.
_JUDGED = {"loss_departure": "loss", "model_logits": "model"}
#: The kinds of events that a rule makes.
_OF_RULES = ("alarm", "advisory")


def migrated(event: Mapping[str, Any]) -> dict[str, Any]:
    """Returns an event with the fields that this version writes.

    Events without the field `verdict` come from an early version. It wrote the verdict as `rule`,
    and a switch that was refused as a switch without a stabilizer. Events without the field
    `judges` come from a later one, whose alarms said what they judge by their rule alone.

    Args:
        event: The fields of one event. Fields that are missing stay missing.
    """
    return _with_judges(_with_verdict(dict(event)))


def _with_verdict(event: dict[str, Any]) -> dict[str, Any]:
    if "verdict" in event:
        return event
    kind, rule = event.get("kind"), event.get("rule", "")
    if kind == "verdict":
        return {**event, "rule": "", "verdict": rule}
    if kind == "switch" and event.get("stabilizer") == "":
        return {**event, "kind": "refusal", "verdict": ""}
    return {**event, "verdict": ""}


def _with_judges(event: dict[str, Any]) -> dict[str, Any]:
    if "judges" in event:
        return event
    rule = event.get("rule", "")
    is_of_rule = event.get("kind") in _OF_RULES and rule
    return {**event, "judges": _JUDGED.get(rule, "head") if is_of_rule else ""}
