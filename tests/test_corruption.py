"""Broken files in a run's folder: report, replay, the live page and a resuming run live with them.

Each says in a sentence what is left out, and shows the rest; none dies, waits or eats memory.
"""

import json
import os
import re
import warnings
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

from guardbit.cli import app
from guardbit.monitor.journal import Journal
from guardbit.monitor.settings import Settings
from guardbit.monitor.stages import Stages
from guardbit.records import Event, Sample
from guardbit.store import RunWriter, read_events, read_metadata, read_run

STEPS = range(0, 300, 10)
SCHEMA = pa.schema(
    [
        ("step", pa.int64()),
        ("site", pa.string()),
        ("layer", pa.int64()),
        ("head", pa.int64()),
        ("indicator", pa.string()),
        ("value", pa.float64()),
    ]
)
GOOD = {"step": 5, "kind": "alarm", "site": "h.0", "heads": [1], "why": "w", "rule": "norm_growth"}
GOOD |= {"stabilizer": "", "verdict": "", "judges": "head"}


def write_run(folder: Path, **options) -> None:
    with RunWriter(folder, metadata={"lr": 1}, **options) as writer:
        for step in STEPS:
            for layer in range(2):
                values = tuple(1 + 0.01 * np.random.default_rng((step, layer)).random(4))
                writer.add([Sample(step, f"h.{layer}", layer, "max_logit", values)])
            writer.add([Sample(step, "", -1, "loss", (3.0,))])
        writer.event(Event(100, "alarm", "h.1", (2,), "it grew", rule="norm_growth"))


def next_segment(folder: Path, kind: str, suffix: str) -> Path:
    """Where the run's first session would write its next segment."""
    found = sorted(folder.glob(f"{kind}-0001-*"))
    flush = f"{90 + len(found):08d}"
    return folder / f"{found[0].name[: len(kind) + 14]}-{flush}-{flush}{suffix}"


def rows(folder: Path, *broken: tuple) -> None:
    """One more segment, with broken rows and one that is not."""
    written = [*broken, (100, "h.1", 1, 3, "delta_bias_abs", 2.0)]
    columns = zip(*written, strict=True)
    arrays = [pa.array(c, t) for c, t in zip(columns, SCHEMA.types, strict=True)]
    path = next_segment(folder, "samples", ".parquet")
    pq.write_table(pa.Table.from_arrays(arrays, schema=SCHEMA), path)


def events(folder: Path, *lines: str) -> None:
    """The same of the journal."""
    text = "\n".join([*lines, json.dumps(GOOD)]) + "\n"
    next_segment(folder, "events", ".jsonl").write_text(text)


def event(**changes: object) -> str:
    return json.dumps(GOOD | changes)


def zero(path: Path) -> None:
    path.symlink_to("/dev/zero")


DEEP = "[" * 100_000 + "]" * 100_000
CORRUPTIONS = {
    "infinite step": lambda f: events(f, event(step=float("inf"))),
    "step of 1e999": lambda f: events(f, event().replace('"step": 5', '"step": 1e999')),
    "no number": lambda f: events(f, event(step=float("nan"))),
    "negative step": lambda f: events(f, event(step=-4)),
    "huge step": lambda f: events(f, event(step=10**30)),
    "deep JSON": lambda f: events(f, DEEP, event(why=[])),
    "long line": lambda f: events(f, event(why="x" * (1 << 21))),
    "head out of bounds": lambda f: events(f, event(heads=[2**31]), event(heads=[-1])),
    "unknown kind": lambda f: events(f, event(kind="party")),
    "kind no text": lambda f: events(f, event(kind=7), event(rule=None), event(site={})),
    "half a surrogate pair": lambda f: events(f, event(why="\ud800", site="\udfff")),
    "no event": lambda f: events(f, "null", "7", "{}", "[]", '"x"', ""),
    "bytes": lambda f: events(f, "\x00\x01"),
    "far head": lambda f: rows(f, (5, "h.9", 3, 2**31, "max_logit", 1.0)),
    "far layer and head": lambda f: rows(
        f, (5, "h.9", 1024, 0, "max_logit", 1.0), (5, "h.9", 3, 1024, "max_logit", 1.0)
    ),
    "negative layer": lambda f: rows(f, (5, "h.9", -1, 0, "max_logit", 1.0)),
    "negative head": lambda f: rows(f, (5, "h.9", 0, -1, "max_logit", 1.0)),
    "negative sample step": lambda f: rows(f, (-5, "h.0", 0, 0, "max_logit", 1.0)),
    "sample step too far": lambda f: rows(f, (2**62, "h.0", 0, 0, "max_logit", 1.0)),
    "nulls": lambda f: rows(
        f, (None, "h.0", 0, 0, "max_logit", 1.0), (5, None, None, None, None, None)
    ),
    "session from infinity": lambda f: session(f, '{"start_step": 1e999, "metadata": {}}'),
    "session from -7": lambda f: session(f, '{"start_step": -7, "metadata": {}}'),
    "deep session": lambda f: session(f, '{"start_step": 3, "metadata": {"a": ' + DEEP + "}}"),
    "session of a list": lambda f: session(f, "[1, 2]"),
}
#: Kept: a newer version may know it.
KEPT = {"unknown kind", "half a surrogate pair"}


def session(folder: Path, text: str) -> None:
    """A later session that has recorded what the first has, and whose own file is broken."""
    made = folder / f"session-0002-{len(list(folder.iterdir())):08x}.json"
    made.write_text(text)
    samples = min(folder.glob("samples-0001-*"))
    segment = f"{made.stem.replace('session', 'samples')}-00000000-00000000.parquet"
    (folder / segment).write_bytes(samples.read_bytes())


def resume(folder: Path) -> None:
    failures: list[Exception] = []
    stages = Stages(False, lambda stage, error: failures.append(error))
    journal = Journal(Settings(dirpath=folder), stages)
    journal.open(200, lambda: [Event(100, "alarm", "h.1", (2,), "it grew")], True)
    journal.add([Sample(200, "h.0", 0, "max_logit", (7.0,) * 4)])
    journal.record(Event(200, "switch", "h.1", (2,), "why", stabilizer="compensated"))
    journal.close()
    assert failures == [] and stages.off == set()


def command(name: str, *arguments: object) -> str:
    """What a command prints to standard error; it must end well."""
    result = CliRunner().invoke(app, [name, *map(str, arguments)])
    assert result.exit_code == 0, (result.stderr, result.exception)
    assert "Traceback" not in result.output
    return result.stderr


@pytest.mark.parametrize("name", CORRUPTIONS)
def test_what_is_broken_is_left_out_and_told_in_a_sentence(name, tmp_path, caplog):
    folder = tmp_path / "run"
    write_run(folder)
    CORRUPTIONS[name](folder)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        frame, happened = read_run(folder), read_events(folder)
    told = list(dict.fromkeys(str(warning.message) for warning in caught))
    assert all(line.startswith("left out ") and len(line) < 500 for line in told)
    assert (told == []) == (name in KEPT)
    assert set(STEPS) <= set(frame["step"]) and 100 in set(happened["step"])
    caplog.clear()
    resume(folder)
    logged = [record.getMessage() for record in caplog.records]
    assert [line for line in logged if line.startswith("left out ")] == told
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        # Of what came before step 200 nothing is lost, and the rest gave way.
        frame = read_run(folder)
        assert set(range(0, 200, 10)) | {200} <= set(frame["step"]) and frame["step"].max() == 200
        assert {100, 200} <= set(read_events(folder)["step"])
        assert read_metadata(folder)["lr"] == 1


def test_a_folder_with_all_of_it_has_a_report_a_replay_and_a_live_page(tmp_path):
    pytest.importorskip("starlette", reason="the extra `live` is not installed")
    from guardbit.dashboards.live import LiveRun

    folder = tmp_path / "run"
    write_run(folder)
    for corrupt in CORRUPTIONS.values():
        corrupt(folder)
    for name in ("report", "replay"):
        said = [line for line in command(name, folder).splitlines() if line[:5] != "run: "]
        assert len(said) > 10 and all(line.startswith("guardbit: left out ") for line in said)
    page = (folder / "report.html").read_text()
    assert "2 layers · 8 heads" in page and "layer 1, head 2" in page and "steps 0 to 290" in page
    watcher = LiveRun(folder)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        watcher.look()
    state = json.loads(json.dumps(watcher.state(), allow_nan=False))
    assert (state["layers"], state["heads"], state["last_step"]) == (2, 4, 290)
    assert [1, 2] in state["map"]["alarmed"]
    assert "max_logit" in watcher.page.head(1, 2)["indicators"]


def test_a_warning_says_how_much_and_where(tmp_path):
    write_run(tmp_path)
    CORRUPTIONS["nulls"](tmp_path)
    CORRUPTIONS["no event"](tmp_path)
    made = {path.name.partition("-")[0]: path for path in tmp_path.glob("*-00000091-*")}
    with pytest.warns(UserWarning, match=re.escape(f"left out 2 of 3 rows of {made['samples']}: ")):
        assert (read_run(tmp_path)["indicator"] == "delta_bias_abs").sum() == 1
    with pytest.warns(UserWarning, match=re.escape(f"left out 6 of 7 events of {made['events']}")):
        assert read_events(tmp_path)["step"].tolist() == [5, 100]


@pytest.mark.parametrize("make", [os.mkfifo, zero])
def test_a_pipe_or_a_device_is_no_csv(tmp_path, make):
    make(tmp_path / "run.csv")
    result = CliRunner().invoke(app, ["replay", str(tmp_path / "run.csv")])
    assert result.exit_code == 2
    assert result.stderr == (
        f"guardbit: there is no run at {tmp_path}/run.csv: it is neither a file nor a folder\n"
    )
