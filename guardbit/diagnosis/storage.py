"""Snapshots: inputs of a few heads at one step, in a file beside the telemetry.

`snapshot-000001200.pt` holds those of step 1,200: a dict that `torch.load(weights_only=True)`
reads, of plain Python and tensors alone.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import NamedTuple

import torch

from guardbit.diagnosis.head import HeadInputs
from guardbit.store.files import publish

_FORMAT = 1
_NAME = re.compile(r"snapshot-(\d+)\.pt")


class KeptHead(NamedTuple):
    """One head at one step.

    Attributes:
        step: Optimizer step.
        site: Name of the attention module.
        head: Number of the head.
        stabilizer: What ran in it; unless "none", the kernel's output and dQ are not kept.
        inputs: The head, in the host's memory.
        kernel: Name of the engine that ran it, "" where it is not known.
    """

    step: int
    site: str
    head: int
    stabilizer: str
    inputs: HeadInputs
    kernel: str = ""


def write_snapshots(folder: Path, step: int, snapshots: Sequence[KeptHead]) -> Path:
    """Writes the snapshots of one step, or nothing at all."""
    heads = [
        {
            "site": one.site,
            "head": one.head,
            "stabilizer": one.stabilizer,
            "kernel": one.kernel,
            **{field.name: getattr(one.inputs, field.name) for field in fields(HeadInputs)},
        }
        for one in snapshots
    ]
    path = folder / f"snapshot-{step:09d}.pt"
    publish(path, lambda stream: torch.save({"format": _FORMAT, "heads": heads}, stream))
    return path


def snapshot_files(folder: Path) -> dict[int, Path]:
    """Returns the files of a run's snapshots by their steps, in order."""
    found = {}
    if folder.is_dir():
        for path in sorted(folder.iterdir()):
            if match := _NAME.fullmatch(path.name):
                found[int(match[1])] = path
    return found


def read_snapshots(folder: Path) -> list[KeptHead]:
    """Reads the snapshots of a run, in the order of their steps."""
    names = [field.name for field in fields(HeadInputs)]
    found = []
    for step, path in snapshot_files(folder).items():
        try:
            held = torch.load(path, map_location="cpu", weights_only=True)
            if held["format"] != _FORMAT:
                raise ValueError("it is of another version of GuardBit")
            for one in held["heads"]:
                inputs = HeadInputs(**{name: one[name] for name in names})
                kept = KeptHead(step, one["site"], one["head"], one["stabilizer"], inputs)
                # Files of the first days do not say which kernel it was.
                found.append(kept._replace(kernel=one.get("kernel", "")))
        except OSError:
            raise
        except Exception as error:  # whatever unpickling a broken file raises
            why = str(error).partition("\n")[0]
            raise ValueError(f"the snapshot {path} cannot be read: {why}") from error
    return found
