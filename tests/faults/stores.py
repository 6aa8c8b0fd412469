"""Corrupts the folders of runs at random and lets every command read them.

A command must end with a sentence, not with a traceback, within a minute and within 1 GB. What is
called `watch` is what the live page reads.
"""

import contextlib
import json
import random
import resource
import shutil
import sys
import tempfile
import traceback
import warnings
from argparse import Namespace
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import guardbit
from guardbit.records import Event, Sample
from guardbit.store import RunWriter
from tests.faults.rows import Job, collect
from tests.faults.running import apart, warm_up

#: Seconds and bytes that a command may take.
READ_TIMEOUT_SECONDS, MEMORY = 60.0, 1 << 30

ARGUMENTS = {
    "report": lambda run: ["report", str(run), "--output", str(run.parent / "report.html")],
    "replay": lambda run: ["replay", str(run), "--json"],
    "diagnose": lambda run: ["diagnose", str(run)],
}
COMMANDS = (*ARGUMENTS, "watch")

_WORDS = [
    None, True, -1, 0, 2**70, 1e308, "", "x" * 10_000, "\x1b[2J", "<script>", "../../etc", [], {},
    [[[]]], "NaN", [None] * 50, {"a": {"a": {}}},
]  # fmt: skip


def write_run(folder: Path, chance: random.Random) -> None:
    """Writes a small run, or copies a recorded one."""
    if chance.random() < 0.1:
        shutil.copytree(Path(guardbit.__file__).parent / "recorded" / "lost", folder)
        return
    for start in (None, 150):
        with RunWriter(folder, metadata={"settings": {}}, start_step=start) as writer:
            for step in range(0 if start is None else 160, 300, 10):
                for layer in range(2):
                    values = tuple(chance.random() for _ in range(4))
                    writer.add([Sample(step, f"h.{layer}", layer, "max_logit", values)])
                writer.add([Sample(step, "", -1, "loss", (chance.random(),))])
            writer.event(Event(200, "alarm", "h.1", (2,), "it grew", rule="head_growth"))
            writer.event(Event(210, "switch", "h.1", (2,), "it grew", stabilizer="exact_delta"))


def _flipped(data: bytes, chance: random.Random) -> bytes:
    flipped = bytearray(data)
    for _ in range(chance.choice((1, 3, 50))):
        if flipped:
            flipped[chance.randrange(len(flipped))] ^= 1 << chance.randrange(8)
    return bytes(flipped)


def _with_more(data: bytes, chance: random.Random) -> bytes:
    place = chance.randrange(len(data) + 1)
    return data[:place] + chance.randbytes(chance.choice((1, 100))) + data[place:]


#: What may take the place of a file's bytes; "remove", "folder", "swap" and "change" are files'.
BYTES: dict[str, Callable[[bytes, random.Random], bytes]] = {
    "flip": _flipped,
    "cut": lambda data, chance: data[: chance.randrange(len(data) + 1)],
    "empty": lambda data, chance: b"",
    "garbage": lambda data, chance: chance.randbytes(chance.choice((10, 10_000))),
    "twice": lambda data, chance: data * 2,
    "insert": _with_more,
}


def corrupt(folder: Path, chance: random.Random) -> str:
    """Corrupts one file of a folder; returns how."""
    files = sorted(p for p in folder.rglob("*") if p.is_file())
    if not files:
        return "nothing is left"
    path = chance.choice(files)
    ways = [*BYTES, "remove", "folder", "swap"]
    if path.suffix in (".json", ".jsonl"):
        ways += ["change"] * 6
    way = chance.choice(ways)
    if way in ("remove", "folder"):
        path.unlink()
        if way == "folder":
            path.mkdir()
    elif way == "swap":
        other = chance.choice(sorted(p for p in path.parent.iterdir() if p.is_file()))
        path.write_bytes(other.read_bytes())
    elif way == "change":
        _change(path, chance)
    else:
        path.write_bytes(BYTES[way](path.read_bytes(), chance))
    return f"{way} {path.name}"


def _change(path: Path, chance: random.Random) -> None:
    """Puts another value somewhere into JSON."""
    try:
        text = path.read_text()
        lines = text.splitlines() if path.suffix == ".jsonl" else [text]
        place = chance.randrange(len(lines))
        value = json.loads(lines[place])
    except ValueError:  # no JSON any more, or nothing is left
        path.write_bytes(_with_more(path.read_bytes(), chance))
        return
    lines[place] = json.dumps(_changed(value, chance))
    path.write_text("\n".join(lines) + "\n")


def _changed(value: Any, chance: random.Random) -> Any:
    if isinstance(value, dict) and value and chance.random() < 0.9:
        key = chance.choice(sorted(value))
        return {**value, key: _changed(value[key], chance)}
    if isinstance(value, list) and value and chance.random() < 0.8:
        place = chance.randrange(len(value))
        return [_changed(x, chance) if i == place else x for i, x in enumerate(value)]
    return chance.choice(_WORDS)


def read(command: str, folder: Path) -> str:
    """Runs a command on a folder; returns its traceback, or ""."""
    from typer.testing import CliRunner

    from guardbit.cli import app
    from guardbit.dashboards.live import LiveRun

    warnings.simplefilter("ignore")
    try:
        if command == "watch":
            watcher = LiveRun(folder)
            for _ in range(2):
                with contextlib.suppress(OSError, ValueError):  # a sentence, which the page shows
                    watcher.look()
            json.dumps(watcher.state(), allow_nan=False)
            # What is lost is not found; the page answers with 404.
            with contextlib.suppress(LookupError):
                json.dumps(watcher.page.head(0, 0), allow_nan=False)
            with contextlib.suppress(LookupError):
                json.dumps(watcher.page.curves("max_logit"), allow_nan=False)
            return ""
        result = CliRunner().invoke(app, ARGUMENTS[command](folder))
    except Exception:
        return traceback.format_exc()
    error = result.exception
    if error is None or isinstance(error, SystemExit):
        return ""
    return "".join(traceback.format_exception(error))


def _try(job: Job) -> list[str]:
    """Corrupts a run of a seed and lets a command read it; returns the result and its details."""
    seed, command = job
    chance = random.Random(int(seed))
    root = Path(tempfile.mkdtemp(prefix="guardbit-stores-"))
    folder = root / "run"
    try:
        write_run(folder, chance)
        how = "; ".join(corrupt(folder, chance) for _ in range(chance.choice((1, 1, 3))))

        def run() -> tuple[str, int]:
            return read(command, folder), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

        try:
            failure, kilobytes = apart(run, READ_TIMEOUT_SECONDS)
        except (TimeoutError, ChildProcessError) as error:
            return ["hung", f"{how}: {error}"]
        if failure:
            return ["traceback", f"{how}: {failure}"]
        if kilobytes * 1024 > MEMORY:
            return ["memory", f"{how}: {kilobytes / 2**20:.2f} GB"]
        return ["sound", how]
    finally:
        shutil.rmtree(root, ignore_errors=True)


def _warm_up() -> None:
    """Imports what the commands import, once for all forks."""
    import guardbit.cli
    import guardbit.dashboards.figures
    import guardbit.dashboards.live
    import guardbit.doctor.diagnose
    import guardbit.monitor.replay

    assert guardbit.cli is not None
    warm_up()


def main(options: Namespace) -> int:
    numbers = range(options.seed, options.seed + options.number)
    jobs = [(str(number), command) for number in numbers for command in COMMANDS]
    found = collect(options, ["seed", "command", "result", "detail"], jobs, _try, _warm_up)
    counted = Counter((command, result) for _, command, result, _ in found)
    for (command, result), number in sorted(counted.items()):
        print(f"{command}, {result}: {number}")
    broken = [row for row in found if row[2] != "sound"]
    for number, command, result, detail in broken[:20]:
        print(f"seed {number}, {command}, {result}: {detail}", file=sys.stderr)
    return 1 if broken else 0
