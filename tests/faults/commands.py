"""Random arguments for every command: a sentence comes of it, never a traceback.

Paths are of all kinds: missing, empty, binary, too long, loops, folders where files belong. Values
of options are drawn too. `live` is only asked for what it refuses, as it would serve the rest.
"""

import os
import random
import shutil
import sys
import tempfile
import traceback
from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from typer.testing import CliRunner

from guardbit.cli import app
from tests.faults.stores import write_run

#: Of the options' values: numbers, words, and what is neither.
VALUES = (
    "", "-1", "0", "1", "2", "nan", "inf", "-inf", "1e400", "9" * 400, "0x10", "true", "none",
    "-", "--", "a\nb", "\x1b[2J", "ünïcode", "../..", "*", "x" * 5000, "head_growth.norm=nan",
    "head_growth.norm=0.1", "head_growth.norm", "gradient_error.stakes=1", "=", "h.0:1", "h.0:-1",
    ":", "1,2,3", "2,4,2,16,16", "2,4,3,16,16", "0,0,0,0,0", "9,9,9,9,999999999", "causal",
    "window:0", "window:-1", "window:x", "bf16", "int8",
)  # fmt: skip

#: Command -> its options, each with whether it takes a value.
OPTIONS = {
    "report": {"--output": True, "--json": False, "--frobnicate": True},
    "replay": {"--json": False, "--threshold": True},
    "diagnose": {"--head": True, "--json": False},
    "doctor": {"--shape": True, "--mask": True, "--dtype": True, "--json": False},
    "live": {"--port": True},
    "": {"--version": False, "--help": False, "frobnicate": False},
}


def zoo(folder: Path) -> list[str]:
    """Makes paths of all kinds in a folder, and returns them."""
    run, header = folder / "run", "step,site,layer,head,indicator,value\n"
    write_run(run, random.Random(0))
    (folder / "empty").mkdir()
    (folder / "empty.csv").write_bytes(b"")
    (folder / "binary.csv").write_bytes(random.Random(0).randbytes(4000))
    (folder / "not.csv.gz").write_text("step,site\n1,2\n")
    (folder / "header.csv").write_text(header)
    (folder / "words.csv").write_text(f"{header}a,b,c,d,e,f\n")
    (folder / "huge.csv").write_text(f"{header}{2**62},h,0,{10**9},max_logit,1e308\n")
    (folder / "loop").symlink_to(folder / "loop")
    (folder / "dangling").symlink_to(folder / "nowhere")
    (folder / "ünï\ncode").mkdir()
    kept = [str(path) for path in sorted(folder.iterdir())]
    session = next(run.glob("session-*.json"))
    return [
        *kept, str(session), str(run / "missing"), str(folder / ("n" * 300)), "", ".", "-",
        "/dev/null", "nul\0byte", str(folder / "empty.csv" / "below"),
    ]  # fmt: skip


@contextmanager
def in_a_zoo() -> Iterator[list[str]]:
    """Works in a new folder with paths of all kinds, and removes it."""
    before, folder = Path.cwd(), Path(tempfile.mkdtemp(prefix="guardbit-commands-"))
    try:
        paths = zoo(folder)
        (folder / "here").mkdir()
        os.chdir(folder / "here")
        yield paths
    finally:
        os.chdir(before)
        shutil.rmtree(folder, ignore_errors=True)


def draw(chance: random.Random, paths: list[str]) -> list[str]:
    """Draws a command with its arguments."""
    command = chance.choice(list(OPTIONS))
    arguments = [command] if command else []
    if command == "live":
        arguments.append(chance.choice([path for path in paths if Path(path[:200]).is_file()]))
    elif command not in ("doctor", ""):
        arguments += chance.choices(paths, k=chance.choice((0, 1, 1, 1, 1, 2, 5)))
    for _ in range(chance.choice((0, 1, 1, 2, 4))):
        name = chance.choice(list(OPTIONS[command]))
        arguments.append(name)
        if OPTIONS[command][name]:
            arguments.append(chance.choice((*VALUES, *paths)))
    if command == "doctor":
        # Something that it refuses: examinations take time, and have tests of their own.
        arguments += ["--shape", chance.choice([x for x in VALUES if x != "2,4,2,16,16"])]
    chance.shuffle(tail := arguments[1:])
    return arguments[:1] + (tail if chance.random() < 0.3 else arguments[1:])


def failure_of(arguments: list[str]) -> str:
    """Runs a command; returns what is wrong with how it ended, or ""."""
    result = CliRunner().invoke(app, arguments)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        return "".join(traceback.format_exception(result.exception))
    if result.exit_code not in (0, 1, 2):
        return f"exit code {result.exit_code}"
    if "Traceback" in result.output or "\x1b[2J" in result.output:
        return f"it prints {result.output!r}"
    if result.exit_code == 2 and not result.output.strip():
        return "it refuses without a word"
    return ""


def main(options: Namespace) -> int:
    bad = 0
    with in_a_zoo() as paths:
        for seed in range(options.seed, options.seed + options.number):
            arguments = draw(random.Random(seed), paths)
            if failure := failure_of(arguments):
                bad += 1
                print(f"seed {seed}: {arguments}\n{failure}", file=sys.stderr)
    print(f"{options.number} calls, {bad} that ended otherwise than with a sentence")
    return 1 if bad else 0
