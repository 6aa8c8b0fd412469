"""A recorded finding says what its rule judges."""

import pytest

from guardbit.monitor.detectors import DEFAULT_RULES, role_of
from guardbit.records import SUBJECTS, Alarm, Role, event_of


@pytest.mark.parametrize("judges", SUBJECTS)
def test_an_alarm_is_recorded_with_what_it_judges(judges):
    alarm = Alarm(7, "h.0", (1,), "my_own", "It grew", Role(judges))
    event = event_of(alarm, ", though it runs exact_delta")
    assert (event.kind, event.rule, event.judges) == ("alarm", "my_own", judges)
    assert event.why == "It grew, though it runs exact_delta"


def test_an_advisory_is_none_of_the_alarms():
    assert event_of(Alarm(7, "h.0", (1,), "r", "w", Role(is_advisory=True))).kind == "advisory"


#: What rules judge.
JUDGED = {
    "common_mode": "head",
    "head_growth": "head",
    "gradient_error": "head",
    "model_logits": "model",
    "loss_departure": "loss",
}


def test_the_rules_have_these_roles():
    assert {rule.name: role_of(rule).judges for rule in DEFAULT_RULES}.items() >= JUDGED.items()
