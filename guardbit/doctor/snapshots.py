"""Snapshots: inputs of a few heads at one step, in a file beside the telemetry.

`snapshot-000001200.pt` holds the inputs of step 1,200: a dict that `torch.load(weights_only=True)`
reads, of plain Python and tensors only.
"""

import re
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import NamedTuple

import torch

from guardbit.doctor.attention import HeadInputs
from guardbit.store import read_metadata
from guardbit.store.files import publish

_FORMAT = 1
_NAME = re.compile(r"snapshot-(\d+)\.pt")


class KeptHead(NamedTuple):
    """One head at one step."""

    step: int  # optimizer step
    site: str  # name of the attention module
    head: int  # number of the head
    stabilizer: str  # what ran in it; unless "none", the kernel's output and dQ are not kept
    inputs: HeadInputs  # the head, in the host's memory
    kernel: str = ""  # name of the engine that ran it, "" if unknown


def write_snapshots(folder: Path, step: int, snapshots: Sequence[KeptHead]) -> Path:
    """Writes the snapshots of one step, or nothing at all."""
    # One dict per head: which head it is, and its inputs.
    heads = [{**one._asdict(), **vars(one.inputs)} for one in snapshots]
    for head in heads:
        del head["step"], head["inputs"]
    path = folder / f"snapshot-{step:09d}.pt"
    publish(path, lambda stream: torch.save({"format": _FORMAT, "heads": heads}, stream))
    return path


def snapshot_files(folder: Path) -> dict[int, Path]:
    """Returns the files of a run's snapshots by their steps, in order."""
    matches = [(_NAME.fullmatch(path.name), path) for path in sorted(folder.glob("snapshot-*"))]
    return {int(match[1]): path for match, path in matches if match}


def read_snapshots(folder: Path) -> list[KeptHead]:
    names = [field.name for field in fields(HeadInputs)]
    found = []
    for step, path in snapshot_files(folder).items():
        try:
            held = torch.load(path, map_location="cpu", weights_only=True)
            if held["format"] != _FORMAT:
                raise ValueError("another version of GuardBit wrote it")
            for one in held["heads"]:
                # Earlier snapshots hold more.
                inputs = HeadInputs(**{name: one[name] for name in names})
                what = {name: one[name] for name in ("site", "head", "stabilizer", "kernel")}
                found.append(KeptHead(step, **what, inputs=inputs))
        except Exception as error:  # whatever unpickling a broken file raises
            why = str(error).partition("\n")[0]
            raise ValueError(f"the snapshot {path} cannot be read: {why}") from error
    return found


def heads_of_run(folder: Path, wanted: Sequence[str] = ()) -> list[list[KeptHead]]:
    """Reads the snapshots of a run, head by head, the first that was kept first."""
    heads: dict[str, list[KeptHead]] = {}
    for snapshot in read_snapshots(folder):
        heads.setdefault(f"{snapshot.site}:{snapshot.head}", []).append(snapshot)
    if not heads:
        why = read_metadata(folder).get("snapshots") or (
            "no head was alarmed, no sampled step followed, or snapshot_megabytes was 0"
        )
        raise ValueError(
            f"the run at {folder} holds no snapshots: {why}; session.snapshot(site, heads) keeps"
            " any head"
        )
    for name in wanted:
        if name not in heads:
            raise ValueError(f"there is no snapshot of {name}; there are {', '.join(heads)}")
    chosen = [kept for name, kept in heads.items() if not wanted or name in wanted]
    return [[one for one in kept if one.stabilizer == "none"] or kept for kept in chosen]
