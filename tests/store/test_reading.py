"""The reader: what it gives back, and what it says about broken or foreign input."""

import gzip
import math
import os
import re
from pathlib import Path
from typing import get_args

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from guardbit.records import Event, EventKind, ModuleRow, Sample
from guardbit.store import (
    RunFollower,
    RunWriter,
    files,
    read_end,
    read_events,
    read_metadata,
    read_modules,
    read_run,
    runs_below,
)
from tests.store.made import alarm, gain, loss, put, write

COLUMNS = ["step", "site", "layer", "head", "indicator", "value"]


def segment(folder: Path, kind: str = "samples") -> Path:
    (path,) = folder.glob(f"{kind}-*")
    return path


def check_dtypes(frame: pd.DataFrame) -> None:
    assert list(frame.columns) == COLUMNS
    assert [frame[name].dtype.kind for name in ("step", "layer", "head")] == ["i"] * 3
    assert frame["value"].dtype == "float64"
    assert pd.api.types.is_string_dtype(frame["site"])
    assert pd.api.types.is_string_dtype(frame["indicator"])


# Names as module trees and foreign tools make them; lone surrogates are no text.
_NAMES = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
_SAMPLES = st.builds(
    Sample,
    step=st.integers(0, 2**40),
    site=_NAMES,
    layer=st.integers(0, 100),
    indicator=_NAMES,
    values=st.lists(st.floats(), min_size=1, max_size=4).map(tuple),
)


def rows_by_hand(samples: list[Sample]) -> dict[tuple, float]:
    """Later samples win; a head that was not measured has no row; the whole run is head -1."""
    rows = {}
    for sample in samples:
        for head, value in enumerate(sample.values):
            if sample.site == "":
                rows[sample.step, sample.layer, "", sample.indicator, -1] = value
            elif value == value:
                rows[sample.step, sample.layer, sample.site, sample.indicator, head] = value
    return rows


@settings(max_examples=25, deadline=None)
@given(samples=st.lists(_SAMPLES, max_size=20), size=st.integers(1, 9))
def test_samples_come_back_as_they_were(tmp_path_factory, samples, size):
    folder = tmp_path_factory.mktemp("run")
    with RunWriter(folder) as writer:
        for start in range(0, len(samples), size):
            put(writer, *samples[start : start + size])
    frame = read_run(folder)
    check_dtypes(frame)
    expected = rows_by_hand(samples)
    keys = list(frame[files.KEY].itertuples(index=False, name=None))
    assert keys == sorted(expected)
    for key, value in zip(keys, frame["value"].tolist(), strict=True):
        # Equal to the bit, but for the many encodings of NaN.
        assert value == expected[key] or (math.isnan(value) and math.isnan(expected[key]))
        assert math.copysign(1, value) == math.copysign(1, expected[key]) or math.isnan(value)


_EVENTS = st.builds(
    Event,
    step=st.integers(0, 20),
    kind=st.sampled_from(get_args(EventKind)),
    site=_NAMES,
    heads=st.lists(st.integers(0, 99), max_size=3).map(tuple),
    why=_NAMES,
    rule=_NAMES,
    stabilizer=_NAMES,
    verdict=_NAMES,
)


@settings(max_examples=20, deadline=None)
@given(events=st.lists(_EVENTS, max_size=12))
def test_events_come_back_as_they_were(tmp_path_factory, events):
    folder = tmp_path_factory.mktemp("run")
    with RunWriter(folder) as writer:
        for event in events:
            writer.event(event)
    frame = read_events(folder)
    assert list(frame.columns) == [
        "step", "kind", "site", "heads", "why", "rule", "stabilizer", "verdict",
        "judges",
    ]  # fmt: skip
    assert frame["step"].dtype == "int64"
    found = [Event(**row) for row in frame.to_dict("records")]
    assert found == sorted(events, key=lambda event: event.step)


_ROWS = st.builds(
    ModuleRow,
    step=st.integers(0, 1),  # few keys, of which some are equal
    module=st.sampled_from(["", "h.0"]),
    kind=st.just("block"),
    tensor=st.sampled_from(["output", "gewicht é"]),
    statistic=st.just("gain"),
    value=st.floats(allow_nan=False),
    limit=st.sampled_from([0.5, math.inf]),
)


@settings(max_examples=20, deadline=None)
@given(rows=st.lists(_ROWS, max_size=12), size=st.integers(1, 9))
def test_rows_of_modules_come_back_in_their_order(tmp_path_factory, rows, size):
    folder = tmp_path_factory.mktemp("run")
    with RunWriter(folder) as writer:
        for start in range(0, len(rows), size):
            writer.add_modules(rows[start : start + size])
            writer.flush()
    frame = read_modules(folder)
    assert list(frame.columns) == [*ModuleRow._fields]
    assert (frame["step"].dtype, frame["value"].dtype) == ("int64", "float64")
    found = [ModuleRow(*row) for row in frame.itertuples(index=False, name=None)]
    # Of equal keys the last one, where it stands.
    last = [row for at, row in enumerate(rows) if row[:5] not in [r[:5] for r in rows[at + 1 :]]]
    assert found == sorted(last, key=lambda row: row.step)


def test_rows_of_modules_beyond_the_bounds_are_left_out(tmp_path):
    with RunWriter(tmp_path) as writer:
        writer.add_modules([gain(-1), gain(0, "h\udcff"), gain(2**53), gain(2**53 + 1)])
    with pytest.warns(UserWarning, match="left out 2 of 4 rows"):
        frame = read_modules(tmp_path)
    assert frame["step"].tolist() == [0, 2**53]
    assert frame["module"].tolist() == ["h\\udcff", ""], "what no file can hold is escaped"


def test_rows_of_modules_without_a_name_are_left_out(tmp_path):
    for step in (0, 1):
        with RunWriter(tmp_path, start_step=step) as writer:
            writer.add_modules([gain(step)])
    path = max(tmp_path.glob("modules-*"))
    pq.write_table(pq.ParquetFile(path).read().drop(["module"]), path)
    with pytest.warns(UserWarning, match="lacks the columns module: it needs step, module, kind"):
        assert read_modules(tmp_path)["step"].tolist() == [0]


def test_a_run_without_samples_or_events_reads_as_empty_tables(tmp_path):
    RunWriter(tmp_path, metadata={"lr": 1}).close()
    check_dtypes(read_run(tmp_path))
    assert len(read_run(tmp_path)) == len(read_events(tmp_path)) == 0
    assert len(read_modules(tmp_path)) == 0
    assert read_modules(tmp_path)["step"].dtype == "int64"
    assert read_events(tmp_path)["step"].dtype == "int64"
    assert read_metadata(tmp_path) == {"lr": 1}


@pytest.mark.parametrize("name", ["gpt:small", "2026-11-29T02:35:45", "file:x", "a b%20#?&=\udcff"])
@pytest.mark.parametrize("prefix", ["", "./", "logs/"])
def test_a_run_is_read_by_a_relative_path_with_any_name(tmp_path, monkeypatch, prefix, name):
    """Not as an address: pyarrow takes the text before a colon for the name of a file system."""
    monkeypatch.chdir(tmp_path)
    folder = prefix + name
    with RunWriter(folder) as writer:
        put(writer, loss(0, 1.0))
        put(writer, loss(1, 2.0))
    assert read_run(folder)["value"].tolist() == [1.0, 2.0]
    assert len(files.list_folder(Path(folder)).segments) == 1  # merged


def test_a_log_directory_stands_for_the_run_in_it(tmp_path):
    # With Lightning's default logger TensorBoard's files lie beside it.
    (tmp_path / "events.out.tfevents.1").write_bytes(b"")
    with RunWriter(tmp_path / "guardbit", metadata={"lr": 1}) as writer:
        writer.add([Sample(3, "h.0", 0, "max_logit", (1.0,))])
        writer.event(alarm(3))
    for reader in (read_run, read_events, read_metadata):
        inner, outer = reader(tmp_path / "guardbit"), reader(tmp_path)
        assert inner.equals(outer) if isinstance(inner, pd.DataFrame) else inner == outer
        assert len(inner) == 1
    # A run's own folder is what is meant, whatever lies in it.
    RunWriter(tmp_path / "guardbit" / "guardbit").close()
    assert read_metadata(tmp_path / "guardbit") == {"lr": 1}


@pytest.mark.parametrize(
    "damage",
    [
        lambda content: content[:0],
        lambda content: content[:-1],
        # The data pages; the footer at the end stays whole.
        lambda content: content[:4] + bytes(396) + content[400:],
    ],
    ids=["empty", "cut short", "zeros inside"],
)
def test_a_broken_segment_is_left_out_and_named(tmp_path, damage):
    write(tmp_path, *(loss(step, float(step)) for step in range(500)))
    first = segment(tmp_path)
    write(tmp_path, loss(601), start_step=600)
    first.write_bytes(damage(first.read_bytes()))
    with pytest.warns(UserWarning, match=f"left out the segment {re.escape(str(first))}, which"):
        assert read_run(tmp_path)["step"].tolist() == [601]


def test_a_run_of_which_nothing_can_be_read_is_an_error(tmp_path):
    write(tmp_path, loss(1))
    segment(tmp_path).write_text("step,value\n1,2\n")
    with (
        pytest.warns(UserWarning, match="left out the segment"),
        pytest.raises(ValueError, match=r"none of the 1 segments of samples in .* can be read"),
    ):
        read_run(tmp_path)


@pytest.mark.parametrize(
    ("kind", "read"),
    [("samples", read_run), ("modules", read_modules), ("events", read_events)],
)
def test_the_segments_a_broken_merged_one_covers_stand_in_for_it(tmp_path, kind, read):
    writer = RunWriter(tmp_path)
    for step in (1, 2):
        writer.add_modules([gain(step)])
        put(writer, loss(step))
        writer.event(alarm(step))
    covered = {path: path.read_bytes() for path in tmp_path.glob(f"{kind}-*")}
    writer.close()
    merged = segment(tmp_path, kind)
    for path, content in covered.items():
        path.write_bytes(content)
    assert read(tmp_path)["step"].tolist() == [1, 2]
    merged.write_bytes(merged.read_bytes()[:-7] if kind != "events" else b"{")
    with pytest.warns(UserWarning, match=re.escape(merged.name)):
        assert read(tmp_path)["step"].tolist() == [1, 2]


def test_a_run_says_how_it_ended(tmp_path):
    killed, crashed, finished = (tmp_path / name for name in ("killed", "crashed", "finished"))
    RunWriter(killed).add([loss(1)])
    with pytest.raises(RuntimeError), RunWriter(crashed):
        raise RuntimeError
    RunWriter(finished).close()
    ends = [read_end(path) for path in (killed, crashed, finished)]
    assert ends == [None, "crashed", "finished"]
    # A run that goes on has not ended, whatever its first part did.
    later = RunWriter(finished, start_step=3)
    assert read_end(finished) is None
    later.close("interrupted")
    assert read_end(finished) == "interrupted"
    assert read_metadata(finished) == {}
    # What no run can end as is no end.
    later = max(finished.glob("session-*"))
    later.write_text('{"start_step": -1, "metadata": {}, "end": ["finished"]}')
    assert read_end(finished) is None


def test_runs_below_a_folder_are_found_and_named(tmp_path, monkeypatch):
    for name in ("a/version_0/guardbit", "a/version_1/guardbit", "b", "c/d/e/f/too_deep"):
        RunWriter(tmp_path / name).close()
    (tmp_path / "empty").mkdir()
    (tmp_path / "loop").symlink_to(tmp_path)
    found = [str(run.relative_to(tmp_path)) for run in runs_below(tmp_path)]
    assert found == ["a/version_0", "a/version_1", "b"]
    with pytest.raises(ValueError, match=r"holds a/version_0, a/version_1, b: name one of them$"):
        read_run(tmp_path)
    monkeypatch.setattr(files, "_NAMED_RUNS", 3)
    with pytest.raises(ValueError, match=r"holds a/version_0, a/version_1, b: name one"):
        read_run(tmp_path)
    monkeypatch.setattr(files, "_NAMED_RUNS", 2)
    with pytest.raises(ValueError, match=r"holds a/version_0, a/version_1 and 1 more: name one"):
        read_run(tmp_path)
    # Folders are searched no further once so many are found, though that folder is read to its end.
    RunWriter(tmp_path / "b2/later").close()
    assert len(runs_below(tmp_path)) == 4
    monkeypatch.setattr(files, "_MOST_RUNS", 3)
    assert len(runs_below(tmp_path)) == 3


def test_strays_are_passed_over(tmp_path):
    write(tmp_path, loss(1))
    name = segment(tmp_path).name
    for stray in (f".{name}.partial", f"{name}~", "samples-x.parquet", "notes.txt", ".nfs0001"):
        (tmp_path / stray).write_bytes(b"PAR1")
    os.mkfifo(tmp_path / name.replace("-0001-", "-0002-"))  # a reader would wait for ever
    (tmp_path / name.replace("-0001-", "-0003-")).mkdir()
    assert read_run(tmp_path)["step"].tolist() == [1]


def test_segments_with_other_columns(tmp_path):
    changes = lambda t: t.append_column("rank", pa.array([0])), lambda t: t.drop(["head"])
    for step, change in enumerate(changes):
        write(tmp_path, loss(step), start_step=step)
        path = max(tmp_path.glob("samples-*"))
        pq.write_table(change(pq.ParquetFile(path).read()), path)
    with pytest.warns(UserWarning, match=r"lacks the columns head: it needs step, site"):
        frame = read_run(tmp_path)
    assert frame["step"].tolist() == [0]
    check_dtypes(frame)


@pytest.mark.parametrize("read", [read_run, read_modules, read_events])
def test_a_merge_under_the_readers_feet_is_read_again(tmp_path, monkeypatch, read):
    writer = RunWriter(tmp_path)
    for step in range(5):
        writer.add_modules([gain(step)])
        put(writer, loss(step))
        writer.event(alarm(step))
    look = RunFollower.look

    def look_then_merge(follower: RunFollower):
        look(follower)
        writer.close()

    monkeypatch.setattr(RunFollower, "look", look_then_merge)
    assert read(tmp_path)["step"].tolist() == [0, 1, 2, 3, 4]


CSV = """step,site,layer,head,indicator,value,comment
200,h.1.attn,1,0,max_logit,inf,x
0,,-1,-1,loss,nan,
200,NA,2,1,brand_new_indicator,-1.5e-3,"a, b"
200,h.1.attn,1,1,max_logit,,unmeasured
"""
CSV_ROWS = [
    (0, "", -1, -1, "loss", "nan"),
    (200, "h.1.attn", 1, 0, "max_logit", "inf"),
    (200, "NA", 2, 1, "brand_new_indicator", "-0.0015"),
]
# Without a time stamp: workers have to agree on the names of the tests.
GZIPPED = gzip.compress(CSV.encode(), mtime=0)


@pytest.mark.parametrize("name", ["run.csv", "run.csv.gz"])
def test_a_csv_reads_as_a_run(tmp_path, name):
    path = tmp_path / name
    path.write_bytes(GZIPPED if name.endswith("gz") else CSV.encode())
    frame = read_run(path)
    check_dtypes(frame)
    rows = [(*row[:-1], str(row[-1])) for row in frame.itertuples(index=False, name=None)]
    assert rows == CSV_ROWS
    assert len(read_events(path)) == len(read_modules(path)) == 0
    assert read_metadata(path) == {}


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.csv", b"step,value\n1,2\n", "lacks the columns site, layer, head, indicator: it"),
        ("a.csv", b"", "cannot read a run from .*a.csv: No columns"),
        ("a.csv", b"\xff\xfe\x00\x01", "cannot read a run from .*a.csv: "),
        ("a.csv.gz", b"step,site\n", "cannot read a run from .*a.csv.gz: Not a gzipped file"),
        ("a.csv.gz", GZIPPED[:40], "cannot read a run from .*a.csv.gz: "),
        ("a.csv", CSV.replace("200,h", "2.5,h").encode(), "step must be .* row 1 below .* has 2.5"),
        ("a.csv", CSV.replace(",1,0,", ",1,,").encode(), "head must be a whole number in every"),
        ("a.csv", CSV.replace("0,,-1,-1,loss,nan,", "0,,-1").encode(), "row 2 below the header"),
        ("a.csv", CSV.replace("200,NA", "9" * 20 + ",NA").encode(), "row 3 below the header has 9"),
        ("a.csv", CSV.replace("inf", "much").encode(), "cannot read a run .* 'much'"),
        ("a.csv", CSV.replace("NA,2", "NA,1").encode(), "'h.1.attn' and 'NA' both have layer 1"),
        ("a.parquet", b"PAR1", "a.parquet is a file; it must be the folder of a run"),
    ],
)
def test_what_is_no_run_is_one_clear_sentence(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=message) as caught:
        read_run(tmp_path / name)
    assert "\n" not in str(caught.value)
    if name == "a.parquet":  # whatever is to be read of it
        for read in (read_events, read_metadata, read_modules, read_end):
            with pytest.raises(ValueError, match=message):
                read(tmp_path / name)


@pytest.mark.parametrize("name", ["run.csv", "run.csv.gz"])
def test_of_a_csv_cut_in_a_line_the_rest_is_read(tmp_path, name):
    whole, cut = tmp_path / "whole.csv", tmp_path / name
    text = CSV.encode()
    last = text.rindex(b"\n", 0, -1) + 1
    whole.write_bytes(text[:last])
    for end in (last + 1, last + 14):
        content = text[:end]
        cut.write_bytes(gzip.compress(content, 1, mtime=0) if name.endswith("gz") else content)
        with pytest.warns(UserWarning, match=f"line 5 of {cut}, the last one, which is cut short"):
            frame = read_run(cut)
        pd.testing.assert_frame_equal(frame, read_run(whole))


def test_a_segment_that_unpacks_to_more_rows_than_a_run_writes_is_left_out(tmp_path, monkeypatch):
    write(tmp_path, loss(0))
    path = segment(tmp_path)
    rows = pq.read_table(path).take(pa.array([0]).take(pa.array([0] * 300_000)))
    pq.write_table(rows, path, compression="zstd")
    assert len(read_run(tmp_path)) == 1, "equal keys"
    monkeypatch.setattr(files, "MANY_ROWS", 100_000)
    with (
        pytest.warns(UserWarning, match=r"unpacks .* bytes to 300,000 rows, which no run"),
        pytest.raises(ValueError, match="none of the 1 segments of samples"),
    ):
        read_run(tmp_path)
    monkeypatch.setattr(files, "ROWS_PER_BYTE", 300_000)
    assert len(read_run(tmp_path)) == 1
