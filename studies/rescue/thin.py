"""Thins runs for the package: what `guardbit demo --recorded` shows.

A run that was made with the rules of an earlier time has the alarms of today's.

python -m studies.rescue.thin studies/rescue/results guardbit/recorded
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pandas as pd

from guardbit.judgement import SHARES
from guardbit.monitor.replay import normalised_sites, replay
from guardbit.records import Event, event_of
from guardbit.store import RunWriter, read_events, read_metadata, read_run
from guardbit.store.reading import samples_of
from studies.rescue.packed import AUDITS, EACH_SAMPLE, SHOWN, begun_at, squeeze

INDICATORS = (
    "w_q_spectral_norm", "max_logit", "multiple_maxima_bf16", "attention_entropy",
    "delta_bias_cumulative", "key_common_mode", "loss", *SHARES,
)  # fmt: skip
#: Steps between the samples kept, of heads and of the loss. Kept besides: those of first alarms, of
#: all steps what rules read at each, and of copies audits.
HEADS_EVERY, LOSS_EVERY = 200, 20
#: Significant digits.
DIGITS = 4


def thin(sources: Sequence[Path], target: Path) -> None:
    """Writes the thin copy of a run, or of a start and of the copy that went on from it."""
    *starts, source = sources
    begin, events = begun_at(source.name) or math.inf, read_events(source)
    before = [frame[frame["step"] <= begin] for frame in map(read_run, starts)]
    frame = pd.concat([*before, read_run(source)])
    alarms = set(events.loc[events["kind"] == "alarm"].drop_duplicates("site")["step"])
    of_run = frame["site"] == ""
    is_kept = frame["step"] % np.where(of_run, LOSS_EVERY, HEADS_EVERY) == 0
    is_kept |= (~of_run & frame["step"].isin(alarms)) | frame["indicator"].isin(
        [*EACH_SAMPLE, *SHARES]
    )
    frame = frame[is_kept & frame["indicator"].isin([*INDICATORS, *(AUDITS if starts else ())])]
    frame = frame.assign(value=[float(f"{value:.{DIGITS}g}") for value in frame["value"]])
    metadata = {**read_metadata(source), "recorded": f"a thin copy of {source.name}"}
    happened: list[Event] = []
    if not starts:
        found = replay(frame, normalised=normalised_sites(metadata))
        metadata["settings"]["heads_judged_by"] = found.judged_by
        events = events[~events["kind"].isin(("alarm", "advisory", "verdict"))]
        happened += map(event_of, found.alarms)
    happened += [Event(**event) for event in events.to_dict("records")]
    with RunWriter(target, metadata=metadata) as writer:
        writer.add(samples_of(frame))
        for event in sorted(happened, key=lambda event: event.step):
            writer.event(event)
    squeeze(target)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("results", type=Path)
    parser.add_argument("target", type=Path)
    settings = parser.parse_args()
    for name, runs in SHOWN.items():
        thin([settings.results / run for run in runs], settings.target / name)


if __name__ == "__main__":
    main()
