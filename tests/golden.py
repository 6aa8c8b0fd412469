"""What the code makes of recorded runs: kept while code is folded.

    python -m tests.golden --record     writes tests/data/golden
    python -m tests.golden              compares with it, and ends with 1 at a difference

Numbers only, because sentences may change, and public names only.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from guardbit.dashboards.tables import Recorded
from guardbit.monitor.replay import normalised_sites, replay
from guardbit.store import read_events, read_metadata, read_run

ROOT = Path(__file__).parents[1]
REPLAYS = ROOT / "tests" / "data" / "golden" / "replays.json"


#: Of a judgement; the rest are sentences, or follow from these and from the telemetry.
OUTCOME = (
    "outcome", "verdict", "severity", "ended", "cause", "first_alarm", "alarmed", "departed",
    "lead", "first_switch", "switched", "fallen", "still_growing", "alarming_again", "missing_loss",
    "loss_rise", "largest_logit", "logit_before", "bad_gradients_since", "nonfinite",
)  # fmt: skip


def recorded_runs() -> list[Path]:
    """All committed runs, relative to the checkout."""
    below = ("guardbit/recorded", "studies/rescue", "examples")
    found = {file.parent for folder in below for file in (ROOT / folder).rglob("*.parquet")}
    found |= set((ROOT / "tests/data/runs").glob("*.csv.gz"))
    return sorted(path.relative_to(ROOT) for path in found)


def judged(run: Path) -> dict[str, Any]:
    """Alarms of a replay, the events that were recorded, and the outcome of a run."""
    path = ROOT / run
    frame, metadata = read_run(path), read_metadata(path)
    found, events = replay(frame, normalised=normalised_sites(metadata)), read_events(path)
    outcome = Recorded(frame, events, metadata).judgement.as_json()
    del outcome["cause"]["why"]  # a sentence
    kept = ("step", "kind", "site", "heads", "rule", "stabilizer", "verdict")
    return {
        "verdict": found.judgement(metadata=metadata).verdict,
        "alarms": [[a.step, a.rule, a.site, list(a.heads)] for a in found.alarms],
        "advisories": [[a.step, a.rule, a.site, list(a.heads)] for a in found.advisories],
        "events": [[_plain(event[name]) for name in kept] for _, event in events.iterrows()],
        "outcome": {name: outcome[name] for name in OUTCOME},
        "samples": len(frame),
        "sum": float(f"{frame['value'].abs().where(lambda x: x < 1e30).sum():.6g}"),
    }


def _plain(x: Any) -> Any:
    return list(x) if isinstance(x, tuple | list) else x.item() if hasattr(x, "item") else x


def main() -> int:
    """Records, or prints what differs."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--record", action="store_true")
    is_record = parser.parse_args().record
    found = {run.as_posix(): judged(run) for run in recorded_runs()}
    found = json.loads(json.dumps(found))
    if is_record:
        lines = (f"{json.dumps(key)}: {json.dumps(value)}" for key, value in found.items())
        REPLAYS.write_text("{\n" + ",\n".join(lines) + "\n}\n")
        return 0
    num_differences = 0
    # Runs that were committed later have no entry.
    for key, expected in json.loads(REPLAYS.read_text()).items():
        if found.get(key) != expected:
            num_differences += 1
            here, there = (str(x)[:300] for x in (found.get(key), expected))
            print(f"{key}: {here}, not {there}")
    return int(num_differences > 0)


if __name__ == "__main__":
    sys.exit(main())
