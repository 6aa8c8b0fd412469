"""Thins a failed run and its switched copy for the package: what `guardbit demo --recorded` shows.

Alarms are those of today's rules, in place of those of the rules that the runs were made with.

python -m studies.rescue.thin studies/rescue/results guardbit/recorded
"""

from __future__ import annotations

import argparse
from pathlib import Path

from guardbit.monitor.replay import normalised_sites, replay
from guardbit.records import Event, event_of
from guardbit.store import RunWriter, read_events, read_metadata, read_run
from guardbit.store.reading import samples_of
from studies.rescue.packed import SHOWN, squeeze

INDICATORS = (
    "w_q_spectral_norm", "max_logit", "multiple_maxima_bf16", "attention_entropy",
    "delta_bias_cumulative", "loss",
)  # fmt: skip
#: Steps between the samples kept, of heads and of the loss; those of first alarms are kept besides.
HEADS_EVERY, LOSS_EVERY = 200, 20
#: Why heads were switched.
WHY = "at the first alarm of the rules that the run was made with"
#: Significant digits.
DIGITS = 4


def thin(source: Path, target: Path) -> None:
    """Writes the thin copy of a run, with its switches and today's alarms."""
    frame, events = read_run(source), read_events(source)
    alarms = set(events.loc[events["kind"] == "alarm"].drop_duplicates("site")["step"])
    of_run = frame["site"] == ""
    is_kept = (of_run & (frame["step"] % LOSS_EVERY == 0)) | (
        ~of_run & ((frame["step"] % HEADS_EVERY == 0) | frame["step"].isin(alarms))
    )
    frame = frame[is_kept & frame["indicator"].isin(INDICATORS)]
    frame = frame.assign(value=[float(f"{value:.{DIGITS}g}") for value in frame["value"]])
    metadata = {**read_metadata(source), "recorded": f"a thin copy of {source.name}"}
    found = replay(frame, normalised=normalised_sites(metadata))
    metadata["settings"]["heads_judged_by"] = found.judged_by
    kept = events[~events["kind"].isin(("alarm", "advisory", "verdict"))].to_dict("records")
    happened = [Event(**{**event, "why": WHY}) for event in kept if event["kind"] == "switch"]
    happened += [Event(**event) for event in kept if event["kind"] != "switch"]
    happened += map(event_of, found.alarms)
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
    for name, run in SHOWN.items():
        thin(settings.results / run, settings.target / name)


if __name__ == "__main__":
    main()
