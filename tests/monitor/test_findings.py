"""What a rule has found is recorded with what it judges."""

import pytest

from guardbit.monitor.detectors import DEFAULT_RULES, role_of
from guardbit.monitor.findings import event_of
from guardbit.records import SUBJECTS, Alarm, Role
from guardbit.store.migration import migrated


@pytest.mark.parametrize("judges", SUBJECTS)
def test_an_alarm_is_recorded_with_what_it_judges(judges):
    alarm = Alarm(7, "h.0", (1,), "my_own", "It grew", Role(judges))
    event = event_of(alarm, ", though it runs exact_delta")
    assert (event.kind, event.rule, event.judges) == ("alarm", "my_own", judges)
    assert event.why == "It grew, though it runs exact_delta"


def test_an_advisory_is_none_of_the_alarms():
    assert event_of(Alarm(7, "h.0", (1,), "r", "w", Role(is_advisory=True))).kind == "advisory"


#: The rules whose alarms did not say what they judge; a rule that came later has none of these.
JUDGED = {
    "common_mode": "head",
    "head_growth": "head",
    "gradient_error": "head",
    "model_logits": "model",
    "loss_departure": "loss",
}


def test_earlier_versions_are_migrated_to_the_roles_that_the_rules_have():
    for rule, judges in JUDGED.items():
        assert migrated({"kind": "alarm", "rule": rule, "verdict": ""})["judges"] == judges
    assert {rule.name: role_of(rule).judges for rule in DEFAULT_RULES}.items() >= JUDGED.items()
