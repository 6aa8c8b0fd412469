"""What `guardbit demo` prints of a run; the run itself is tried by hand."""

import json
import sys
from pathlib import Path

from typer.testing import CliRunner

import guardbit
from guardbit.cli import app
from guardbit.cli.demo import WHICH_IS_WHICH
from guardbit.store import read_events, read_metadata, read_run

RECORDED = Path(guardbit.__file__).parent / "recorded"


def test_the_recorded_demo_says_why_other_commands_have_other_dates():
    def asked(*arguments):
        result = CliRunner().invoke(app, [*map(str, arguments)])
        assert result.exit_code == 0
        return result.stdout

    report = json.loads(asked("report", RECORDED / "lost", "--json"))
    assert f"a lead of {report['lead']:,} steps, to the alarm on its own loss" in WHICH_IS_WHICH
    replay = json.loads(asked("replay", RECORDED / "lost", "--json"))
    first, _, lead = WHICH_IS_WHICH.partition("first alarm at step ")[2].partition(", lead ")
    assert first == f"{replay['first_alarm']:,}"
    assert f"{lead.rstrip('.')} steps after the first alarm" in asked("replay", RECORDED / "lost")


def test_the_saved_run_is_a_copy_that_was_switched_at_its_own_alarm(monkeypatch):
    events = read_events(RECORDED / "saved")
    alarm, switch = (events[events.kind == kind].iloc[0] for kind in ("alarm", "switch"))
    assert (alarm.step, alarm.site, alarm.heads) == (6750, "net.h.2.attn", (11,))
    assert switch.step == alarm.step
    branched = read_metadata(RECORDED / "saved")["study"]["branched_from"]
    assert branched.endswith("stock-cudnn-lr1.5e-03-seed10/step=4000.ckpt")
    frames = [read_run(RECORDED / name) for name in ("lost", "saved")]
    losses = [frame[frame.indicator == "loss"].set_index("step").value for frame in frames]
    apart = (losses[0] - losses[1]).dropna().abs()
    assert apart.loc[:4000].max() == 0 < apart.loc[4000:6750].max() < 0.05 < apart.loc[6750:].max()
    # It has its test.
    monkeypatch.setattr(sys.modules["guardbit.cli.demo"], "_show_recorded", lambda folder: None)
    said = " ".join(CliRunner().invoke(app, ["demo", "--recorded"]).stdout.split())
    assert "a copy of lost from step 4,000 on" in said
    assert "its own first alarm, at step 6,750 in layer 2, head 11" in said
