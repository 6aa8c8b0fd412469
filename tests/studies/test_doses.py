"""The order of starts and rounds of copies, with processes that only write what runs would."""

import argparse
import json
import sys

import pytest

from guardbit.records import Event
from guardbit.store import RunWriter
from studies.rescue import doses, jobs

#: Stands in for `train.py`: notes its arguments, and takes a prepared run's place.
STAND_IN = """
import json, pathlib, shutil, sys, time
prepared, module, *arguments = sys.argv[1:]
prepared = pathlib.Path(prepared)
with open(prepared / "calls.jsonl", "a") as file:
    file.write(json.dumps(arguments) + "\\n")
def given(name):
    return arguments[arguments.index(name) + 1]
name = f"stock-cudnn-lr1.5e-03-seed{given('--seed')}-again"
folder = pathlib.Path(given("--folder"))
if "--branch" in arguments:
    assert [path.name for path in folder.glob(f"{name}*/*.ckpt")] == ["step=4000.ckpt"]
    error = given("--delta-error") if "--delta-error" in arguments else ""
    (folder / f"{given('--arm')}{error}-again{given('--again')}-from4000").mkdir()
else:
    shutil.copytree(prepared / given("--seed"), folder / (name + given("--again")))
    time.sleep(600 if (prepared / given("--seed") / "sleeps").exists() else 0)
"""


@pytest.fixture
def prepared(tmp_path, monkeypatch):
    monkeypatch.setattr(jobs, "LOOK", 0.05)
    folder = tmp_path / "prepared"
    folder.mkdir()
    for seed, alarms, at in ((1, [4500, 4100], 5900), (3, [], 4200), (5, [4300], 4400)):
        with RunWriter(folder / str(seed)) as writer:
            for step in alarms:
                writer.event(Event(step=step, kind="alarm", site="h.2", heads=[0], why="it grew"))
        for step in (3200, 4000, 4800):
            (folder / str(seed) / f"step={step}.ckpt").touch()
        (folder / str(seed) / "clock.csv").write_text(f"{at},1.0\n")
        (folder / str(seed) / "sleeps").touch()
    return folder


def perform(tmp_path, prepared, seeds, **changes):
    script = prepared / "stand_in.py"
    script.write_text(STAND_IN)
    given = {"seeds": seeds, "again": 16, "rounds": 2, "slots": 4, "minutes": 1.0,
             "updates_every": 200, "folder": tmp_path / "runs", "corpus": tmp_path}  # fmt: skip
    return doses.doses(
        argparse.Namespace(**{**given, **changes}),
        lambda module, arguments: [sys.executable, str(script), str(prepared), module, *arguments],
    )


def test_the_first_alarmed_is_copied_in_rounds_from_before_its_alarm(tmp_path, prepared):
    # 1 is alarmed first; 3 has passed that step without an alarm; 5 is alarmed later.
    assert perform(tmp_path, prepared, [1, 3, 5]) == (1, 4000)
    made = [json.loads(line) for line in (prepared / "calls.jsonl").read_text().splitlines()]
    copies = [call for call in made if "--branch" in call]
    assert len(made) - len(copies) == 3
    for call in copies:
        assert call[call.index("--steps") + 1] == "5800"
        assert call[call.index("--of-again") + 1] == "16"
    ways = {"stock", "late-1", "late0", "late1", "late2", "laterandom"}
    names = {path.name for path in (tmp_path / "runs").glob("*-from4000")}
    assert names == {f"{way}-again{again}-from4000" for way in ways for again in (17, 18)}
    # Each round is begun before the next one.
    numbers = sorted(call[call.index("--again") + 1] for call in copies)
    assert numbers == ["17"] * 6 + ["18"] * 6
    assert not (tmp_path / "runs" / "frozen").exists()


@pytest.mark.parametrize("seeds, why", [([3], "no start was alarmed"), ([7], "no checkpoint")])
def test_where_there_is_nothing_to_copy_that_is_said(tmp_path, prepared, seeds, why):
    (prepared / "3" / "sleeps").unlink()
    (prepared / "3" / "clock.csv").write_text("6500,1.0\n")
    with RunWriter(prepared / "7") as writer:
        writer.event(Event(step=500, kind="alarm", site="h.2", heads=[0], why="it grew"))
    (prepared / "7" / "clock.csv").write_text("600,1.0\n")
    (prepared / "7" / "sleeps").touch()
    with pytest.raises(SystemExit, match=why):
        perform(tmp_path, prepared, seeds)


def test_what_was_recorded_stays_when_the_time_is_up(tmp_path, prepared, monkeypatch):
    def up(*_):
        (tmp_path / "runs" / "frozen" / "late1-again17-from4000").mkdir()
        raise SystemExit("the time is up")

    monkeypatch.setattr(doses, "_copy", up)
    with pytest.raises(SystemExit, match="the time is up"):
        perform(tmp_path, prepared, [1, 3, 5])
    assert (tmp_path / "runs" / "late1-again17-from4000").is_dir()
    assert not (tmp_path / "runs" / "frozen").exists()


def test_a_call_that_was_cut_off_is_not_mixed_with_another(tmp_path, prepared):
    (tmp_path / "runs" / "frozen").mkdir(parents=True)
    with pytest.raises(SystemExit, match="remove it first"):
        perform(tmp_path, prepared, [1])
