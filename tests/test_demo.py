"""What `guardbit demo` prints of a run; the run itself is tried by hand."""

import sys
from pathlib import Path

from typer.testing import CliRunner

import guardbit
from guardbit.cli import app
from guardbit.monitor.replay import replay
from guardbit.store import read_events, read_metadata, read_run

RECORDED = Path(guardbit.__file__).parent / "recorded"


def test_the_switched_run_is_a_copy_that_was_switched_and_alarms_are_those_of_todays_rules(
    monkeypatch,
):
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
    # It has its test.
    monkeypatch.setattr(sys.modules["guardbit.cli"], "_show_recorded", lambda folder: None)
    said = " ".join(CliRunner().invoke(app, ["demo", "--recorded"]).stdout.split())
    assert (
        "a copy of lost from step 4,000 on" in said
        and "at step 6,750, when the rules of that time first" in said
    )
