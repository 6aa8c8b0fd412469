"""A small part of what the commands in this folder do; `docs/promises.md` has the whole of it."""

import random
import subprocess
import sys
from pathlib import Path

from tests.faults import campaign, kills, stores

ROOT = Path(__file__).parents[2]


def test_injected_faults_break_no_promise(tmp_path):
    # A process of its own: it forks, which one with threads should not.
    command = [
        sys.executable, "-m", "tests.faults.campaign", "--injections", "40", "--workers", "1",
        "--seed", "7000", "--csv", tmp_path / "faults.csv",
        "--scenario", "plain loop", "--scenario", "switched: exact_delta",
    ]  # fmt: skip
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    assert len((tmp_path / "faults.csv").read_text().splitlines()) == 41


def test_the_table_counts_what_fired_by_scenario_and_error():
    rows = [
        ["0", "plain", "OSError", "a.py:1 x0", "contained", ""],
        ["1", "plain", "OSError", "a.py:1 x0", "not reached", ""],
        ["2", "plain", "OSError", "a.py:1 x0", "killed", "why"],
    ]
    lines = campaign.table(rows, ("killed", "silent")).splitlines()
    assert lines[2:] == ["| plain | OSError | 2 | 1 | 0 |", "| **all** | | 2 | 1 | 0 |"]


def test_what_the_store_acknowledged_survives_kills():
    assert kills.run(15, seed=0) == []


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
