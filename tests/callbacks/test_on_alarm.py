"""A function of the user's is called with each alarm, and cannot end a run."""

import pytest

from guardbit import AttentionMonitor, HuggingFaceMonitor, MonitorSession, read_events
from tests.callbacks.monitoring.reading import SITES
from tests.toys import Fires

#: Names the first head, and at the next sample the second.
RULES = tuple(
    Fires(SITES[1], (head,), sample=head + 1, why=f"sentence {head}", name=f"rule {head}")
    for head in (0, 1)
)

# Users do not turn warnings into errors, and Lightning gives some.
pytestmark = pytest.mark.filterwarnings("ignore")


def test_each_alarm_is_handed_over_once_it_is_recorded(trains, tmp_path):
    told = []

    def tell(alarm):
        recorded = read_events(tmp_path / "run")
        told.append((alarm.step, alarm.site, alarm.heads, alarm.why.partition(";")[0]))
        assert alarm.why in set(recorded["why"])

    monitor = AttentionMonitor(1, dirpath=tmp_path / "run", rules=RULES, on_alarm=tell, strict=True)
    trains.fit(monitor, max_steps=2)
    assert told == [(step, SITES[1], (step,), f"sentence {step}") for step in (0, 1)]


def test_errors_of_the_function_end_nothing_and_are_told_once(trains, tmp_path, caplog):
    calls = []

    def fails(alarm):
        calls.append(alarm.step)
        raise RuntimeError("no network")

    monitor = AttentionMonitor(
        1, dirpath=tmp_path / "run", rules=RULES, on_alarm=fails, strict=True
    )
    trains.fit(monitor, max_steps=2)
    assert calls == [0, 1], "the next alarm may get through"
    events = read_events(tmp_path / "run")
    errors = events.loc[events["kind"] == "monitor_error", "why"].tolist()
    (error,) = errors
    assert error.startswith("on_alarm failed") and "no network" in error
    assert caplog.text.count("no network") == 1
    assert list(events["kind"]).count("alarm") == 2


@pytest.mark.parametrize("entry", [AttentionMonitor, HuggingFaceMonitor, MonitorSession])
@pytest.mark.parametrize("on_alarm", ["mail", lambda: None, lambda alarm, how: None])
def test_what_cannot_take_one_alarm_is_refused(entry, on_alarm):
    model = [object()] if entry is MonitorSession else []
    with pytest.raises(ValueError, match=r"^on_alarm is .*; it must be a function of one alarm"):
        entry(*model, on_alarm=on_alarm)


@pytest.mark.parametrize("on_alarm", [print, [].append, lambda alarm, how="mail": None, str])
def test_whatever_takes_one_alarm_will_do(on_alarm):
    assert AttentionMonitor(on_alarm=on_alarm).settings.on_alarm is on_alarm
