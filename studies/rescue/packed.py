"""Runs thinned for the repository, and read again."""

from __future__ import annotations

import argparse
import json
import re
import shutil
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pandas as pd
import pyarrow.parquet as pq

from guardbit import read_events, read_run
from guardbit.judgement import SHARES
from guardbit.records import Event
from guardbit.store import RunWriter, read_metadata
from guardbit.store.reading import samples_of
from studies.rescue.heads import pack_heads

#: Starts that are kept because they were alarmed before the one beside them, which is not kept.
#: They do not count where it is told how many runs are alarmed.
ALARMED_FIRST = ("stock-cudnn-lr1.5e-03-seed4-again40", "stock-cudnn-lr1.5e-03-seed9-again50")

#: Steps between the losses that are kept, and between all else.
LOSS_STEPS, HEAD_STEPS = 20, 200

#: Steps between audits that are kept of a run that audits all heads at each sample.
AUDIT_STEPS = 100
_KEPT = (
    "w_q_spectral_norm", "w_k_spectral_norm", "max_logit", "multiple_maxima_bf16",
    "attention_entropy", "key_common_mode",
)  # fmt: skip
AUDITS = ("dq_relative_error", "dq_coherent_error")

#: Folder of each run in the package -> the run of the study, after the start that it is a copy of.
_COPY = "cudnn-lr1.5e-03-seed10-again9"
SHOWN = {
    f"{name}{which}": (f"stock-{_COPY}0", f"{arm}-{_COPY}{number}-from3900")
    for number, which in ((1, ""), (2, "-again"))
    for name, arm in (("watched", "stock"), ("guarded", "rescue_layer-exact_delta"))
} | {"lost": ("stock-cudnn-lr1.5e-03-seed10",)}

#: Of the showcase's runs this is kept, too, and of each sample what rules read.
_SHOWN_TOO = "delta_bias_cumulative"
EACH_SAMPLE = ("w_q_spectral_norm", "max_logit")

#: Significant digits that are kept of a run's own values, and of heads'.
SCALAR_DIGITS, DIGITS = 5, 3


class Run(NamedTuple):
    """A packed run: its folder's name, what `about.json` said, its telemetry and its journal."""

    name: str
    facts: dict
    frame: pd.DataFrame
    events: pd.DataFrame

    @property
    def last(self) -> int:
        return int(self.frame["step"].max())


def kind_of(run: Run) -> str:
    """The architecture; runs made before there was a choice do not tell theirs."""
    return run.facts.get("architecture", "gpt2")


def step_of(checkpoint: str | Path) -> int:
    """The step in the name of a checkpoint, `step=6000.ckpt`."""
    return int(Path(checkpoint).stem.removeprefix("step=").partition("-")[0])


def begun_at(run: str) -> int | None:
    """The step at which a run began to go another way, if it was named (`--branch-step`)."""
    _, _, step = run.rpartition("-from")
    return int(step) if step.isdigit() else None


def again_of(run: str) -> int | None:
    """The number of a run among those that are alike, if it has one (`--again`)."""
    match = re.search(r"-again(\d+)", run)
    return int(match[1]) if match else None


def audits_all(audits: pd.DataFrame) -> bool:
    """Whether a run audited the same heads at all of its samples, and not one of them in turn.

    Args:
        audits: The rows of its telemetry that audits gave.
    """
    heads = audits.groupby("step")["head"].nunique()
    return len(heads) > 1 and int(heads.iloc[1:].min()) == audits["head"].nunique()


def pack(runs: Path, results: Path, snapshots: int = 0) -> None:
    """Thins every run below a folder for the repository.

    Kept are the journal and `kept_of` the telemetry. What is written is a run as any other, for
    `guardbit report`, `live`, `replay` and `diagnose`.

    Args:
        runs: Folder of the folders that `studies.rescue.train` wrote.
        results: Folder of the packed ones, another; those of the same names are replaced.
        snapshots: How many of the first alarmed head to keep of a run, one sequence of each.

    Raises:
        ValueError: If both folders are the same.
    """
    if runs.resolve() == results.resolve():
        raise ValueError(f"runs are packed into another folder than their own, {runs}")
    for about in sorted(runs.glob("*/about.json")):
        folder = about.parent
        frame = read_run(folder)
        if (beginning := begun_at(folder.name)) is not None:
            frame = frame[frame["step"] > beginning]
        study = json.loads(about.read_text())
        if (clock := folder / "clock.csv").exists():
            steps, seconds = np.loadtxt(clock, delimiter=",", ndmin=2).T
            study["clock"] = {"steps": steps.tolist(), "seconds": seconds.tolist()}
        target = results / folder.name
        metadata = {**read_metadata(folder), "study": study}
        if target.exists():
            shutil.rmtree(target)
        with RunWriter(target, metadata=metadata) as writer:
            writer.add(samples_of(kept_of(frame, folder.name)))
            for event in read_events(folder).to_dict("records"):
                writer.event(Event(**event))
        squeeze(target)
        pack_heads(folder, target, snapshots)


def kept_of(frame: pd.DataFrame, run: str = "") -> pd.DataFrame:
    """The telemetry that rules and tables read, of a run that is named.

    Losses of every 20th step and gradient norms of every 100th (they are sampled at every 50th), to
    five digits; to three rounding's shares, the audited errors of dQ and, of every 200th step, what
    else is read of all heads; where all heads were audited at each sample, errors of every 100th.
    """
    is_shown = _COPY in run
    names = (*_KEPT, _SHOWN_TOO) if is_shown else _KEPT
    thin = (frame["site"] == "") & (frame["step"] % LOSS_STEPS == 0)
    thin |= (frame["step"] % HEAD_STEPS == 0) & frame["indicator"].isin(names)
    thin |= frame["indicator"].isin(EACH_SAMPLE) & is_shown
    # One head of a layer in turn: thinned, some would never be seen. Not so of all of them.
    audited = frame["indicator"].isin(AUDITS)
    if audits_all(frame[audited]):
        audited &= frame["step"] % AUDIT_STEPS == 0
    kept = frame[thin | audited | frame["indicator"].isin(SHARES)]
    return rounded(kept, SCALAR_DIGITS if is_shown else DIGITS)


def rounded(frame: pd.DataFrame, of_heads: int = DIGITS) -> pd.DataFrame:
    """Telemetry with as many digits as are kept."""
    digits = np.where(frame["site"] == "", SCALAR_DIGITS, of_heads)
    values = [float(f"{x:.{n}g}") for x, n in zip(frame["value"], digits, strict=True)]
    return frame.assign(value=values)


def squeeze(folder: Path) -> None:
    """Writes a run's files anew with the same contents, as small as they can be."""
    order = ("indicator", "layer", "head", "step")
    for path in folder.glob("samples-*.parquet"):
        table = pq.read_table(path).sort_by([(name, "ascending") for name in order])
        pq.write_table(
            table, path, compression="brotli", compression_level=11, data_page_size=1 << 24,
            max_rows_per_page=1 << 24, write_statistics=False, store_schema=False,
            use_dictionary=[name for name in table.column_names if name != "value"],
        )  # fmt: skip
    for path in folder.glob("session-*.json"):
        path.write_text(json.dumps(json.loads(path.read_text()), separators=(",", ":")))


def load(results: Path) -> list[Run]:
    """Reads every packed run below a folder."""
    folders = sorted({path.parent for path in results.glob("*/session-*.json")})
    return [
        Run(each.name, read_metadata(each)["study"], read_run(each), read_events(each))
        for each in folders
    ]


def options_of(
    doc: str, arguments: list[str] | None, figure: str = "", several: bool = False
) -> argparse.Namespace:
    """Reads the command line of a program over results, which may draw a figure."""
    parser = argparse.ArgumentParser(description=doc.splitlines()[0])
    parser.add_argument("results", type=Path, nargs="+" if several else None)
    if figure:
        parser.add_argument("--figure", type=Path, help=figure)
    return parser.parse_args(arguments)
