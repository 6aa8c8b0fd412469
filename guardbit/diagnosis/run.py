"""Diagnoses the heads of a run's snapshots, within a time."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from guardbit.diagnosis.diagnosis import Diagnosis, diagnose
from guardbit.diagnosis.storage import KeptHead, read_snapshots
from guardbit.store import is_run, read_events, read_metadata


class Diagnosed(NamedTuple):
    """A head and what was found of it.

    Attributes:
        site: Name of the attention module.
        head: Number of the head.
        steps: The steps of the snapshots that were looked at.
        stabilizer: What ran in the head then; unless "none", what its kernel returned is not known,
            and FlashAttention-2's roundings are taken for its own.
        found: The diagnosis.
        kernel: Name of the engine that ran it, "" where it is not known.
    """

    site: str
    head: int
    steps: tuple[int, ...]
    stabilizer: str
    found: Diagnosis
    kernel: str = ""


def heads_of_run(folder: Path, wanted: Sequence[str] = ()) -> list[list[KeptHead]]:
    """Reads the snapshots of a run, head by head, the first that was kept first."""
    if folder.is_file():
        raise ValueError(
            f"cannot read a run from the file {folder}: the run's folder is needed, which holds the"
            " inputs of alarmed heads"
        )
    heads: dict[str, list[KeptHead]] = {}
    for snapshot in read_snapshots(folder):
        heads.setdefault(f"{snapshot.site}:{snapshot.head}", []).append(snapshot)
    if not heads:
        raise ValueError(f"{_why_none(folder)}; session.snapshot(site, heads) keeps any head")
    for name in wanted:
        if name not in heads:
            raise ValueError(f"there is no snapshot of {name}; there are {', '.join(heads)}")
    chosen = []
    for name, snapshots in heads.items():
        if not wanted or name in wanted:
            stock = [one for one in snapshots if one.stabilizer == "none"]
            chosen.append(stock or snapshots)
    return chosen


def diagnose_heads(heads: Iterable[list[KeptHead]], seconds: float) -> Iterator[Diagnosed]:
    """Diagnoses head after head; none is begun once the time is over, but the first one."""
    end = time.monotonic() + seconds
    for number, snapshots in enumerate(heads):
        if number and time.monotonic() > end:
            return
        last = snapshots[-1]
        yield Diagnosed(
            last.site,
            last.head,
            tuple(one.step for one in snapshots),
            last.stabilizer,
            diagnose([one.inputs for one in snapshots]),
            last.kernel,
        )


def last_verdict(folder: Path) -> str:
    """Returns the verdict that the run ends with, and why; "none" if it has none."""
    events = read_events(folder)
    verdicts = events[events["kind"] == "verdict"]
    if verdicts.empty:
        return "none"
    last = verdicts.iloc[-1]
    return f"{last['verdict']}: {last['why']}"


def _why_none(folder: Path) -> str:
    noted = read_metadata(folder).get("snapshots")
    if not noted and is_run(folder) and not _names_heads(folder):
        return "no head of this run was alarmed, so there is nothing to diagnose"
    reason = noted or "no head was alarmed with a sampled step to come, or snapshot_megabytes was 0"
    return f"the run at {folder} holds no snapshots: {reason}"


def _names_heads(folder: Path) -> bool:
    """Whether a head was alarmed, or named by an advisory."""
    events = read_events(folder)
    return any(events.loc[events["kind"].isin(("alarm", "advisory")), "heads"].map(len))
