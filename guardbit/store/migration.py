"""Turns the events of earlier versions into those of this one, when they are read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def migrated(event: Mapping[str, Any]) -> dict[str, Any]:
    """Returns an event with the fields that this version writes.

    Events without the field `verdict` come from an earlier version. It wrote the verdict as `rule`,
    and a switch that was refused as a switch without a stabilizer.

    Args:
        event: The fields of one event. Fields that are missing stay missing.
    """
    if "verdict" in event:
        return dict(event)
    kind, rule = event.get("kind"), event.get("rule", "")
    if kind == "verdict":
        return {**event, "rule": "", "verdict": rule}
    if kind == "switch" and event.get("stabilizer") == "":
        return {**event, "kind": "refusal", "verdict": ""}
    return {**event, "verdict": ""}
