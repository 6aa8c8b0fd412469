"""In which order `families` and `doses` start, copy and end runs, with processes in their place."""

import argparse
import json
import sys

import pytest

from guardbit.records import Event
from guardbit.store import RunWriter
from studies.rescue import doses, families, jobs

#: Stands in for `train.py`: notes its arguments, and takes a prepared run's place.
STAND_IN = """
import json, pathlib, shutil, sys, time
prepared, module, *arguments = sys.argv[1:]
prepared = pathlib.Path(prepared)
with open(prepared / "calls.jsonl", "a") as file:
    file.write(json.dumps([module, *arguments]) + "\\n")
def given(name):
    return arguments[arguments.index(name) + 1]
if module == "train":
    name = f"stock-cudnn-lr1.5e-03-seed{given('--seed')}-again"
    folder = pathlib.Path(given("--folder"))
if module == "train" and "--branch" in arguments:
    step, way = given("--branch-step"), arguments[arguments.index("--arm") + 1 :]
    assert [path.name for path in folder.glob(f"{name}*/*.ckpt")] == [f"step={step}.ckpt"]
    made = f"{' '.join(way)}-seed{given('--seed')}-again{given('--again')}-from{step}"
    (folder / made).mkdir()
elif module == "train":
    copied = shutil.copytree(prepared / given("--seed"), folder / ("." + name))
    copied.rename(folder / (name + given("--again")))  # whole at once: no clock before its alarms
    time.sleep(600 if (prepared / given("--seed") / "sleeps").exists() else 0)
"""


@pytest.fixture
def prepared(tmp_path, monkeypatch):
    monkeypatch.setattr(jobs, "LOOK", 0.05)
    folder = tmp_path / "prepared"
    folder.mkdir()
    (folder / "stand_in.py").write_text(STAND_IN)
    return folder


def prepare(prepared, seed, alarms, at=6500, sleeps=False):
    """What a start of a seed will have written: alarms of a head, checkpoints, and its clock."""
    with RunWriter(prepared / str(seed)) as writer:
        for step in alarms:
            writer.event(Event(step=step, kind="alarm", site="h.2", heads=[0], why="it grew"))
    for step in (2400, 3200, 4000, 4800, 6400):
        (prepared / str(seed) / f"step={step}.ckpt").touch()
    (prepared / str(seed) / "clock.csv").write_text(f"100,0.5\n{at},1.0\n")
    if sleeps:  # it would go on
        (prepared / str(seed) / "sleeps").touch()


def perform(study, prepared, seeds, **changes):
    folder, script = prepared.parent, prepared / "stand_in.py"
    given = {
        "seeds": seeds, "again": 16, "slots": 4, "minutes": 2.0, "folder": folder / "runs",
        "corpus": folder / "corpus", "most": 3, "steps": 7600, "rounds": 2,
        "ways": "doses", "gpus": (), "architecture": "gpt2",
        "learning_rate": 1.5e-3, "by": 6400,
    }  # fmt: skip
    return study(
        argparse.Namespace(**{**given, **changes}),
        lambda module, arguments: [sys.executable, str(script), str(prepared), module, *arguments],
    )


def calls(prepared):
    return [json.loads(line) for line in (prepared / "calls.jsonl").read_text().splitlines()]


def given(call, name):
    return call[call.index(name) + 1]


def test_alarmed_starts_are_copied_six_times(prepared):
    # 8 is alarmed at 3,200, where there is a checkpoint, 1 at 4,100, 5 after 6,400, 3 never.
    for seed, alarms in {1: [5000, 4100], 3: [], 5: [6450], 8: [3200]}.items():
        prepare(prepared, seed, alarms, sleeps=seed == 3)
    assert perform(families.families, prepared, [1, 3, 5, 8]) == [8, 1]
    made = calls(prepared)
    seeds = [given(call, "--seed") for call in made if call[0] == "train"]
    assert sorted(seeds[:4]) == ["1", "3", "5", "8"]
    assert sorted(seeds[4:]) == ["1"] * 6 + ["8"] * 6
    ways = [tuple(call[call.index("--arm") :]) for call in made[4:] if call[0] == "train"]
    assert sorted(ways) == sorted(2 * families.WAYS)
    runs = {path.name for path in (prepared.parent / "runs").iterdir()}
    assert "frozen" not in runs and sum(name.endswith("-from6400") for name in runs) == 12


@pytest.fixture
def three(prepared):
    """1 is alarmed first; 3 has passed that step without an alarm; 5 is alarmed later."""
    prepare(prepared, 1, [4500, 4100], at=5900, sleeps=True)
    prepare(prepared, 3, [], at=4200, sleeps=True)
    prepare(prepared, 5, [4300], at=4400, sleeps=True)
    return prepared


@pytest.mark.slow
def test_the_first_alarmed_is_copied_in_rounds_from_before_its_alarm(three):
    assert perform(doses.doses, three, [1, 3, 5]) == (1, 4000)
    made = calls(three)
    copies = [call for call in made if "--branch" in call]
    assert len(made) - len(copies) == 3
    for call in copies:
        assert given(call, "--steps") == "5800" and given(call, "--of-again") == "16"
    factors = ("-1", "0", "1", "2", "random")
    ways = ["stock", *(f"late --delta-error {factor}" for factor in factors)]
    runs = three.parent / "runs"
    names = {path.name for path in runs.glob("*-from4000")}
    assert names == {f"{way}-seed1-again{again}-from4000" for way in ways for again in (17, 18)}
    # Each round is begun before the next one.
    assert sorted(given(call, "--again") for call in copies) == ["17"] * 6 + ["18"] * 6
    assert not (runs / "frozen").exists()
