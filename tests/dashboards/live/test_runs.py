"""The list of runs below a folder."""

import os

import numpy as np
import pytest

from guardbit import read_run
from guardbit.dashboards import live
from guardbit.dashboards.live import LiveRuns
from guardbit.records import Sample


@pytest.fixture(autouse=True)
def unhurried(monkeypatch):
    """One look reads all runs, however slow the machine is."""
    monkeypatch.setattr(live, "LOOK_SECONDS", 60.0)


@pytest.fixture
def folder(tmp_path, recorder):
    """One run that has finished, one that crashed, one that was killed, one that goes on."""
    for name, end in (("a/done", "finished"), ("a/broke", "crashed"), ("killed", None)):
        writer = recorder(tmp_path / name)
        writer.record(range(0, 100, 10))
        if end:
            writer.close(end)
    for path in (tmp_path / "killed").iterdir():
        os.utime(path, (path.stat().st_atime, path.stat().st_mtime - 600))
    on = recorder(tmp_path / "on")
    on.record(range(0, 50, 10))
    on.add([Sample(40, "", -1, "validation_loss", (3.5,))])
    on.flush()
    return tmp_path


def test_each_run_is_listed_with_what_the_store_knows_of_its_end(folder, monkeypatch):
    runs = LiveRuns(folder)
    runs.look()
    rows = {row["name"]: row for row in runs.rows()["runs"]}
    assert {name: row["end"] for name, row in rows.items()} == {
        "a/done": "finished", "a/broke": "crashed", "killed": None, "on": None
    }  # fmt: skip
    assert rows["killed"]["seconds_silent"] > 500 > rows["on"]["seconds_silent"]
    assert {name: row["last_step"] for name, row in rows.items()} == {
        "a/done": 90, "a/broke": 90, "killed": 90, "on": 40
    }  # fmt: skip
    assert len({row["id"] for row in rows.values()}) == 4
    losses = read_run(folder / "a/done").query("indicator == 'loss'")["value"]
    assert rows["a/done"]["losses"] == pytest.approx(losses.tolist(), rel=1e-3)
    assert all(row["alarms"] == 0 and row["problem"] == "" for row in rows.values())
    # One that nobody has opened, and that writes no more, was killed.
    monkeypatch.setattr(live, "SILENT_SECONDS", 0.0)
    runs.look()
    (on,) = (row for row in runs.rows()["runs"] if row["name"] == "on")
    assert on["headline"].endswith("the run was not closed: it was killed, or it still runs")


def test_a_run_that_cannot_be_read_hides_no_other(folder):
    runs = LiveRuns(folder)
    runs.look()
    ids = {row["name"]: row["id"] for row in runs.rows()["runs"]}
    for broken in (folder / "on").iterdir():
        broken.unlink()
    (folder / "on").rmdir()
    runs.look()
    rows = {row["name"]: row for row in runs.rows()["runs"]}
    assert "on" in rows["on"]["problem"] and rows["a/done"]["problem"] == ""
    assert {name: row["id"] for name, row in rows.items()} == ids, "addresses stay"


def test_runs_that_nobody_has_opened_are_judged_and_still_drawn_whole_later(tmp_path, recorder):
    done, on = recorder(tmp_path / "done"), recorder(tmp_path / "on", ill_from=40)
    done.record(range(0, 100, 10))
    done.close("finished")
    on.record(range(0, 60, 10))
    runs = LiveRuns(tmp_path)

    def rows():
        runs.look()
        return {row["name"]: row for row in runs.rows()["runs"]}

    assert rows()["done"]["headline"] == "Healthy: no alarm up to step 90"
    assert rows()["on"]["headline"] == "Running, unclear: too short to judge (6 of 8 samples)"
    on.record(range(60, 80, 10))
    on.alarm(70)
    found = rows()
    assert found["done"]["outcome"] == "healthy" and found["on"]["outcome"] == "switched"
    # The recorder's loss is 3 less a thousandth a step; the middle of the last five.
    assert [found[name]["loss"] for name in ("done", "on")] == pytest.approx([2.93, 2.95])
    runs.overlay([row["id"] for row in found.values()])
    runs.look()
    for one in runs.overlay([row["id"] for row in found.values()])["runs"]:
        assert one["steps"] == list(range(0, found[one["name"]]["last_step"] + 1, 10))
        assert [mark["kind"] for mark in one["marks"]] == ["switch", "alarm"] * (
            one["name"] == "on"
        )


def test_curves_of_some_runs_are_their_largest_heads_over_steps(folder):
    runs = LiveRuns(folder)
    runs.look()
    ids = {row["name"]: row["id"] for row in runs.rows()["runs"]}
    assert runs.overlay([ids["a/done"]])["runs"][0]["steps"] == []
    runs.look()  # from now on its samples are kept
    assert runs.overlay([ids["a/done"]])["runs"][0]["steps"] == [*range(0, 100, 10)]
    (one,) = runs.overlay([ids["on"]])["runs"]
    assert one["name"] == "on" and one["steps"] == [0, 10, 20, 30, 40]
    assert one["lines"]["loss"] == [3.0, 2.99, 2.98, 2.97, 2.96]
    assert one["lines"]["validation_loss"] == [None] * 4 + [3.5]
    largest = [
        max((1 + 0.01 * np.random.default_rng((step, layer)).random(4)).max() for layer in range(3))
        for step in range(0, 50, 10)
    ]
    # Pages get four digits.
    assert one["lines"]["max_logit"] == pytest.approx(largest, rel=5e-4)
    assert one["lines"]["w_q_spectral_norm"] == pytest.approx(np.sqrt(largest), rel=5e-4)
    (row,) = [row for row in runs.rows()["runs"] if row["name"] == "on"]
    assert (row["headline"], row["outcome"]) == (
        "Running, unclear: too short to judge (5 of 8 samples)",
        "unclear",
    )
    with pytest.raises(LookupError, match="no run 9"):
        runs.overlay([9])


def test_what_no_time_was_left_for_is_read_at_the_next_look(folder, monkeypatch):
    monkeypatch.setattr(live, "LOOK_SECONDS", -1.0)
    runs = LiveRuns(folder)
    runs.look()
    assert len(runs.rows()["runs"]) == 4
    assert not any("headline" in row for row in runs.rows()["runs"])
    runs.opened(2)
    runs.look()
    assert ["headline" in row for row in runs.rows()["runs"]] == [False, False, True, False]
    monkeypatch.setattr(live, "LOOK_SECONDS", 60.0)
    runs.look()
    assert all("headline" in row for row in runs.rows()["runs"])
