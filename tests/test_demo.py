"""What `guardbit demo` shows: the runs that it makes, and the recorded ones."""

import re
from pathlib import Path

from typer.testing import CliRunner

import guardbit
from guardbit import demo
from guardbit.cli import RUNS, WHICH_IS_WHICH, app
from guardbit.monitor.replay import replay
from guardbit.store import RunWriter, read_events, read_run

RECORDED = Path(guardbit.__file__).parent / "recorded"


def of_run(name, indicator="loss"):
    frame = read_run(RECORDED / name)
    return frame[frame.indicator == indicator].set_index("step").value


def test_recorded_copies_are_one_run_up_to_their_step_and_end_as_it_is_said():
    copies = {name: of_run(name) for name in RUNS if name != "lost"}
    assert all(loss.loc[:3900].equals(copies["watched"].loc[:3900]) for loss in copies.values())
    ends = {name: loss.loc[9000:].mean() for name, loss in copies.items()}
    guarded = (ends["guarded"] + ends["guarded-again"]) / 2
    above = [f"{ends[name] - guarded:.3f}" for name in ("watched", "watched-again")]
    assert f"{above[0]} and {above[1]} above that of the guarded" in WHICH_IS_WHICH
    for name in copies:
        events = read_events(RECORDED / name)
        alarm = events[events.kind == "alarm"].step.min()
        switched = set(events[events.kind == "switch"].step)
        assert switched == ({alarm + 1} if name.startswith("guarded") else set())
        # Thinned, they are still alarmed at these steps.
        assert min(one.step for one in replay(read_run(RECORDED / name)).alarms) == alarm > 3900


def test_alarms_of_the_lost_run_are_those_of_todays_rules():
    events = read_events(RECORDED / "lost")
    recorded = [(e.step, e.rule, e.heads) for e in events.itertuples() if e.kind == "alarm"]
    found = replay(read_run(RECORDED / "lost")).alarms
    assert recorded == [(alarm.step, alarm.rule, alarm.heads) for alarm in found]


def masked(text):
    """A text without its numbers and breaks."""
    return " ".join(re.sub(r"\d[\d.]*", "N", text).split())


def test_only_the_corrected_run_loses_the_error_of_its_head(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(demo, "NUM_STEPS", 110)
    monkeypatch.chdir(tmp_path)
    tmp_path /= "runs/demo"
    RunWriter(tmp_path / "corrected").close("finished")  # an earlier demo's
    result = CliRunner().invoke(app, ["demo"])
    assert result.exit_code == 0, result.output
    assert not any("already holds" in line for line in caplog.messages)
    corrected, alone = (read_events(tmp_path / name) for name in ("corrected", "left-alone"))
    for events in (corrected, alone):
        first = events[events.kind == "alarm"].iloc[0]
        assert (first.step, first.site) == (70, demo.BAD_SITE) and first.heads == (demo.BAD_HEAD,)
    switches = [set(events[events.kind == "switch"].step) for events in (corrected, alone)]
    assert switches == [{70}, set()]
    # README shows what the log says, but for numbers that the processor's sums change.
    page = Path(guardbit.__file__).parents[1].joinpath("README.md").read_text(encoding="utf-8")
    block = re.findall(r"```\n(GuardBit: .*?)```", page, re.DOTALL)[0]
    shown = {masked(one) for one in re.split(r"\n(?=GuardBit:)", block)}
    assert len(shown) == 2 and shown <= set(map(masked, caplog.messages))
    # Measured: 2 % and 600 %; without AVX-512 1 % and 160 %.
    least, most = map(float, re.findall(r"([\d.]+)% in the", " ".join(result.output.split())))
    assert least < 30 and most > 60
    assert result.output.startswith("\nA small GPT") and "half a minute" in result.output
    assert (tmp_path / "report.html").is_file() and "runs/demo/report.html" in result.output
    assert "guardbit live runs/demo" in result.output
    frames = [read_run(tmp_path / name) for name in ("corrected", "left-alone")]
    losses = [frame[frame.indicator == "loss"].set_index("step").value for frame in frames]
    assert (losses[0] == losses[1]).loc[:70].all() and (losses[0] != losses[1]).loc[71:].any()
