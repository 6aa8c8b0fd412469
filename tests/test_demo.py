"""The recorded runs that `guardbit demo` shows; the run that it makes is tried by hand."""

from pathlib import Path

import guardbit
from guardbit.monitor.replay import replay
from guardbit.store import read_events, read_metadata, read_run

RECORDED = Path(guardbit.__file__).parent / "recorded"


def test_the_switched_run_is_a_copy_that_was_switched_and_alarms_are_those_of_todays_rules():
    events = read_events(RECORDED / "switched")
    assert set(events[events.kind == "switch"].step) == {6750}
    for name in ("lost", "switched"):
        events = read_events(RECORDED / name)
        recorded = [(e.step, e.rule, e.heads) for e in events.itertuples() if e.kind == "alarm"]
        found = replay(read_run(RECORDED / name)).alarms
        assert recorded == [(alarm.step, alarm.rule, alarm.heads) for alarm in found]
    branched = read_metadata(RECORDED / "switched")["study"]["branched_from"]
    assert branched.endswith("stock-cudnn-lr1.5e-03-seed10/step=4000.ckpt")
    frames = [read_run(RECORDED / name) for name in ("lost", "switched")]
    losses = [frame[frame.indicator == "loss"].set_index("step").value for frame in frames]
    apart = (losses[0] - losses[1]).dropna().abs()
    assert apart.loc[:4000].max() == 0 < apart.loc[4000:6750].max() < 0.05 < apart.loc[6750:].max()
