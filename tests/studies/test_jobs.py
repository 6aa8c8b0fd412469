"""What starts, watches and ends runs of the study."""

import pytest

from guardbit.records import Event
from guardbit.store import RunWriter
from studies.rescue.jobs import chosen, first_alarm, out_of_it


@pytest.mark.parametrize(
    ("alarms", "at", "most", "expected"),
    [
        # One is enough: those past its alarm are too late, one before it may still be first.
        ({1: 4100, 3: None, 5: None}, {1: 4500, 3: 4200, 5: 4000}, 1, {3}),
        ({1: 4100, 3: None, 5: None}, {1: 4500, 3: 4100, 5: 4100}, 1, set()),
        ({1: 4100, 3: 3000}, {1: 4500, 3: 4200}, 1, {1}),
        # Two are asked for: the later one of them counts.
        ({1: 4100, 3: 3000, 5: None}, {1: 4500, 3: 4200, 5: 4050}, 2, set()),
        ({1: 4100, 3: 3000, 5: None}, {1: 4500, 3: 4200, 5: 4200}, 2, {5}),
        # Fewer are found: whoever has no alarm by step 6,400 is out.
        ({1: 4100, 3: None, 5: None}, {1: 6500, 3: 6500, 5: 6400}, 2, {3}),
        ({1: None, 3: None}, {1: 0, 3: 6400}, 1, set()),
    ],
)
def test_starts_end_when_an_alarm_would_be_too_late(alarms, at, most, expected):
    assert out_of_it(alarms, at, most) == expected


def test_only_alarms_of_heads_count(tmp_path):
    with RunWriter(tmp_path / "run") as writer:
        writer.event(Event(step=500, kind="alarm", site="", heads=(), why="all logits grow"))
        writer.event(Event(step=900, kind="alarm", site="h.2", heads=[0], why="it grew"))
        writer.event(Event(step=700, kind="advisory", site="h.2", heads=[0], why="keys are alike"))
    assert first_alarm(tmp_path / "run") == 900
    assert first_alarm(tmp_path / "run", 900) == 900
    assert first_alarm(tmp_path / "run", 899) is None


@pytest.mark.parametrize(
    ("alarms", "most", "expected"),
    [
        ({4: 300, 2: 100, 9: None, 7: 100}, 3, [2, 7, 4]),
        ({4: 300, 2: 100, 9: None, 7: 100}, 1, [2]),
        ({9: None}, 3, []),
    ],
)
def test_first_alarmed_first(alarms, most, expected):
    assert chosen(alarms, most) == expected
