"""Raises an exception at a chosen line of GuardBit, the n-th time that it runs."""

from __future__ import annotations

import random
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, NamedTuple

import torch

import guardbit

ROOT = str(Path(guardbit.__file__).parent)

#: The guard itself, whose few lines are what everything else rests on. It has tests of its own.
GUARD = str(Path(ROOT, "guard.py"))

ERRORS: tuple[type[BaseException], ...] = (
    MemoryError, RecursionError, torch.OutOfMemoryError, RuntimeError, KeyError, OSError,
    OverflowError, KeyboardInterrupt, SystemExit,
)  # fmt: skip


class Point(NamedTuple):
    """The `count`-th time, from 0, that a line of a file runs."""

    file: str
    line: int
    count: int

    def __str__(self) -> str:
        return f"{Path(self.file).relative_to(Path(ROOT).parent)}:{self.line} x{self.count}"


def is_ours(file: str) -> bool:
    return file.startswith(ROOT) and file != GUARD


@contextmanager
def counted(counts: Counter[tuple[str, int]]) -> Iterator[None]:
    """Counts how often each line of GuardBit runs."""

    def count(file: str, line: int) -> None:
        counts[file, line] += 1

    _watch(count, None)
    try:
        yield
    finally:
        sys.settrace(None)


class Injection:
    """Raises an error at a point, once in this process; `mark` is a file that says so to others."""

    def __init__(self, point: Point, error: BaseException, mark: Path | None = None) -> None:
        self.has_fired = False
        self._mark = mark
        self._point, self._error = point, error
        self._left = point.count

    def __enter__(self) -> Injection:
        _watch(self._line, self._point)
        return self

    def __exit__(self, *_: Any) -> None:
        sys.settrace(None)

    def disarm(self) -> None:
        """Lets it never fire in this process."""
        self._left = sys.maxsize

    def _line(self, file: str, line: int) -> None:
        if line != self._point.line or self.has_fired:
            return
        self._left -= 1
        if self._left < 0:
            self.has_fired = True
            if self._mark is not None:
                self._mark.touch()
            raise self._error


def choose(counts: dict[tuple[str, int], int], chance: random.Random) -> Point:
    """Draws a line, each with the same probability, and one of its runs."""
    (file, line), count = chance.choice(sorted(counts.items()))
    return Point(file, line, chance.randrange(count))


_holds: dict[CodeType, bool] = {}


def _watch(observed: Any, point: Point | None) -> None:
    _holds.clear()

    def local(frame: FrameType, event: str, _: Any) -> Any:
        if event == "line":
            observed(frame.f_code.co_filename, frame.f_lineno)
        return local

    def each_call(frame: FrameType, event: str, _: Any) -> Any:
        code = frame.f_code
        wanted = _holds.get(code)
        if wanted is None:
            wanted = _holds[code] = _is_wanted(code, point)
        return local if wanted else None

    sys.settrace(each_call)


def _is_wanted(code: CodeType, point: Point | None) -> bool:
    if point is None:
        return is_ours(code.co_filename)
    if code.co_filename != point.file:
        return False
    return any(line == point.line for _, _, line in code.co_lines())
