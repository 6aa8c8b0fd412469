"""Corrupts the folders of runs at random and lets every command read them.

    python -m tests.faults.stores --corruptions 1000 --workers 8 --minutes 9 --csv stores.csv

What the CSV holds is left out, so that it goes on where it stopped.
A command must end with a sentence, not with a traceback, within a minute and within 1 GB. What is
called `watch` is what the live page reads.
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import json
import multiprocessing
import os
import random
import resource
import shutil
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    os.environ.update(CUDA_VISIBLE_DEVICES="", OMP_NUM_THREADS="1")

#: Seconds and bytes that a command may take.
PATIENCE, MEMORY = 60.0, 1 << 30

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
    import guardbit
    from guardbit.records import Event, Sample
    from guardbit.store import RunWriter

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


def corrupt(folder: Path, chance: random.Random) -> str:
    """Corrupts one file of a folder; returns how."""
    files = sorted(p for p in folder.rglob("*") if p.is_file())
    if not files:
        return "nothing is left"
    path = chance.choice(files)
    ways: list[Callable[[Path, random.Random], None]] = [
        _flip, _cut, _empty, _garbage, _remove, _twice, _insert, _folder, _swap
    ]  # fmt: skip
    if path.suffix in (".json", ".jsonl"):
        ways += [_change] * 6
    way = chance.choice(ways)
    way(path, chance)
    return f"{way.__name__[1:]} {path.name}"


def _flip(path: Path, chance: random.Random) -> None:
    data = bytearray(path.read_bytes())
    for _ in range(chance.choice((1, 3, 50))):
        if data:
            data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
    path.write_bytes(data)


def _cut(path: Path, chance: random.Random) -> None:
    data = path.read_bytes()
    path.write_bytes(data[: chance.randrange(len(data) + 1)])


def _empty(path: Path, chance: random.Random) -> None:
    path.write_bytes(b"")


def _garbage(path: Path, chance: random.Random) -> None:
    path.write_bytes(chance.randbytes(chance.choice((10, 10_000))))


def _remove(path: Path, chance: random.Random) -> None:
    path.unlink()


def _twice(path: Path, chance: random.Random) -> None:
    path.write_bytes(path.read_bytes() * 2)


def _insert(path: Path, chance: random.Random) -> None:
    data = path.read_bytes()
    place = chance.randrange(len(data) + 1)
    path.write_bytes(data[:place] + chance.randbytes(chance.choice((1, 100))) + data[place:])


def _folder(path: Path, chance: random.Random) -> None:
    path.unlink()
    path.mkdir()


def _swap(path: Path, chance: random.Random) -> None:
    other = chance.choice(sorted(p for p in path.parent.iterdir() if p.is_file()))
    path.write_bytes(other.read_bytes())


def _change(path: Path, chance: random.Random) -> None:
    """Puts another value somewhere into JSON."""
    try:
        text = path.read_text()
        lines = text.splitlines() if path.suffix == ".jsonl" else [text]
        place = chance.randrange(len(lines))
        value = json.loads(lines[place])
    except ValueError:  # no JSON any more, or nothing is left
        return _insert(path, chance)
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
            json.dumps(watcher.state(-1, None), allow_nan=False)
            # What is lost is not found; the page answers with 404.
            with contextlib.suppress(LookupError):
                json.dumps(watcher.head(0, 0), allow_nan=False)
            with contextlib.suppress(LookupError):
                json.dumps(watcher.curves("max_logit"), allow_nan=False)
            return ""
        result = CliRunner().invoke(app, ARGUMENTS[command](folder))
    except Exception:
        return traceback.format_exc()
    error = result.exception
    if error is None or isinstance(error, SystemExit):
        return ""
    return "".join(traceback.format_exception(error))


def try_one(seed: int, command: str) -> tuple[str, str]:
    """Corrupts a run and lets one command read it; returns the result and what there is to say."""
    from tests.faults.running import apart

    chance = random.Random(seed)
    root = Path(tempfile.mkdtemp(prefix="guardbit-stores-"))
    folder = root / "run"
    try:
        write_run(folder, chance)
        how = "; ".join(corrupt(folder, chance) for _ in range(chance.choice((1, 1, 3))))

        def run() -> tuple[str, int]:
            return read(command, folder), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

        try:
            failure, kilobytes = apart(run, PATIENCE)
        except (TimeoutError, ChildProcessError) as error:
            return "hung", f"{how}: {error}"
        if failure:
            return "traceback", f"{how}: {failure}"
        if kilobytes * 1024 > MEMORY:
            return "memory", f"{how}: {kilobytes / 2**20:.2f} GB"
        return "sound", how
    finally:
        shutil.rmtree(root, ignore_errors=True)


def _warm_up() -> None:
    """Imports what the commands import, once for all forks."""
    import guardbit.cli
    import guardbit.dashboards.figures
    import guardbit.dashboards.live
    import guardbit.diagnosis.diagnosis
    import guardbit.monitor.replay

    assert guardbit.cli is not None


def _work(jobs: Any, results: Any, deadline: float) -> None:
    from tests.faults.running import warm_up

    try:
        warm_up()
        _warm_up()
        while time.time() < deadline and (job := jobs.get()) is not None:
            results.put((*job, *try_one(*job)))
    finally:
        results.put(None)


def run(
    corruptions: int, workers: int, seed: int, minutes: float, path: Path
) -> list[tuple[int, str, str, str]]:
    """Tries each command on as many corrupted runs; returns seed, command, result and detail."""
    found: dict[tuple[int, str], tuple[int, str, str, str]] = {}
    if path.exists():
        with path.open(newline="") as file:
            for number, command, *rest in list(csv.reader(file))[1:]:
                found[int(number), command] = (int(number), command, *rest)
    context = multiprocessing.get_context("spawn")
    jobs, results = context.Queue(), context.Queue()
    for job in ((seed + n, command) for n in range(corruptions) for command in COMMANDS):
        if job not in found:
            jobs.put(job)
    for _ in range(workers):
        jobs.put(None)
    deadline = time.time() + 60 * minutes
    processes = [
        context.Process(target=_work, args=(jobs, results, deadline)) for _ in range(workers)
    ]
    for process in processes:
        process.start()
    is_new, working = not path.exists(), workers
    with path.open("a", newline="") as file:
        writer = csv.writer(file)
        if is_new:
            writer.writerow(["seed", "command", "result", "detail"])
        while working:
            one = results.get()
            if one is None:
                working -= 1
                continue
            found[one[:2]] = one
            writer.writerow(one)
            file.flush()
    jobs.cancel_join_thread()  # what nobody has taken need not be sent
    for process in processes:
        process.join()
    return sorted(found.values())


def main() -> int:
    """Runs the command."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--corruptions", type=int, default=1000)
    parser.add_argument("--workers", type=int, default=os.cpu_count())
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--csv", type=Path, default=Path("stores.csv"))
    options = parser.parse_args()
    began = time.monotonic()
    found = run(options.corruptions, options.workers, options.seed, options.minutes, options.csv)
    counted = Counter((command, result) for _, command, result, _ in found)
    print("| command | corrupted runs | traceback | hung | memory |\n|---|---|---|---|---|")
    for command in COMMANDS:
        bad = [counted[command, result] for result in ("traceback", "hung", "memory")]
        tried = sum(number for (name, _), number in counted.items() if name == command)
        print(f"| {command} | {tried} | {' | '.join(map(str, bad))} |")
    print(f"{time.monotonic() - began:.0f} s")
    broken = [one for one in found if one[2] != "sound"]
    for number, command, result, detail in broken[:20]:
        print(f"seed {number}, {command}, {result}: {detail}", file=sys.stderr)
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
