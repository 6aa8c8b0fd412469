"""A small part of what the commands in this folder do; `docs/guarantees.md` has the results."""

import random
import subprocess
import sys
from pathlib import Path

import pytest
import typer

from tests.faults import commands, kernels, kills, soak, stores

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("number", "scenarios"),
    [
        pytest.param(10, ["--scenario=plain loop"], id="a few"),
        pytest.param(40, [], marks=pytest.mark.slow, id="all scenarios"),
    ],
)
def test_what_broke_a_promise_injected_faults_and_a_rank_that_stays_away(
    number, scenarios, tmp_path
):
    # A process of its own: it forks, which one with threads should not.
    command = [
        sys.executable, "-m", "tests.faults", "found", "campaign", "missing_rank",
        f"--number={number}", "--workers=1", "--seed=7000", f"--csv={tmp_path / 'faults.csv'}",
    ]  # fmt: skip
    done = subprocess.run(
        command + scenarios, cwd=ROOT, capture_output=True, text=True, timeout=1200
    )
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    assert len((tmp_path / "faults.csv").read_text().splitlines()) == number + 1


def test_what_the_store_acknowledged_survives_kills():
    assert kills.run(10, seed=0) == []


def test_a_loss_is_seen(tmp_path):
    last = kills.kill_one(tmp_path, 0, 0.3)
    assert last > 0
    assert kills.lost(tmp_path, last) == ""
    sorted(tmp_path.glob("samples-*"))[0].unlink()
    assert kills.lost(tmp_path, last).endswith("values")


def test_commands_read_corrupted_runs(tmp_path):
    for seed in range(6):
        chance = random.Random(seed)
        folder = tmp_path / str(seed) / "run"
        stores.write_run(folder, chance)
        how = stores.corrupt(folder, chance)
        for command in ("replay", "watch"):
            assert stores.read(command, folder) == "", how


def test_kernels_take_random_calls():
    found = [kernels.why_wrong(seed, "cpu") for seed in range(20)]
    assert [one for one in found if one[0]] == []


def test_files_and_bytes_stay_few(tmp_path):
    found = soak.soak(200, tmp_path / "run")
    assert found.values == 200 * 4 * 2 * 4
    assert found.files < 60  # merged by eights: at most 7 of each of three widths, twice
    assert found.bytes_a_value < 16


def test_commands_take_any_arguments():
    with commands.in_a_zoo() as paths:
        for seed in range(20):
            arguments = commands.draw(random.Random(seed), paths)
            assert commands.failure_of(arguments) == "", arguments
        # A comparison with a loop of links, which once was a traceback.
        loop = next(path for path in paths if path.endswith("loop"))
        assert commands.failure_of(["report", loop, "/dev/null"]) == ""


def test_a_command_that_fails_is_seen(monkeypatch):
    app = typer.Typer()

    @app.command()
    def fail(how: str) -> None:
        if how == "error":
            raise KeyError(how)
        print("Traceback" if how == "print" else "")
        raise typer.Exit({"code": 3, "silent": 2, "fine": 1}.get(how, 0))

    monkeypatch.setattr(commands, "app", app)
    failures = {how: commands.failure_of([how]) for how in ("error", "print", "code", "silent")}
    assert "KeyError" in failures["error"] and "Traceback" in failures["print"]
    assert failures["code"] == "exit code 3" and failures["silent"] == "it refuses without a word"
    assert commands.failure_of(["fine"]) == ""
