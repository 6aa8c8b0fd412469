"""The writer: what it promises about kills, resumed runs, merging and bad input."""

import math
import os
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from guardbit.records import Sample
from guardbit.store import (
    RunWriter,
    files,
    read_events,
    read_metadata,
    read_modules,
    read_run,
    writing,
)
from tests.store.made import alarm, gain, loss, put, write


def steps_and_values(path: Path) -> list[tuple[int, float]]:
    frame = read_run(path)
    return list(zip(frame["step"].tolist(), frame["value"].tolist(), strict=True))


def file_names(path: Path, kind: str) -> list[str]:
    return sorted(entry.name for entry in path.iterdir() if entry.name.startswith(kind))


class Killed(BaseException):
    """Stands for the end of the process: nothing in the store may catch it and go on."""


def kill_at(monkeypatch: pytest.MonkeyPatch, call: int) -> None:
    """From the given call on, every system call the store's safety rests on ends the process."""
    made = 0

    def guard(function):
        def guarded(*arguments, **options):
            nonlocal made
            made += 1
            if made > call:
                raise Killed
            return function(*arguments, **options)

        return guarded

    for name in ("replace", "unlink", "fsync"):
        monkeypatch.setattr(os, name, guard(getattr(os, name)))


def test_a_kill_between_any_two_system_calls_loses_nothing_flushed(tmp_path, monkeypatch):
    monkeypatch.setattr(writing, "_FAN_OUT", 2)
    call, alive = 0, False
    while not alive:
        folder = tmp_path / str(call)
        flushed = recorded = 0
        with monkeypatch.context() as patch:
            kill_at(patch, call)
            try:
                writer = RunWriter(folder)
                for step in range(5):
                    writer.add_modules([gain(step)])
                    put(writer, loss(step, step / 2))
                    flushed += 1
                    writer.event(alarm(step))
                    recorded += 1
                writer.close()
                alive = True
            except Killed:
                pass
        if file_names(folder, "session"):
            found = steps_and_values(folder)
            assert len(found) in (flushed, flushed + 1)
            assert found == [(step, step / 2) for step in range(len(found))]
            modules = read_modules(folder)["step"].tolist()
            assert modules == list(range(len(modules)))
            assert len(modules) in (flushed, flushed + 1)
            events = read_events(folder)["step"].tolist()
            assert len(events) in (recorded, recorded + 1)
            assert events == list(range(len(events)))
        else:
            assert flushed == recorded == 0
        write(folder, loss(6), start_step=5)
        assert steps_and_values(folder)[-1] == (6, 0.0)
        call += 1
    # 16 files published and 11 merges of 2 or 3 segments: each file costs two syncs and a rename.
    assert call > 3 * 27
    assert len(file_names(folder, "samples")) == 2  # one of each of the two writers
    assert len(file_names(folder, "modules")) == 1
    assert len(file_names(folder, "events")) == 1


@pytest.mark.parametrize(
    ("flushes", "fan_out"), [(1, 2), (7, 2), (8, 2), (9, 3), (28, 3), (8, 8), (65, 8)]
)
def test_merging_changes_no_sample_and_keeps_files_few(tmp_path, monkeypatch, flushes, fan_out):
    monkeypatch.setattr(writing, "_FAN_OUT", fan_out)
    monkeypatch.setattr(writing, "_ROW_GROUP", 5)  # merged segments of several row groups
    expected = [(step, head, value) for step in range(flushes) for head, value in [(0, 1), (2, -3)]]
    writer = RunWriter(tmp_path)
    for step in range(flushes):
        put(writer, Sample(step, "h.0.attn", 0, "max_logit", (1.0, math.nan, -3.0)))
        writer.event(alarm(step))
    for finished in (False, True):
        if finished:
            writer.close()
        frame = read_run(tmp_path)
        assert list(frame[["step", "head", "value"]].itertuples(index=False, name=None)) == expected
        assert read_events(tmp_path)["step"].tolist() == list(range(flushes))
        # As many full widths as the number has digits in base fan_out, each at most fan_out - 1.
        digits = math.floor(math.log(flushes, fan_out) + 1e-9) + 1
        most = 1 if finished else (fan_out - 1) * digits
        assert 1 <= len(file_names(tmp_path, "samples")) <= most
        assert 1 <= len(file_names(tmp_path, "events")) <= most


def test_a_merge_holds_a_row_group_at_a_time(tmp_path, monkeypatch):
    monkeypatch.setattr(writing, "_ROW_GROUP", 10)
    with RunWriter(tmp_path) as writer:
        for start in range(0, 70, 7):
            put(writer, *map(loss, range(start, start + 7)))
    (name,) = file_names(tmp_path, "samples")
    file = pq.ParquetFile(tmp_path / name)
    groups = [file.metadata.row_group(k).num_rows for k in range(file.num_row_groups)]
    assert sum(groups) == 70
    assert max(groups) < 20  # a group is closed by the batch that takes it to 10 rows or more


# Sessions as (start step, steps recorded), the steps as distances from the start; None: no past.
_SESSIONS = st.lists(
    st.tuples(st.none() | st.integers(0, 12), st.lists(st.integers(0, 12), max_size=6)), max_size=5
)


@settings(max_examples=20, deadline=None)
@given(sessions=_SESSIONS)
def test_resumed_sessions_hide_what_they_do_again(tmp_path_factory, sessions):
    folder = tmp_path_factory.mktemp("run")
    # What a reader of a plain table would do by hand, session after session.
    samples: dict[int, float] = {}
    events: list[tuple[int, str]] = []
    for session, (start_step, distances) in enumerate(sessions):
        start, hidden = (0, -1) if start_step is None else (start_step, start_step)
        with RunWriter(folder, start_step=start_step) as writer:
            for distance in distances:
                writer.add_modules([gain(start + distance, "", session)])
                put(writer, loss(start + distance, session))
                writer.event(alarm(start + distance, str(session)))
        if distances:
            samples = {step: value for step, value in samples.items() if step <= hidden}
            events = [event for event in events if event[0] <= hidden]
            for distance in distances:
                samples[start + distance] = session
                events.append((start + distance, str(session)))
    if not sessions:
        with pytest.raises(ValueError, match="is empty"):
            read_run(folder)
        return
    assert steps_and_values(folder) == sorted(samples.items())
    rows = read_modules(folder)
    assert dict(zip(rows["step"].tolist(), rows["value"].tolist(), strict=True)) == samples
    frame = read_events(folder)
    found = list(zip(frame["step"].tolist(), frame["why"].tolist(), strict=True))
    assert found == sorted(events, key=lambda event: event[0])


def test_a_second_live_writer_leaves_the_first_ones_files_alone(tmp_path):
    first = RunWriter(tmp_path, metadata={"who": "first", "lr": 1})
    put(first, loss(1, 0.5))
    first.event(alarm(1))
    before = {entry.name: entry.read_bytes() for entry in tmp_path.iterdir()}
    with RunWriter(tmp_path, start_step=1, metadata={"who": "second"}) as second:
        for step in range(2, 20):
            put(second, loss(step, 1.0))
            second.event(alarm(step))
            put(first, loss(step, 0.5))
    assert {name: (tmp_path / name).read_bytes() for name in before if "events" in name} == {
        name: content for name, content in before.items() if "events" in name
    }
    first.close()
    (first_file,) = [name for name in file_names(tmp_path, "samples") if "-0001-" in name]
    table = pq.ParquetFile(tmp_path / first_file).read()
    assert table["step"].to_pylist() == list(range(1, 20))
    assert set(table["value"].to_pylist()) == {0.5}
    assert steps_and_values(tmp_path) == [(1, 0.5), *((step, 1.0) for step in range(2, 20))]
    assert read_metadata(tmp_path) == {"who": "second", "lr": 1}


def test_two_writers_that_open_a_folder_at_once_get_different_names(tmp_path, monkeypatch):
    # Each sees the folder as it was before the other's session file appeared.
    monkeypatch.setattr(files, "list_folder", lambda _: files.Listing({}, []))
    for step in (1, 2):
        put(RunWriter(tmp_path, start_step=step), loss(step))
    assert [name[8:12] for name in file_names(tmp_path, "session")] == ["0001", "0001"]
    assert len(file_names(tmp_path, "samples")) == 2


def test_metadata_that_is_no_json_is_refused_and_what_stood_there_stays(tmp_path):
    with RunWriter(tmp_path, metadata={"lr": 1e-3}) as writer:
        with pytest.raises(TypeError, match=r"metadata of a run must be JSON-able: .*set"):
            writer.update_metadata({"heads": {1, 2}})
        writer.update_metadata({"seed": 1})
    assert read_metadata(tmp_path) == {"lr": 1e-3, "seed": 1}


def test_a_flush_that_fails_keeps_its_samples_for_the_next_try(tmp_path, monkeypatch):
    writer = RunWriter(tmp_path)
    writer.add([loss(1), loss(2)])
    writer.add_modules([gain(1)])

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", full)
        with pytest.raises(OSError, match="No space left"):
            writer.flush()
    assert not list(tmp_path.glob(".*"))
    put(writer, loss(3))
    assert [step for step, _ in steps_and_values(tmp_path)] == [1, 2, 3]
    assert read_modules(tmp_path)["step"].tolist() == [1]


def test_a_merge_that_fails_leaves_the_segments_and_goes_on(tmp_path, monkeypatch):
    monkeypatch.setattr(writing, "_FAN_OUT", 2)
    writer = RunWriter(tmp_path)
    put(writer, loss(1))
    (broken,) = file_names(tmp_path, "samples")
    whole = (tmp_path / broken).read_bytes()
    (tmp_path / broken).write_bytes(whole[:50])
    with pytest.warns(UserWarning, match=r"stay unmerged in .*00000000-00000001"):
        put(writer, loss(2))
    for step in range(3, 8):
        put(writer, loss(step))
    writer.close()
    (tmp_path / broken).write_bytes(whole)
    assert [step for step, _ in steps_and_values(tmp_path)] == list(range(1, 8))


def test_a_file_in_place_of_the_folder_is_refused(tmp_path):
    (tmp_path / "thesis.tex").write_text("x")
    with pytest.raises(ValueError, match="is a file; it must be a folder"):
        RunWriter(tmp_path / "thesis.tex")
    assert (tmp_path / "thesis.tex").read_text() == "x"


def test_a_start_before_the_first_step_is_refused(tmp_path):
    with pytest.raises(ValueError, match="start_step is -1; it must be at least 0"):
        RunWriter(tmp_path, start_step=-1)
    assert not list(tmp_path.iterdir())


def test_a_closed_writer_says_so(tmp_path):
    writer = RunWriter(tmp_path)
    writer.close()
    writer.close()
    calls = (
        lambda: writer.add([loss(1)]),
        lambda: writer.add_modules([gain(1)]),
        lambda: writer.event(alarm(1)),
        writer.flush,
        lambda: writer.update_metadata({}),
    )
    for call in calls:
        with pytest.raises(ValueError, match=r"the run's writer is closed: .*session-0001"):
            call()
