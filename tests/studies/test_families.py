"""The order of starts, copies and pushes, with processes that only write what runs would."""

import argparse
import json
import sys

import pytest

from guardbit.records import Event
from guardbit.store import RunWriter
from studies.rescue import families, jobs

#: Stands in for `train.py` and `push.py`: notes its arguments, and takes a prepared run's place.
STAND_IN = """
import json, pathlib, shutil, sys, time
prepared, module, *arguments = sys.argv[1:]
prepared = pathlib.Path(prepared)
with open(prepared / "calls.jsonl", "a") as file:
    file.write(json.dumps([module, *arguments]) + "\\n")
given = dict(zip(arguments[::2], arguments[1::2])) if module == "train" else {}
if module == "train" and "--branch" not in arguments:
    name = f"stock-cudnn-lr1.5e-03-seed{given['--seed']}-again{given['--again']}"
    run = pathlib.Path(given["--folder"]) / name
    shutil.copytree(prepared / given["--seed"], run)
    (run / "clock.csv").write_text("6400,1.0\\n6500,2.0\\n")
    if (run / "early").exists():
        (run / "clock.csv").write_text("5100,1.0\\n")
    time.sleep(600 if (run / "sleeps").exists() else 0)
elif module == "train":
    at = arguments.index
    arm, again = arguments[at("--arm") + 1], arguments[at("--again") + 1]
    folder = pathlib.Path(arguments[at("--folder") + 1])
    seed = arguments[at("--seed") + 1]
    origin = folder / f"stock-cudnn-lr1.5e-03-seed{seed}-again{again}"
    assert (origin / "step=6400.ckpt").exists() and not list(origin.glob("step=4*"))
    (folder / f"{arm}-{'-'.join(arguments[at('--arm') + 2:])}-seed{seed}-from6400").mkdir()
"""


@pytest.fixture
def prepared(tmp_path):
    folder = tmp_path / "prepared"
    folder.mkdir()
    for seed, alarms in {1: [5000, 4100], 3: [], 5: [6450], 8: [3200]}.items():
        with RunWriter(folder / str(seed)) as writer:
            for step in alarms:
                writer.event(Event(step=step, kind="alarm", site="h.2", heads=[0], why="it grew"))
        for step in (2400, 3200, 4000, 4800, 6400):
            (folder / str(seed) / f"step={step}.ckpt").touch()
    return folder


def command_of(prepared):
    script = prepared / "stand_in.py"
    script.write_text(STAND_IN)
    return lambda module, arguments: [
        sys.executable, str(script), str(prepared), module, *arguments
    ]  # fmt: skip


def options_of(tmp_path, **changes):
    given = {
        "seeds": [1, 3, 5, 8], "again": 12, "most": 3, "steps": 7600, "push_steps": 400, "slots": 4,
        "minutes": 2.0, "folder": tmp_path / "runs", "corpus": tmp_path / "corpus",
    }  # fmt: skip
    return argparse.Namespace(**{**given, **changes})


def calls(prepared):
    return [json.loads(line) for line in (prepared / "calls.jsonl").read_text().splitlines()]


def test_alarmed_starts_are_copied_six_times_and_pushed_from_before_the_alarm(
    tmp_path, prepared, monkeypatch
):
    monkeypatch.setattr(jobs, "LOOK", 0.05)
    (prepared / "3" / "sleeps").touch()  # the one without an alarm would go on; it is ended
    copied = families.families(options_of(tmp_path), command_of(prepared))
    # 8 is alarmed at 3,200, where there is a checkpoint, 1 at 4,100, 5 after 6,400, 3 never.
    assert copied == [8, 1]
    made = calls(prepared)
    seeds = [call[call.index("--seed") + 1] for call in made if call[0] == "train"]
    assert sorted(seeds[:4]) == ["1", "3", "5", "8"]
    assert sorted(seeds[4:]) == ["1"] * 6 + ["8"] * 6
    ways = [tuple(call[call.index("--arm") :]) for call in made[4:] if call[0] == "train"]
    assert sorted(ways) == sorted(2 * families.WAYS)
    checkpoints = [call[1].rpartition("/")[2] for call in made if call[0] == "push"]
    assert checkpoints == ["step=2400.ckpt", "step=4000.ckpt"]
    runs = {path.name for path in (tmp_path / "runs").iterdir()}
    assert "frozen" not in runs and sum(name.endswith("-from6400") for name in runs) == 12


def test_a_start_that_ends_before_its_time_is_not_copied(tmp_path, prepared, monkeypatch):
    monkeypatch.setattr(jobs, "LOOK", 0.05)
    (prepared / "1" / "early").touch()  # it dies after an alarm, and has no checkpoint to copy
    assert families.families(options_of(tmp_path, seeds=[1, 8]), command_of(prepared)) == [8]


def test_the_others_end_while_the_one_goes_on(tmp_path, prepared, monkeypatch):
    monkeypatch.setattr(jobs, "LOOK", 0.05)
    # Neither would come to an end; one is at 6,500, past the alarm of seed 1 at 4,100.
    for seed in (3, 5):
        (prepared / str(seed) / "sleeps").touch()
    copied = families.families(options_of(tmp_path, most=1, seeds=[1, 3, 5]), command_of(prepared))
    assert copied == [1]
    assert sum(call[0] == "push" for call in calls(prepared)) == 1


def test_nothing_goes_on_after_an_error(tmp_path, prepared, monkeypatch):
    monkeypatch.setattr(jobs, "LOOK", 0.05)
    (prepared / "3" / "sleeps").touch()
    made = []
    started = jobs.Jobs.start
    monkeypatch.setattr(
        jobs.Jobs, "start", lambda mine, *args: (started(mine, *args), made.append(mine))
    )
    monkeypatch.setattr(families, "frozen", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        families.families(options_of(tmp_path), command_of(prepared))
    assert not made[0].running
    with pytest.raises(SystemExit, match="frozen is of a call that was cut off"):
        families.families(options_of(tmp_path), command_of(prepared))
