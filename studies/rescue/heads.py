"""Inputs of the first alarmed heads, kept all through a run and thinned for the repository."""

from __future__ import annotations

import zipfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import torch
from lightning.pytorch.callbacks import Callback

from guardbit import AttentionMonitor
from guardbit.doctor.snapshots import (
    KeptHead,
    read_snapshots,
    snapshot_files,
    write_snapshots,
)

#: Heads of a run that are kept all through it: the first alarmed ones.
MOST = 4


class KeepHeads(Callback):
    """Keeps the first alarmed heads again and again: at the alarm little of the failure is there.

    Args:
        monitor: The run's.
        every: After how many steps again.
    """

    def __init__(self, monitor: AttentionMonitor, every: int) -> None:
        self.monitor, self.every = monitor, every
        self.heads: list[tuple[str, int]] = []

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        """Asks for the heads at the next sampled step."""
        session = self.monitor.session
        if session is None:
            return
        for site, heads in session.alarmed_heads.items():
            self.heads += [(site, head) for head in sorted(heads) if (site, head) not in self.heads]
        if trainer.global_step % self.every == 0:
            for site, head in self.heads[:MOST]:
                session.snapshot(site, [head])


def pack_heads(folder: Path, target: Path, samples: int) -> None:
    """Copies some snapshots of the first kept head of a run, one sequence of each.

    Args:
        folder: Of the run.
        target: Folder to write to.
        samples: How many at most, spread over the run. A sequence of 1,024 tokens in a head of 64
            takes 0.6 MB.
    """
    kept = read_snapshots(folder)
    if not kept or not samples:
        return
    first = kept[0]
    mine = [one for one in kept if (one.site, one.head) == (first.site, first.head)]
    for place in np.unique(np.linspace(0, len(mine) - 1, samples).round().astype(int)):
        write_snapshots(target, mine[place].step, [_of_one_sequence(mine[place])])
    for path in snapshot_files(target).values():
        deflate(path)


def deflate(path: Path) -> None:
    """Compresses a snapshot; PyTorch reads such an archive as any other."""
    with zipfile.ZipFile(path) as stored:
        parts = {name: stored.read(name) for name in stored.namelist()}
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as smaller:
        for name, content in parts.items():
            smaller.writestr(name, content)


def _of_one_sequence(kept: KeptHead) -> KeptHead:
    inputs = kept.inputs
    names = ("q", "k", "v", "d_out", "out", "dq")
    # A copy: a view would be saved with all that it is a view of.
    parts: dict[str, torch.Tensor] = {
        name: value[:1].clone() for name in names if (value := getattr(inputs, name)) is not None
    }
    if inputs.mask is not None:
        parts["mask"] = inputs.mask[:1].clone()
    return kept._replace(inputs=replace(inputs, **parts))
