"""What the code makes of recorded runs, and of switched calls: kept while code is folded.

    python -m tests.golden --record     writes tests/data/golden
    python -m tests.golden              compares with it, and ends with 1 at a difference

Numbers only, because sentences may change, and public names only. Hashes and indicators depend on
the processor, so tests compare them where PyTorch alone has the gradients that it had where they
were written.
"""

import argparse
import hashlib
import json
import sys
import tempfile
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import nn

from guardbit import MonitorSession
from guardbit.dashboards.tables import Recorded
from guardbit.monitor.replay import normalised_sites, replay
from guardbit.store import read_events, read_metadata, read_run
from tests import toys

ROOT = Path(__file__).parents[1]
DATA = ROOT / "tests" / "data" / "golden"


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


class _Layer(toys.Attention):
    """Attention that asks for a mask, grouped keys and the like."""

    def __init__(self, kind: str) -> None:
        super().__init__(4, 2 if kind == "grouped" else None, width=64)
        self.is_causal = kind in ("causal", "grouped")
        if kind in ("mask", "bias"):
            rows = torch.arange(24)
            seen = rows[:, None] - rows >= 0
            bias = -0.25 * (rows[:, None] - rows).abs().float()
            self.mask = seen if kind == "mask" else bias.masked_fill(~seen, -torch.inf)


def _model(kind: str) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(_Layer(kind), _Layer(kind))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter *= 3  # tokens attend to themselves, where delta is rounded worst
    return model


def _hash(tensors: list[torch.Tensor]) -> str:
    content = b"".join(x.detach().flatten().view(torch.uint8).numpy().tobytes() for x in tensors)
    return hashlib.sha256(content).hexdigest()[:16]


def _gradients(model: nn.Module) -> list[torch.Tensor]:
    torch.manual_seed(1)
    inputs = torch.randn(2, 24, 64)
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(inputs).float().square().mean()
    loss.backward()
    return [loss, *(p.grad for p in model.parameters() if p.grad is not None)]


#: Kinds of attention whose heads are switched.
KINDS = ("all", "causal", "grouped", "mask", "bias")


def unwatched() -> dict[str, str]:
    """Of loss and gradients without GuardBit, under the names that `hashes` has for no switch."""
    return {f"{kind}, none": _hash(_gradients(_model(kind))) for kind in KINDS}


def hashes() -> dict[str, str]:
    """Of loss and gradients with heads that are switched."""
    found = {"processor": torch.backends.cpu.get_cpu_capability(), "torch": torch.__version__}
    for kind, stabilizer in product(KINDS, ("none", "exact_delta", "compensated", "row_max")):
        model = _model(kind)
        with toys.instrumented(model) as inst:
            _gradients(model)
            model.zero_grad()
            try:
                inst.switch("*", stabilizer, heads=[0, 2])
                found[f"{kind}, {stabilizer}"] = _hash(_gradients(model))
            except ValueError:
                found[f"{kind}, {stabilizer}"] = "refused"
    return found


def measured() -> dict[str, list[float]]:
    """Indicators of a BF16 run with a switch at its third step; by indicator, step, site, head."""
    model = _model("grouped")
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    with tempfile.TemporaryDirectory() as folder:
        session = MonitorSession(
            model, every_n_train_steps=1, num_audited_heads=4, num_rows=24, dirpath=folder
        )
        for step in range(4):
            if step == 2:
                session.switch("1", "exact_delta", heads=[1, 3])
            with session.step(step) as record:
                optimizer.zero_grad()
                loss, *_ = _gradients(model)
                record.loss(loss)
            optimizer.step()
        session.close()
        frame = read_run(folder).sort_values(["indicator", "step", "site", "head"])
    grouped = frame.groupby("indicator")["value"]
    return {str(name): [float(f"{x:.6g}") for x in values] for name, values in grouped}


PARTS: dict[str, Callable[[], Any]] = {
    "replays": lambda: {run.as_posix(): judged(run) for run in recorded_runs()},
    "hashes": hashes,
    "measured": measured,
}


def main() -> int:
    """Records, or prints what differs."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--record", action="store_true")
    is_record = parser.parse_args().record
    num_differences = 0
    for name, make in PARTS.items():
        file, found = DATA / f"{name}.json", json.loads(json.dumps(make()))
        if is_record:
            lines = (f"{json.dumps(key)}: {json.dumps(value)}" for key, value in found.items())
            file.write_text("{\n" + ",\n".join(lines) + "\n}\n")
            continue
        expected = json.loads(file.read_text())
        # Runs that were committed later have no entry.
        for key in expected.keys() if name == "replays" else expected.keys() | found.keys():
            if expected.get(key) != found.get(key):
                num_differences += 1
                here, there = (str(x.get(key))[:300] for x in (found, expected))
                print(f"{name}: {key}: {here}, not {there}")
    return int(num_differences > 0)


if __name__ == "__main__":
    sys.exit(main())
